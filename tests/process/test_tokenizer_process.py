"""The tokenizer process over real sockets; the test plays the server and the scheduler."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zmq

from sapwood.srt import config, messages
from sapwood.srt.channel import Outbox, address
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import ContextTooLong, SapwoodError
from sapwood.srt.lifeline import Lifeline, Wire
from sapwood.srt.messages import (
    Abort,
    Admitted,
    Answer,
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
    Refused,
    Started,
    Stats,
    StopAt,
    Submit,
    TextLogprob,
    TextPrompt,
    TokenLogprob,
    Tokens,
    Verdict,
    pack,
    unpack,
)
from sapwood.srt.orders import Boot, Drain, Fatal, Ready
from sapwood.srt.params import SamplingParams
from sapwood.srt.tokenizer import process
from tests.tokenizer_kinds import END, START, byte_level

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('I do not like this') }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VERDICT = Verdict(3, "diverged")
INDEX = 2
WAIT = 20.0


class Peer:
    """A neighbour's inbox, read frame by frame."""

    def __init__(self, directory: str, role: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(directory, role))
        self._left: list[Any] = []

    def frame(self, wait: float = WAIT) -> list[Any]:
        assert self._socket.poll(int(wait * 1000)), "nothing came"
        return messages.decode(self._socket.recv())

    def next(self, wait: float = WAIT) -> Any:
        while not self._left:
            self._left = self.frame(wait)
        return self._left.pop(0)

    def until_end(self, rid: str) -> list[Any]:
        """All messages of a request, up to its Ended."""
        got: list[Any] = []
        while not (got and isinstance(got[-1], Ended)):
            message = self.next()
            assert message.rid == rid
            got.append(message)
        return got

    def silent(self, seconds: float = 0.15) -> bool:
        return not self._left and self._socket.poll(int(seconds * 1000)) == 0

    def close(self) -> None:
        self._socket.close()


class FakeLifeline:
    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.facts: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self.on_orphan: Any = None

    def ready(self, facts: dict[str, str] | None = None, max_request_tokens: int = 0) -> None:
        self.facts.put(facts or {})


class Bench:
    """A running tokenizer process (in a thread) between a server and a scheduler that the test plays."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.server, self.scheduler = Peer(str(directory), "server"), Peer(str(directory), "scheduler")
        self.boot = boot(directory, **options)
        self._outbox = Outbox(str(directory), "tokenizer", INDEX)
        self._lifeline = FakeLifeline()
        self._thread = threading.Thread(target=process.main, args=(self.boot, cast(Lifeline, self._lifeline)))
        self._thread.start()
        self.facts = self._lifeline.facts.get(timeout=WAIT)

    def send(self, *batch: Any) -> None:
        assert self._outbox.send(*batch)

    def submit(self, prompt: Any = None, rid: str = "r", **params: Any) -> Submit:
        """Send a Generate and play the scheduler that admits it."""
        self.send(Generate(rid, prompt or TextPrompt("the dog"), SamplingParams(**params), "salt", 1.5))
        submit = self.scheduler.next()
        assert isinstance(submit, Submit)
        self.send(Admitted(submit.key, VERDICT, 0.25))
        assert self.server.next() == Started(rid, submit.ids, VERDICT, 0.25)
        return submit

    def text(self, submit: Submit, text: str, choice: int = 0) -> int:
        """Play a text's tokens, one a step, and give their number."""
        ids = encoded(text)
        for token in ids:
            self.send(step((submit.key + choice, token)))
        return len(ids)

    def refusal(self, prompt: Any, **params: Any) -> Any:
        self.send(Generate("bad", prompt, SamplingParams(**params)))
        ended = self.server.next()
        assert isinstance(ended, Ended)
        assert ended.rid == "bad"
        return ended.error

    def close(self) -> None:
        self._lifeline.commands.put(Drain(0.0))
        self._thread.join(WAIT)
        alive = self._thread.is_alive()
        for box in (self._outbox, self.server, self.scheduler):
            box.close()
        assert not alive


def boot(directory: Path, **options: Any) -> Boot:
    path = directory / "tokenizer.json"
    byte_level().save(str(path))
    source = ModelSource(
        name="small", format="dummy", path="", files=[], architecture="", config={}, vocab_size=512,
        context_length=64, eos_ids=[EOS], tokenizer_file=str(path), chat_template=CHATML, template_vars={},
        sampling_defaults={},
    )  # fmt: skip
    return Boot(config.make(**options), source, str(directory), "tokenizer", INDEX)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sapwood-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def bench(directory: Path) -> Iterator[Bench]:
    running = Bench(directory)
    yield running
    running.close()


def encoded(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text).ids
    return ids


EOS: int = byte_level().token_to_id(END)


def step(*pairs: tuple[int, int], logprobs: dict[int, TokenLogprob] | None = None) -> Tokens:
    keys = np.array([key for key, _ in pairs], dtype="<i8").tobytes()
    return Tokens(keys, pack([token for _, token in pairs]), logprobs or {})


def joined(got: list[Any], choice: int = 0) -> tuple[str, list[int], Finish | None]:
    """(text, ids, finish) of a choice's chunks, of which only the last may have a finish."""
    chunks = [m for m in got if isinstance(m, Chunk) and m.choice == choice]
    assert all(c.finish is None for c in chunks[:-1])
    ids = [int(i) for c in chunks for i in unpack(c.ids)]
    return "".join(c.text for c in chunks), ids, chunks[-1].finish


def test_a_request_from_text_to_text(bench: Bench) -> None:
    assert "byte-level" in bench.facts["tokenizer"]
    submit = bench.submit(TextPrompt("the dog"), max_tokens=9)
    assert submit.key >> 40 == submit.tokenizer == INDEX
    assert unpack(submit.ids).tolist() == encoded("the dog")
    assert (submit.rid, submit.namespace, submit.arrived) == ("r", "salt", 1.5)
    assert submit.params == SamplingParams(max_tokens=9)
    n = bench.text(submit, "sleeps é🌳 on")
    bench.send(Done(submit.key, 0, n, "length"))
    got = bench.server.until_end("r")
    assert joined(got) == ("sleeps é🌳 on", encoded("sleeps é🌳 on"), Finish("length", None, n))
    assert got[-1] == Ended("r")


def test_a_chat_is_rendered(bench: Bench) -> None:
    submit = bench.submit(ChatPrompt([{"role": "user", "content": f"hi{END}"}]))
    ids = unpack(submit.ids).tolist()
    assert (
        byte_level().decode(ids, skip_special_tokens=False)
        == f"{START}user\nhi{END}{END}\n{START}assistant\n"
    )
    assert ids.count(EOS) == 1


def test_keys_of_choices_follow_each_other(bench: Bench) -> None:
    first, second = bench.submit(rid="a", n=3), bench.submit(rid="b")
    assert second.key == first.key + 3


def test_what_cannot_be_served_ends_with_the_reason(bench: Bench) -> None:
    refused = bench.refusal(ChatPrompt([{"role": "user", "content": "refuse"}]))
    assert (refused.status, refused.message, refused.param) == (400, "I do not like this", "messages")
    assert "empty" in bench.refusal(TextPrompt("")).message
    assert "512" in bench.refusal(IdsPrompt(pack([512]))).message
    picture = [{"role": "user", "content": [{"type": "image_url"}]}]
    assert "image_url" in bench.refusal(ChatPrompt(picture)).message
    both = ChatPrompt([{"role": "user", "content": "x"}], add_generation_prompt=True, continue_final=True)
    assert bench.refusal(both).param == "continue_final_message"
    assert bench.scheduler.silent()


def test_a_refusal_by_the_scheduler_ends_the_request(bench: Bench) -> None:
    bench.send(Generate("r", IdsPrompt(pack([7] * 100)), SamplingParams()))
    submit = bench.scheduler.next()
    error = ContextTooLong("the prompt has 100 tokens, the limit is 64").info()
    bench.send(Refused(submit.key, error))
    assert bench.server.until_end("r") == [Ended("r", error)]


def test_all_chunks_of_a_step_come_in_one_frame(bench: Bench) -> None:
    submits = [bench.submit(rid=f"r{i}") for i in range(8)]
    bench.send(step(*((s.key, 40 + i) for i, s in enumerate(submits))))
    frame = bench.server.frame()
    assert [(m.rid, unpack(m.ids).tolist()) for m in frame] == [(f"r{i}", [40 + i]) for i in range(8)]


def test_no_part_of_a_stop_string_leaks(bench: Bench) -> None:
    submit = bench.submit(stop=["DEFGHIJ"], max_tokens=100)
    bench.text(submit, "ABCDEFGHIJKL")
    stop_at = bench.scheduler.next()
    assert (stop_at.key, stop_at.choice) == (submit.key, 0)
    bench.send(Done(submit.key, 0, stop_at.n, "stop"))
    got = bench.server.until_end("r")
    text, ids, finish = joined(got)
    assert finish is not None
    assert finish.kept is not None
    assert (text, finish) == ("ABC", Finish("stop", "DEFGHIJ", stop_at.n, kept=finish.kept))
    assert byte_level().decode(ids[: finish.kept.tokens]) + finish.kept.rest == text
    assert len(ids) == stop_at.n
    assert not any(set("DEFGHIJKL") & set(m.text) for m in got[:-1])


def test_text_that_is_not_the_stop_string_comes_later(bench: Bench) -> None:
    submit = bench.submit(stop=["DEFGHIJ"])
    n = bench.text(submit, "ABCDEFGXYZ DEF")
    bench.send(Done(submit.key, 0, n, "length"))
    assert joined(bench.server.until_end("r"))[0] == "ABCDEFGXYZ DEF"
    assert bench.scheduler.silent()


@pytest.mark.parametrize("late", [("length", None, 0), ("length", None, 2), ("stop", EOS, 1)])
def test_the_lower_position_wins_when_two_ends_cross(bench: Bench, late: tuple[Any, Any, int]) -> None:
    """The scheduler's own end was on its way when the stop string was found at an earlier token."""
    reason, matched, after = late
    submit = bench.submit(stop=["!"], max_tokens=100)
    hit = bench.text(submit, "dogs!")
    more = [40, EOS][:after]
    for token in more:
        bench.send(step((submit.key, token)))
    bench.send(Done(submit.key, 0, hit + after, reason, matched))
    assert bench.scheduler.next() == StopAt(submit.key, 0, hit)
    text, ids, finish = joined(bench.server.until_end("r"))
    assert (text, ids, finish) == ("dogs", encoded("dogs!"), Finish("stop", "!", hit, kept=Kept(hit - 1, "")))


def test_stop_strings_are_not_acted_on_before_min_tokens(bench: Bench) -> None:
    text = "a!b!c"
    submit = bench.submit(stop=["!"], min_tokens=3, max_tokens=9)
    bench.text(submit, text)
    stop_at = bench.scheduler.next()
    assert stop_at.n == len(encoded("a!b!"))
    bench.send(Done(submit.key, 0, stop_at.n, "stop"))
    assert joined(bench.server.until_end("r"))[0] == "a!b"


def test_eos_is_counted_and_not_shown(bench: Bench) -> None:
    for rid, params in (("r", {}), ("s", {"skip_special_tokens": False})):
        submit = bench.submit(rid=rid, **cast(Any, params))
        n = bench.text(submit, "dog")
        bench.send(step((submit.key, EOS)), Done(submit.key, 0, n + 1, "stop", EOS))
        text, ids, finish = joined(bench.server.until_end(rid))
        assert (text, ids) == ("dog", [*encoded("dog"), EOS])
        assert finish == Finish("stop", EOS, n + 1)


def test_an_ordinary_stop_id_is_not_shown_even_if_its_end_comes_late(bench: Bench) -> None:
    stop_id = encoded("!")[0]
    submit = bench.submit(stop_token_ids=[stop_id])
    n = bench.text(submit, "dog!")
    got: list[Any] = []
    while len(joined(got)[1] if got else []) < n:
        got.append(bench.server.next())
    bench.send(Done(submit.key, 0, n, "stop", stop_id))
    got += bench.server.until_end("r")
    assert joined(got) == ("dog", encoded("dog!"), Finish("stop", stop_id, n))


def test_a_stop_id_that_did_not_end_it_is_shown(bench: Bench) -> None:
    """Ignored EOS, and a stop id before min_tokens, are output like any other token."""
    stop_id = encoded("!")[0]
    submit = bench.submit(stop_token_ids=[stop_id], ignore_eos=True, skip_special_tokens=False)
    n = bench.text(submit, f"a!b{END}c!")
    bench.send(Done(submit.key, 0, n, "length"))
    assert joined(bench.server.until_end("r"))[0] == f"a!b{END}c!"


def test_incomplete_bytes_are_flushed_at_the_end(bench: Bench) -> None:
    ids = encoded("a🌳")[:-1]
    submit = bench.submit()
    for token in ids:
        bench.send(step((submit.key, token)))
    bench.send(Done(submit.key, 0, len(ids), "length"))
    assert joined(bench.server.until_end("r"))[0] == byte_level().decode(ids) == "a\ufffd"


def test_two_choices_end_each_by_itself_and_the_request_once(bench: Bench) -> None:
    submit = bench.submit(n=2, stop=["!"])
    bench.text(submit, "one!", choice=1)
    n = bench.text(submit, "two", choice=0)
    stop_at = bench.scheduler.next()
    assert (stop_at.key, stop_at.choice) == (submit.key, 1)
    bench.send(Done(submit.key, 1, stop_at.n, "stop"))
    bench.send(Done(submit.key, 0, n, "length"))
    got = bench.server.until_end("r")
    assert joined(got, 0) == ("two", encoded("two"), Finish("length", None, n))
    assert joined(got, 1) == (
        "one",
        encoded("one!"),
        Finish("stop", "!", stop_at.n, kept=Kept(stop_at.n - 1, "")),
    )
    assert sum(isinstance(m, Ended) for m in got) == 1


def test_logprobs_come_with_text_and_bytes(bench: Bench) -> None:
    half = encoded("🌳")[0]
    dog = encoded(" dog")[0]
    beyond = 511
    submit = bench.submit(logprobs=2)
    value = TokenLogprob(half, -0.5, [(dog, -0.25), (beyond, -7.0)])
    bench.send(step((submit.key, half), logprobs={0: value}), Done(submit.key, 0, 1, "length"))
    chunk = bench.server.until_end("r")[0]
    text, raw = byte_level().decode([dog]), byte_level().decode([dog]).encode()
    assert chunk.logprobs == [
        TextLogprob(half, -0.5, "\ufffd", b"\xf0\x9f", [(dog, -0.25, text, raw), (beyond, -7.0, "", b"")])
    ]
    assert text.startswith(" ")


def test_without_logprobs_asked_for_there_are_none(bench: Bench) -> None:
    submit = bench.submit()
    bench.send(step((submit.key, 40), logprobs={0: TokenLogprob(40, -1.0)}))
    assert bench.server.next().logprobs is None


def test_an_abort_becomes_a_cancel_and_ends_by_done(bench: Bench) -> None:
    submit = bench.submit()
    n = bench.text(submit, "dog")
    bench.send(Abort("r"), Abort("r"))
    assert bench.scheduler.next() == Cancel(submit.key)
    bench.send(Done(submit.key, 0, n, "abort"))
    got = bench.server.until_end("r")
    assert joined(got) == ("dog", encoded("dog"), Finish("abort", None, n))
    assert bench.scheduler.silent()


def test_an_abort_that_overtakes_its_request_ends_it(bench: Bench) -> None:
    bench.send(Abort("r"))
    bench.send(Generate("r", TextPrompt("the dog"), SamplingParams(n=2)))
    got = bench.server.until_end("r")
    assert [m.finish for m in got[:-1]] == [Finish("abort"), Finish("abort")]
    assert got[-1] == Ended("r")
    assert bench.scheduler.silent()
    assert bench.submit(rid="r").rid == "r"


def test_a_late_abort_does_not_hit_the_next_request_of_that_name(bench: Bench) -> None:
    submit = bench.submit()
    bench.send(Done(submit.key, 0, 0, "length"))
    bench.server.until_end("r")
    bench.send(Abort("r"), Abort("unknown"))
    assert bench.submit(rid="r").key == submit.key + 1


def long_text() -> str:
    return "the quick brown fox jumps over the lazy dog, again and again; " * 30_000


def test_a_long_prompt_holds_up_no_stream(bench: Bench) -> None:
    running = bench.submit(rid="stream")
    bench.send(Generate("long", TextPrompt(long_text()), SamplingParams()))
    times = []
    for _ in range(5):
        begin = time.monotonic()
        bench.send(step((running.key, 40)))
        assert bench.server.next().rid == "stream"
        times.append(time.monotonic() - begin)
    assert bench.scheduler.silent(0), "the long prompt was done first: this test shows nothing"
    assert min(times) < 0.2
    submit = bench.scheduler.next()
    assert submit.rid == "long"
    assert len(submit.ids) > 4 * 300_000


def test_an_abort_while_a_long_prompt_is_encoded(bench: Bench) -> None:
    bench.send(Generate("long", TextPrompt(long_text()), SamplingParams()))
    bench.send(Abort("long"))
    assert [m.finish for m in bench.server.until_end("long")[:-1]] == [Finish("abort")]
    # The same name, while the threads still work for the first one.
    second = bench.submit(TextPrompt("the dog"), rid="long")
    assert unpack(second.ids).tolist() == encoded("the dog")
    assert bench.scheduler.silent(3.0)
    assert bench.server.silent()


def test_an_error_of_one_choice_ends_the_request_once(bench: Bench) -> None:
    submit = bench.submit(n=3)
    error = SapwoodError("the row broke").info()
    bench.send(step((submit.key, 40)), Done(submit.key, 0, 1, "length"))
    bench.send(step((submit.key + 1, 40), (submit.key + 2, 41)), Done(submit.key, 1, 1, "error", None, error))
    got = bench.server.until_end("r")
    assert got[-1] == Ended("r", error)
    assert bench.scheduler.next() == Cancel(submit.key)
    bench.send(step((submit.key + 2, 40)), Done(submit.key, 2, 2, "abort"), Done(submit.key, 1, 1, "length"))
    assert bench.server.silent()


def test_unknown_keys_are_ignored(bench: Bench) -> None:
    bench.send(step((77, 1)), Done(77, 0, 1, "stop"), Admitted(77, VERDICT, 0.0))
    bench.send(Refused(77, SapwoodError("x").info()))
    assert bench.server.silent()
    assert bench.submit().rid == "r"


def test_questions_answers_and_gauges_pass_through(bench: Bench) -> None:
    bench.send(Ask(5, "flush"))
    assert bench.scheduler.next() == Ask(5, "flush", INDEX)
    answer, stats = Answer(5, None, {"flushed_tokens": 3}), Stats(*range(12), 0.5)
    bench.send(answer, stats)
    assert [bench.server.next(), bench.server.next()] == [answer, stats]


def test_ids_beyond_the_tokenizer_are_nothing(bench: Bench) -> None:
    submit = bench.submit()
    bench.send(step((submit.key, 511)), step((submit.key, encoded("a")[0])), Done(submit.key, 0, 2, "length"))
    text, ids, _ = joined(bench.server.until_end("r"))
    assert (text, ids) == ("a", [511, *encoded("a")])


def test_without_a_tokenizer_ids_go_in_and_out(directory: Path) -> None:
    bench = Bench(directory, skip_tokenizer_init=True)
    try:
        assert "ids only" in bench.refusal(TextPrompt("x")).message
        assert bench.refusal(IdsPrompt(pack([1])), stop=["x"]).param == "stop"
        submit = bench.submit(IdsPrompt(pack([1, 2])))
        bench.send(step((submit.key, 3)), step((submit.key, EOS)), Done(submit.key, 0, 2, "stop", EOS))
        assert joined(bench.server.until_end("r")) == ("", [3, EOS], Finish("stop", EOS, 2))
    finally:
        bench.close()


def spawn(made: Boot) -> tuple[subprocess.Popen[bytes], Wire]:
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "sapwood.srt.lifeline", "tokenizer", process.__name__]
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen(
        [*command, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": root},
    )
    theirs.close()
    wire = Wire(mine)
    wire.write(made)
    return child, wire


def receive(wire: Wire, kind: type) -> Any:
    while not isinstance(message := wire.read(), kind):
        assert message is not None
    return message


def test_the_real_process_serves_and_ends(directory: Path) -> None:
    server, scheduler = Peer(str(directory), "server"), Peer(str(directory), "scheduler")
    child, wire = spawn(boot(directory))
    outbox = Outbox(str(directory), "tokenizer", INDEX)
    try:
        assert "byte-level" in receive(wire, Ready).facts["tokenizer"]
        outbox.send(Generate("r", TextPrompt("the dog"), SamplingParams()))
        submit = scheduler.next()
        outbox.send(step((submit.key, 40)), Done(submit.key, 0, 1, "length"))
        assert server.until_end("r")[-1] == Ended("r")
        wire.write(Drain(0.0))
        assert child.wait(WAIT) == 0
    finally:
        child.kill()
        child.wait()
        for box in (outbox, server, scheduler, wire):
            cast(Callable[[], None], box.close)()


def test_a_missing_tokenizer_is_fatal_and_named(directory: Path) -> None:
    made = boot(directory)
    (directory / "tokenizer.json").unlink()
    child, wire = spawn(made)
    try:
        fatal = receive(wire, Fatal)
        assert "tokenizer.json" in fatal.message
        assert fatal.expected
        assert child.wait(WAIT) != 0
    finally:
        child.kill()
        child.wait()
        wire.close()


def test_the_process_never_imports_the_engine() -> None:
    code = (
        "import sys, sapwood.srt.tokenizer.process\n"
        "print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
