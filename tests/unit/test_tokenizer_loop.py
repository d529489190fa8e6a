"""The tokenizer's loop against a scheduler with random timing: one end each, and exactly the right text."""

from __future__ import annotations

import random
import threading
import time
from codecs import utf_8_decode
from typing import Any

import msgspec
import numpy as np
import pytest

from sapwood.srt.config import ModelSource
from sapwood.srt.messages import (
    Abort,
    Admitted,
    Ask,
    Cancel,
    ChatPrompt,
    Chunk,
    Done,
    Ended,
    Finish,
    Generate,
    IdsPrompt,
    Kept,
    Started,
    StopAt,
    Submit,
    TextPrompt,
    Tokens,
    Verdict,
    pack,
    unpack,
)
from sapwood.srt.params import Parsing, SamplingParams
from sapwood.srt.tokenizer import process
from sapwood.srt.tokenizer.background import LONG_CHARS, Background
from sapwood.srt.tokenizer.delivery import Delivery
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.parsers.output import OutputParser
from sapwood.srt.tokenizer.parts import Encoded
from sapwood.srt.tokenizer.process import TokenizerLoop
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.vocabulary import Vocabulary
from tests.tokenizer_kinds import END, byte_level

VOCABULARY = Vocabulary(byte_level())
EOS: int = byte_level().token_to_id(END)
SOURCE = ModelSource(
    name="small", format="dummy", path="", files=[], architecture="", config={}, vocab_size=512,
    context_length=64, eos_ids=[EOS], tokenizer_file=None, template_vars={},
    chat_template="{{ messages[0].more | tojson }}",
    sampling_defaults={},
)  # fmt: skip
VERDICT = Verdict(0, "cold")


class Box:
    """An outbox that keeps what it gets; `open` False refuses."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []
        self.open = True

    def send(self, *batch: Any) -> bool:
        if self.open:
            self.frames.append(list(batch))
        return self.open

    def take(self) -> list[Any]:
        taken = [message for frame in self.frames for message in frame]
        self.frames.clear()
        return taken


class Bench:
    """A loop with its two neighbours."""

    def __init__(self) -> None:
        self.scheduler, self.server = Box(), Box()
        encoder = PromptEncoder(SOURCE, byte_level(), True)
        self.loop = TokenizerLoop(0, SOURCE, encoder, VOCABULARY, self.scheduler, self.server, Box())

    def step(self, *batch: Any) -> None:
        self.loop.handle(list(batch))
        self.loop.work_some()
        self.loop.flush()

    def submit(self, rid: str = "r", **params: Any) -> int:
        self.step(Generate(rid, IdsPrompt(pack([5, 6])), SamplingParams(**params)))
        (submit,) = self.scheduler.take()
        assert isinstance(submit, Submit)
        return submit.key


def tokens(*pairs: tuple[int, int]) -> Tokens:
    return Tokens(np.array([k for k, _ in pairs], dtype="<i8").tobytes(), pack([t for _, t in pairs]))


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text).ids
    return ids


def kept_of(ids: list[int], text: str) -> Kept:
    """The most tokens whose batch decode the text begins with."""
    decoded = (byte_level().decode(ids[:tokens]) for tokens in range(len(ids) + 1))
    tokens, chars = max((i, len(part)) for i, part in enumerate(decoded) if text.startswith(part))
    return Kept(tokens, text[chars:])


def expected(ids: list[int], stops: list[str], min_tokens: int, limit: int) -> tuple[str, Finish]:
    """What a choice should come to: ids run to EOS or `limit`; text is the batch decode, cut at a stop."""
    end = ids.index(EOS) + 1 if EOS in ids[:limit] else limit
    shown = ids[: end - 1] if EOS in ids[:limit] else ids[:limit]
    for n in range(max(min_tokens, 1), end + 1):
        text = stable(shown, n, end)
        before = stable(shown, n - 1, end)
        hits = [
            (at, at + len(stop), stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if hits:
            at, _, stop = min(hits)
            return text[:at], Finish("stop", stop, n, kept=kept_of(shown[:n], text[:at]))
    text = byte_level().decode(shown)
    return text, Finish("stop", EOS, end) if EOS in ids[:limit] else Finish("length", None, end)


def stable(shown: list[int], n: int, end: int) -> str:
    """The text of the first n tokens without an incomplete character, which only the end makes visible."""
    if n >= end:
        return str(byte_level().decode(shown))
    raw = b"".join(VOCABULARY.describe(token)[1] for token in shown[:n] if token not in VOCABULARY.special)
    return utf_8_decode(raw, "replace", False)[0]


class World:
    """A scheduler and a server that delay, batch and cross messages at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = Bench()
        self.plans: dict[int, list[int]] = {}
        self.all_plans: dict[int, list[int]] = {}
        self.at: dict[int, int] = {}
        self.requests: dict[str, Submit] = {}
        self.limit: dict[str, int] = {}
        self.to_loop: list[Any] = []
        self.late: list[Any] = []
        self.got: list[Any] = []
        self.aborted: set[str] = set()

    def run(self, count: int) -> None:
        rng = self.random
        for i in range(count):
            self.to_loop.append(self._generate(f"r{i}"))
        for _ in range(400):
            self._schedule()
            batch = self.to_loop[: rng.randrange(1, 12)]
            del self.to_loop[: len(batch)]
            self.bench.step(*batch)
            self.late += self.bench.scheduler.take()
            self.got += self.bench.server.take()
            if rng.random() < 0.05:
                rid = f"r{rng.randrange(count)}"
                self.aborted.add(rid)
                self.to_loop.append(Abort(rid))
            if not self.plans and not self.to_loop and len(self.requests) == count:
                break

    def _generate(self, rid: str) -> Generate:
        rng = self.random
        stops = [rng.choice(["the", "e d", "dog", "é", "🌳", "n a", ".x"]) for _ in range(rng.randrange(3))]
        self.limit[rid] = rng.randrange(1, 25)
        min_tokens = min(rng.choice([0, 0, 5]), self.limit[rid])
        params = SamplingParams(
            n=rng.randrange(1, 4), stop=stops, max_tokens=self.limit[rid], min_tokens=min_tokens
        )
        return Generate(rid, IdsPrompt(pack([5])), params)

    def _schedule(self) -> None:
        """One step: read some of what came in (StopAt may be late), then a token for each running choice."""
        rng = self.random
        while self.late and rng.random() < 0.8:
            self._read(self.late.pop(0))
        pairs, done = [], []
        for key in list(self.plans):
            if rng.random() < 0.3:
                continue
            token = self.plans[key][self.at[key]]
            self.at[key] += 1
            pairs.append((key, token))
            base, rid = self._owner(key)
            if token == EOS:
                done.append(Done(base, key - base, self.at[key], "stop", EOS))
            elif self.at[key] == self.limit[rid]:
                done.append(Done(base, key - base, self.at[key], "length"))
        if pairs:
            self.to_loop.append(tokens(*pairs))
        for message in done:
            self._end(message)

    def _read(self, message: Any) -> None:
        if isinstance(message, Submit):
            self.requests[message.rid] = message
            for choice in range(message.params.n):
                words = ids_of("the quick dog 🌳 éa na and the. again the lazy dog, end ")
                plan = [*self.random.sample(words, 20), *self.random.choices(words, k=20)]
                if self.random.random() < 0.5:
                    plan[self.random.randrange(25)] = EOS
                self.plans[message.key + choice], self.at[message.key + choice] = plan, 0
                self.all_plans[message.key + choice] = plan
            self.to_loop.append(Admitted(message.key, VERDICT, 0.0))
        elif isinstance(message, StopAt):
            if message.key + message.choice in self.plans:
                self._end(Done(message.key, message.choice, message.n, "stop"))
        elif isinstance(message, Cancel):
            for key in [k for k in self.plans if self._owner(k)[0] == message.key]:
                self._end(Done(message.key, key - message.key, self.at[key], "abort"))

    def _owner(self, key: int) -> tuple[int, str]:
        return next((s.key, rid) for rid, s in self.requests.items() if s.key <= key < s.key + s.params.n)

    def _end(self, message: Done) -> None:
        del self.plans[message.key + message.choice]
        self.to_loop.append(message)


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_once_with_the_right_text(seed: int) -> None:
    world = World(seed)
    world.run(12)
    ends = [m.rid for m in world.got if isinstance(m, Ended)]
    assert sorted(ends) == sorted(f"r{i}" for i in range(12))
    for rid in ends:
        mine = [m for m in world.got if getattr(m, "rid", None) == rid]
        assert mine[-1] == Ended(rid)
        submit = world.requests.get(rid)
        n = submit.params.n if submit is not None else sum(m.finish is not None for m in mine[:-1])
        assert [type(m) for m in mine].count(Started) <= 1
        for choice in range(n):
            check_choice(world, rid, [m for m in mine if isinstance(m, Chunk) and m.choice == choice], choice)


def check_choice(world: World, rid: str, chunks: list[Chunk], choice: int) -> None:
    assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    finish = chunks[-1].finish
    assert finish is not None
    ids = [int(i) for c in chunks for i in unpack(c.ids)]
    assert len(ids) == finish.completion_tokens
    if rid not in world.requests:
        assert finish == Finish("abort")
        return
    submit = world.requests[rid]
    plan = world.all_plans[submit.key + choice]
    assert ids == plan[: len(ids)]
    if finish.reason == "abort":
        assert rid in world.aborted
        return
    params = submit.params
    text, known = expected(plan, params.stop, params.min_tokens, world.limit[rid])
    assert ("".join(c.text for c in chunks), finish) == (text, known)


def test_all_chunks_of_a_step_go_out_as_one_frame() -> None:
    bench = Bench()
    keys = [bench.submit(f"r{i}") for i in range(32)]
    bench.server.frames.clear()
    bench.step(tokens(*((key, 40 + i) for i, key in enumerate(keys))))
    assert [len(frame) for frame in bench.server.frames] == [32]


def test_a_full_queue_to_the_scheduler_ends_the_request() -> None:
    bench = Bench()
    bench.scheduler.open = False
    bench.step(Generate("r", IdsPrompt(pack([5])), SamplingParams()), Ask(3, "state"))
    answer, ended = sorted(bench.server.take(), key=lambda m: type(m).__name__)
    assert (ended.error.status, ended.error.code) == (429, "queue_full")
    assert (answer.call, answer.error.status) == (3, 429)
    bench.scheduler.open = True
    bench.step(Abort("r"))
    assert bench.scheduler.take() == []


def test_a_stop_that_finds_the_queue_full_is_told_later() -> None:
    bench = Bench()
    key = bench.submit(stop=["b"])
    bench.scheduler.open = False
    bench.step(tokens((key, ids_of("b")[0])))
    bench.step(Abort("r"))
    bench.scheduler.open = True
    bench.step()
    assert bench.scheduler.take() == [StopAt(key, 0, 1), Cancel(key)]


def test_a_server_that_does_not_read_loses_output_but_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.loop._server = Delivery(bench.server, limit=20)
    slow, done = bench.submit("slow"), bench.submit("done")
    bench.server.open = False
    bench.step(tokens((done, 40)), Done(done, 0, 1, "length"))
    for _ in range(30):
        bench.step(tokens((slow, 40)))
    assert bench.scheduler.take() == [Cancel(slow)]
    bench.server.open = True
    bench.step(tokens((slow, 40)), Done(slow, 0, 20, "abort"))
    ends = {m.rid: m.error for m in bench.server.take()}
    assert {rid: error.status for rid, error in ends.items()} == {"slow": 503, "done": 503}


def test_parameters_are_checked_again() -> None:
    bench = Bench()
    bench.step(Generate("r", IdsPrompt(pack([5])), SamplingParams(n=0)))
    bench.step(Generate("s", IdsPrompt(pack([5])), SamplingParams(stop=[""])))
    assert [(m.rid, m.error.param) for m in bench.server.take()] == [("r", "n"), ("s", "stop")]


def test_a_deeply_nested_chat_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    bench = Bench()
    bench.step(
        Generate("r", ChatPrompt([{"role": "user", "content": "x", "more": nested}]), SamplingParams())
    )
    while not (got := bench.server.take()):
        bench.step()
    assert (got[0].error.status, got[0].error.param) == (400, "messages")


def test_an_unforeseen_failure_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(prompt: Any) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(bench.loop._encoder, "encode", broken)
    bench.step(Generate("r", IdsPrompt(pack([5])), SamplingParams()))
    (ended,) = bench.server.take()
    assert (ended.error.status, "ZeroDivisionError" in ended.error.message) == (500, True)
    monkeypatch.undo()
    assert bench.submit("r") > 0


@pytest.mark.parametrize("step", ["feed", "finish"])
def test_a_parser_that_fails_ends_its_request_only(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(*_given: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr(OutputParser, step, broken)
    prompt, parsing = IdsPrompt(pack([5, 6])), Parsing("hermes", ["f"])
    bench.step(Generate("r", prompt, SamplingParams(n=2), parsing=parsing))
    (submit,) = bench.scheduler.take()
    other = bench.submit("s")
    bench.step(tokens((submit.key, 40), (submit.key + 1, 40), (other, 40)))
    bench.step(Done(submit.key, 0, 1, "length"), Done(submit.key, 1, 1, "abort"), tokens((other, 41)))
    said = bench.server.take()
    ends = {m.rid: m.error for m in said if isinstance(m, Ended)}
    assert [(rid, error.status) for rid, error in ends.items() if error] == [("r", 500)]
    assert "RecursionError" in ends["r"].message
    assert bench.scheduler.take() == [Cancel(submit.key)]
    assert [unpack(m.ids).tolist() for m in said if isinstance(m, Chunk) and m.rid == "s"] == [[40], [41]]


def test_new_prompts_do_not_hold_up_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of prompts is encoded a little at a time, with a look at the inbox every few milliseconds."""
    monkeypatch.setattr(process, "INTAKE_SECONDS", 0.0)
    bench = Bench()
    burst = [Generate(f"r{i}", TextPrompt("some text"), SamplingParams()) for i in range(5)]
    bench.step(*burst, Abort("r3"))
    assert len(bench.scheduler.take()) == 1
    assert [m.rid for m in bench.server.take() if isinstance(m, Ended)] == ["r3"]
    for _ in range(5):
        bench.step()
    assert [m.rid for m in bench.scheduler.take()] == ["r1", "r2", "r4"]


def test_a_prompt_aborted_while_a_thread_encodes_it_is_never_submitted() -> None:
    bench = Bench()
    go, plain = threading.Event(), bench.loop._encoder.encode

    def slow(job: Any) -> Encoded:
        go.wait(20)
        return Encoded(plain(job[1].prompt))

    bench.loop._background = Background(slow, "not encoded")
    long = TextPrompt("x" * (LONG_CHARS + 1))
    bench.step(Generate("r", long, SamplingParams()), Generate("s", long, SamplingParams()))
    bench.step(Abort("r"), Generate("r", IdsPrompt(pack([5])), SamplingParams()))
    assert [m for m in bench.server.take() if isinstance(m, Ended)] == [Ended("r")]
    assert [unpack(m.ids).tolist() for m in bench.scheduler.take()] == [[5]]
    go.set()
    while bench.loop._background.pending:
        bench.step()
    assert [m.rid for m in bench.scheduler.take()] == ["s"]
    assert bench.server.take() == []


@pytest.mark.parametrize(
    "prompt", [TextPrompt("x" * (LONG_CHARS + 1)), ChatPrompt([{"role": "user", "more": "x"}])]
)
def test_what_is_aborted_while_it_waits_for_a_thread_is_never_encoded(
    prompt: TextPrompt | ChatPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    go, plain = threading.Event(), bench.loop._encoder.encode
    encoded: list[Any] = []

    def slow(given: Any) -> bytes:
        encoded.append(given)
        go.wait(20)
        return plain(given)

    monkeypatch.setattr(bench.loop._encoder, "encode", slow)
    bench.step(*(Generate(f"busy{i}", prompt, SamplingParams()) for i in range(2)))
    while len(encoded) < 2:
        time.sleep(0.001)
    for i in range(30):
        bench.step(Generate(f"r{i}", prompt, SamplingParams()), Abort("unknown"))
        bench.step(Abort(f"r{i}"))
    assert sum(isinstance(m, Ended) for m in bench.server.take()) == 30
    bench.step(Generate("last", prompt, SamplingParams()))
    go.set()
    submitted: list[str] = []
    while len(submitted) < 3:
        bench.step()
        submitted += [m.rid for m in bench.scheduler.take()]
    assert sorted(submitted) == ["busy0", "busy1", "last"]
    assert len(encoded) == 3


def test_an_aborted_chats_rendering_is_broken_off() -> None:
    """The processes that render are few: they are not for those who have left."""
    bench = Bench()
    endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    source = msgspec.structs.replace(
        SOURCE, chat_template="{% if messages | length > 1 %}" + endless + "{% endif %}x"
    )
    encoder = PromptEncoder(source, byte_level(), True)
    bench.loop = TokenizerLoop(0, source, encoder, VOCABULARY, bench.scheduler, bench.server, Box())
    encoder.close()
    # With so much time that none ends by itself.
    encoder._template = template = IsolatedTemplate(source.chat_template or "", {}, 60.0)
    message = {"role": "user", "content": ""}
    for i in range(process.CHAT_THREADS):
        bench.step(Generate(f"bad{i}", ChatPrompt([message] * 2), SamplingParams()))
    while len(template._busy) < process.CHAT_THREADS:
        time.sleep(0.001)
    bench.step(Generate("good", ChatPrompt([message]), SamplingParams()))
    assert bench.server.take() == []
    bench.step(*(Abort(f"bad{i}") for i in range(process.CHAT_THREADS)))
    ends = [m for m in bench.server.take() if isinstance(m, Ended)]
    assert ends == [Ended(f"bad{i}") for i in range(process.CHAT_THREADS)]
    submitted: list[Any] = []
    deadline = time.monotonic() + 15
    while not submitted:
        assert time.monotonic() < deadline
        bench.step()
        submitted = bench.scheduler.take()
    assert [(m.rid, unpack(m.ids).tolist()) for m in submitted] == [("good", ids_of("x"))]
    assert bench.server.take() == []
    encoder.close()


def test_a_token_is_cheap() -> None:
    """64 streams with a stop string: the best step, per token, against many times what it takes."""
    bench = Bench()
    keys = [bench.submit(f"r{i}", stop=["<never>"]) for i in range(64)]
    words = ids_of("the dog sleeps, again and again")
    seconds = []
    for i in range(200):
        step = tokens(*((key, words[i % len(words)]) for key in keys))
        begin = time.perf_counter()
        bench.step(step)
        seconds.append(time.perf_counter() - begin)
        bench.server.take()
    assert min(seconds) / len(keys) < 50e-6
