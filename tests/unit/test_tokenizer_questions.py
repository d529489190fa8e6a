"""Questions to the tokenizer: ids and texts are the prompts' own; a lookup is told in the client's words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from sapwood.srt.config import ModelSource
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import (
    ASK_SECONDS,
    Answer,
    Ask,
    ChatPrompt,
    Chunk,
    Generate,
    IdsPrompt,
    Submit,
    TextPrompt,
    Tokens,
    pack,
    unpack,
)
from sapwood.srt.params import SamplingParams
from sapwood.srt.tokenizer import questions
from sapwood.srt.tokenizer.background import LONG_CHARS, THREADS
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.places import place_of
from sapwood.srt.tokenizer.process import TokenizerLoop
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.questions import MAX_PENDING, MAX_PENDING_BYTES
from sapwood.srt.tokenizer.requests import NoTexts
from sapwood.srt.tokenizer.vocabulary import Vocabulary
from tests.tokenizer_kinds import END, START, byte_level, metaspace

CHAT = (
    "{{ '<|start|>' }}Today is {{ day | default('Monday') }}.\n"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"

ENCODERS: list[PromptEncoder] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No test leaves a process that renders behind."""
    yield
    while ENCODERS:
        ENCODERS.pop().close()


class Box:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.open = True

    def send(self, *batch: Any) -> bool:
        if self.open:
            self.sent += batch
        return self.open

    def take(self) -> list[Any]:
        taken, self.sent = self.sent, []
        return taken


class Bench:
    """A loop with its two neighbours."""

    def __init__(self, tokenizer: Tokenizer | None = None, template: str | None = CHAT) -> None:
        source = ModelSource(
            name="small", format="dummy", path="", files=[], architecture="", config={}, vocab_size=512,
            context_length=64, eos_ids=[0], tokenizer_file=None, template_vars={}, chat_template=template,
            sampling_defaults={},
        )  # fmt: skip
        self.scheduler, self.server = Box(), Box()
        self.encoder = PromptEncoder(source, tokenizer, True)
        ENCODERS.append(self.encoder)
        texts = Vocabulary(tokenizer) if tokenizer is not None else NoTexts()
        self.loop = TokenizerLoop(3, source, self.encoder, texts, self.scheduler, self.server, Box())

    def step(self, *batch: Any) -> list[Any]:
        self.loop.handle(list(batch))
        self.loop.work_some()
        self.loop.flush()
        return self.server.take()

    def until(self, box: Box, kind: type, *batch: Any) -> Any:
        self.loop.handle(list(batch))
        deadline = time.monotonic() + 60
        while not any(isinstance(message, kind) for message in box.sent):
            assert time.monotonic() < deadline, f"no {kind.__name__}"
            self.loop.work_some()
            self.loop.flush()
            time.sleep(0.001)
        (message,) = box.take()
        return message

    def ask(self, what: Any, prompt: Any = None, **options: Any) -> Answer:
        """The answer of the tokenizer itself."""
        answer = self.until(self.server, Answer, Ask(9, what, 0, prompt, "", options))
        assert isinstance(answer, Answer)
        assert answer.call == 9
        return answer

    def explain(
        self, prompt: Any, data: dict[str, Any], namespace: str = "", **options: Any
    ) -> dict[str, Any]:
        """What becomes of the scheduler's answer `data`."""
        asked = self.until(self.scheduler, Ask, Ask(9, "explain", 0, prompt, namespace, options))
        assert (asked.tokenizer, asked.namespace, asked.options) == (3, namespace, options)
        assert asked.prompt == IdsPrompt(self.encoder.encode(prompt))
        answer = self.until(self.server, Answer, Answer(9, None, data))
        assert answer.error is None, answer.error
        told: dict[str, Any] = answer.data
        return told


def with_bos() -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    bos = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, bos)]
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("text", ["the dog sleeps", "naïve café 木の根", "", "a" * 20_000])
def test_tokenize_gives_the_prompts_ids_and_each_ones_text(make: Any, text: str) -> None:
    answer = Bench(make()).ask("tokenize", TextPrompt(text))
    assert answer.error is None
    tokens, texts = answer.data["tokens"], answer.data["texts"]
    assert tokens == make().encode(text).ids
    assert len(texts) == len(tokens)
    if text == "the dog sleeps":
        assert "".join(texts).strip() == text
    assert Bench(make()).ask("tokenize", TextPrompt(text), texts=False).data == {"tokens": tokens}


def test_special_tokens_are_added_or_not_in_questions_and_in_requests() -> None:
    bench, bos = Bench(with_bos()), byte_level().token_to_id(START)
    plain = byte_level().encode("the dog").ids
    for add, ids in ((True, [bos, *plain]), (False, plain)):
        prompt = TextPrompt("the dog", add)
        assert bench.ask("tokenize", prompt).data["tokens"] == ids
        submit = bench.until(bench.scheduler, Submit, Generate(f"r{add}", prompt, SamplingParams()))
        assert unpack(submit.ids).tolist() == ids
    assert bench.ask("tokenize", TextPrompt("", False)).data == {"tokens": [], "texts": []}


def test_a_chat_is_tokenized_as_it_is_generated_from() -> None:
    bench = Bench(byte_level())
    prompt = ChatPrompt([{"role": "user", "content": f"the {END} dog"}])
    tokens = bench.ask("tokenize", prompt).data["tokens"]
    submit = bench.until(bench.scheduler, Submit, Generate("r", prompt, SamplingParams()))
    assert unpack(submit.ids).tolist() == tokens
    end = byte_level().token_to_id(END)
    assert tokens.count(end) == 1, "the user's is text, the template's a control token"
    text = bench.ask("detokenize", IdsPrompt(pack(tokens))).data["text"]
    assert text == f"{START}Today is Monday.\nuser: the {END} dog{END}\nassistant:"


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_detokenize_is_the_batch_decode(make: Any) -> None:
    tokenizer = make()
    ids = [tokenizer.token_to_id(START), *tokenizer.encode("the naïve dog sleeps 木").ids]
    bench = Bench(tokenizer)
    for skip in (True, False):
        text = bench.ask("detokenize", IdsPrompt(pack(ids)), skip_special_tokens=skip).data["text"]
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert bench.ask("detokenize", IdsPrompt(pack(ids))).data["text"].startswith(START)
    assert bench.ask("detokenize", IdsPrompt(b"")).data == {"text": ""}
    several = bench.ask("detokenize", IdsPrompt(pack([*ids, *ids[:3]])), lengths=[len(ids), 0, 3]).data[
        "texts"
    ]
    assert several[:2] == [bench.ask("detokenize", IdsPrompt(pack(ids))).data["text"], ""]
    assert several[2] == bench.ask("detokenize", IdsPrompt(pack(ids[:3]))).data["text"]
    # A model's head may be wider than its tokenizer (512 here): such an id is nothing.
    assert bench.ask("detokenize", IdsPrompt(pack([511]))).data == {"text": ""}


@pytest.mark.parametrize(
    ("what", "prompt", "words"),
    [
        ("tokenize", IdsPrompt(pack([5, 512])), "512"),
        ("detokenize", IdsPrompt(pack([-1])), "-1"),
        ("detokenize", IdsPrompt(b"abc"), "not a list"),
        ("tokenize", TextPrompt("a\ud800b"), "surrogate"),
        ("tokenize", ChatPrompt([]), "empty"),
        ("tokenize", ChatPrompt([{"role": 5}]), "role"),
        ("explain", TextPrompt(""), "empty"),
        ("explain", None, "needs a prompt"),
    ],
)
def test_what_cannot_be_answered_is_an_error(what: Any, prompt: Any, words: str) -> None:
    error = Bench(byte_level()).ask(what, prompt).error
    assert error is not None
    assert error.status == 400
    assert words in error.message


def test_without_a_template_or_a_tokenizer_the_reason_is_said() -> None:
    error = Bench(byte_level(), template=None).ask("tokenize", ChatPrompt([{"role": "user"}])).error
    assert error is not None
    assert "chat template" in error.message
    for what in ("tokenize", "detokenize"):
        error = Bench().ask(what, IdsPrompt(pack([5]))).error
        assert error is not None
        assert "--skip-tokenizer-init" in error.message


def test_more_tokens_than_an_answer_may_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_TOKENS", 3)
    error = Bench(byte_level()).ask("detokenize", IdsPrompt(pack([5, 5, 5, 5]))).error
    assert error is not None
    assert "at most 3" in error.message


def test_long_questions_hold_up_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, go = Bench(byte_level()), threading.Event()
    plain = bench.encoder.tokenize
    monkeypatch.setattr(bench.encoder, "tokenize", lambda prompt: (go.wait(20), plain(prompt))[1])
    monkeypatch.setattr(bench.encoder, "encode", plain)
    bench.step(Ask(1, "tokenize", 0, TextPrompt("the dog")))
    bench.step(Generate("r", IdsPrompt(pack([5])), SamplingParams()))
    (submit,) = bench.scheduler.take()
    word = byte_level().encode("dog").ids[0]
    keys = submit.key.to_bytes(8, "little")
    (chunk,) = bench.step(Tokens(keys, pack([word])))
    assert isinstance(chunk, Chunk)
    go.set()
    assert bench.until(bench.server, Answer).data["tokens"] == byte_level().encode("the dog").ids


def test_what_nobody_waits_for_any_more_is_not_worked_off(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, go = Bench(byte_level()), threading.Event()
    plain, worked = bench.encoder.tokenize, []

    def slow(prompt: Any) -> bytes:
        worked.append(prompt)
        go.wait(20)
        return plain(prompt)

    monkeypatch.setattr(bench.encoder, "tokenize", slow)
    now = time.monotonic()
    for call in range(MAX_PENDING):
        bench.step(Ask(call, "explain" if call % 2 else "tokenize", 0, TextPrompt("the dog")))
    while len(worked) < THREADS:
        time.sleep(0.001)
    (answer,) = bench.step(Ask(999, "tokenize", 0, TextPrompt("the dog")))
    assert answer.error.status == 429
    with monkeypatch.context() as later:
        later.setattr(questions.time, "monotonic", lambda: now + ASK_SECONDS + 60)
        go.set()
        answers: list[Any] = []
        while len(answers) + len(bench.scheduler.sent) < MAX_PENDING:
            answers += bench.step()
    assert len(worked) == THREADS
    assert [a.error.status for a in answers if a.error is not None] == [503] * (MAX_PENDING - THREADS)
    bench.scheduler.take()
    assert bench.ask("tokenize", TextPrompt("the dog")).error is None


def stuck(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], threading.Event]:
    """Chats, and texts that begin with two x, wait for the event once they are begun."""
    plain, begun, go = bench.encoder.tokenize, [], threading.Event()

    def slow(prompt: Any) -> bytes:
        if prompt == HI or (isinstance(prompt, TextPrompt) and prompt.text.startswith("xx")):
            begun.append(prompt)
            go.wait(20)
        return plain(prompt)

    monkeypatch.setattr(bench.encoder, "tokenize", slow)
    return begun, go


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


HI = ChatPrompt([{"role": "user", "content": "hi"}])
LONG = TextPrompt("x" * (LONG_CHARS + 1))


@pytest.mark.parametrize("slow", [LONG, HI])
def test_long_questions_and_chats_hold_up_no_short_ones(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(byte_level())
    begun, go = stuck(bench, monkeypatch)
    for call in range(100, 100 + MAX_PENDING):
        assert bench.step(Ask(call, "tokenize", 0, slow)) == []
    (answer,) = bench.step(Ask(999, "explain", 0, slow))
    assert (answer.call, answer.error.status) == (999, 429)
    wait_until(lambda: len(begun) == THREADS)
    ids = ids_of("the dog")
    assert bench.ask("tokenize", TextPrompt("the dog")).data["tokens"] == ids
    assert bench.ask("detokenize", IdsPrompt(pack(ids))).data == {"text": "the dog"}
    for call in range(100, 100 + MAX_PENDING):
        bench.step(Ask(call, "cancel"))
    go.set()


def test_cancelled_questions_make_room_and_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(byte_level())
    begun, go = stuck(bench, monkeypatch)
    for call in range(MAX_PENDING):
        bench.step(Ask(call, "tokenize", 0, LONG))
    wait_until(lambda: len(begun) == THREADS)
    assert bench.step(*(Ask(call, "cancel") for call in [*range(MAX_PENDING), 12345])) == []
    assert bench.step(Ask(999, "tokenize", 0, LONG)) == []
    go.set()
    answer = bench.until(bench.server, Answer)
    assert (answer.call, answer.error) == (999, None)
    assert len(begun) == THREADS + 1, "those that threads had begun, and the last"
    assert bench.step() == []


def test_a_question_cancelled_while_the_scheduler_has_it_gets_no_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(byte_level())
    bench.step(Ask(6, "tree"))
    bench.step(Ask(6, "cancel"))
    assert bench.scheduler.take() == [Ask(6, "tree", 3)]
    answer = Answer(6, None, {"namespaces": []})
    assert bench.step(answer) == [answer], "as it came"


def test_what_waits_is_bounded_by_its_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(byte_level())
    begun, go = stuck(bench, monkeypatch)
    large = TextPrompt("x" * (MAX_PENDING_BYTES // 2))
    larger = TextPrompt("x" * (MAX_PENDING_BYTES + 1))
    monkeypatch.setattr(bench.encoder, "_encode", lambda *_: [5])
    assert bench.step(Ask(1, "tokenize", 0, large), Ask(2, "tokenize", 0, large)) == []
    wait_until(lambda: len(begun) == 2)
    (answer,) = bench.step(Ask(3, "tokenize", 0, LONG))
    assert (answer.call, answer.error.status) == (3, 429)
    assert f"there may be {MAX_PENDING_BYTES}" in answer.error.message
    assert bench.ask("tokenize", TextPrompt("the dog")).error is None
    go.set()
    answers: list[Any] = []
    while len(answers) < 2:
        answers += bench.step()
    assert bench.step(Ask(4, "tokenize", 0, larger)) == [], "one alone may be larger"
    assert bench.until(bench.server, Answer).call == 4
    assert bench.step(Ask(5, "tokenize", 0, large)) == [], "nothing is held any more"
    assert bench.until(bench.server, Answer).call == 5


def test_a_cancelled_chats_rendering_is_broken_off() -> None:
    source = "{% if messages[0].content != 'hi' %}" + ENDLESS + "{% endif %}ok"
    bench = Bench(byte_level(), None)
    # With so much time that none ends by itself.
    bench.encoder._template = template = IsolatedTemplate(source, {}, 60.0)
    bad = ChatPrompt([{"role": "user", "content": "bad"}])
    for call, what in ((1, "tokenize"), (2, "explain")):
        bench.step(Ask(call, what, 0, bad))
    wait_until(lambda: len(template._busy) == 2)
    bench.step(Ask(1, "cancel"), Ask(2, "cancel"))
    wait_until(lambda: not template._busy)
    assert bench.ask("tokenize", HI).data["tokens"] == ids_of("ok")


def test_an_answer_that_comes_too_late_gets_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(byte_level())
    bench.step(Ask(6, "tree"))
    monkeypatch.setattr(questions, "ASK_SECONDS", -1.0)
    error = bench.until(bench.server, Answer, Answer(6, None, {"namespaces": []})).error
    assert (error.status, "nobody waits" in error.message) == (503, True)


def test_who_is_patient_is_answered_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(byte_level())
    monkeypatch.setattr(questions, "ASK_SECONDS", -1.0)
    asked = Ask(7, "tokenize", 0, TextPrompt("the dog"), patient=True)
    assert bench.until(bench.server, Answer, asked).error is None
    assert bench.ask("tokenize", TextPrompt("the dog")).error.status == 503


def test_a_failure_nobody_foresaw_is_called_a_question(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(byte_level())
    monkeypatch.setattr(bench.encoder, "tokenize", lambda prompt: 1 / 0)
    error = bench.ask("tokenize", TextPrompt("the dog")).error
    assert error is not None
    assert error.message == "the question could not be answered (ZeroDivisionError)"


def test_an_answer_that_is_ready_ends_the_loops_wait() -> None:
    bench, woken = Bench(byte_level()), threading.Event()
    asked = questions.Questions(0, bench.encoder, NoTexts(), bench.scheduler, woken.set)
    assert list(asked.ask(Ask(1, "tokenize", 0, TextPrompt("the dog")))) == []
    assert woken.wait(20)
    (answer,) = asked.finished()
    assert answer.call == 1


def test_too_many_questions_and_a_full_queue_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(byte_level())
    bench.scheduler.open = False
    (answer,) = bench.step(Ask(2, "state"))
    assert (answer.call, answer.error.status) == (2, 429)
    assert bench.ask("explain", TextPrompt("the dog")).error is not None
    monkeypatch.setattr(questions, "MAX_PENDING", 0)
    (answer,) = bench.step(Ask(3, "tokenize", 0, TextPrompt("x")))
    assert (answer.call, answer.error.status) == (3, 429)


def test_other_questions_and_answers_pass_through() -> None:
    bench = Bench(byte_level())
    assert bench.step(Ask(4, "state")) == []
    assert bench.scheduler.take() == [Ask(4, "state", 3)]
    answer = Answer(4, None, {"running": 1})
    assert bench.step(answer) == [answer]
    bench.step(Ask(5, "tree"))
    bench.scheduler.take()
    failed = Answer(5, ErrorInfo(400, "invalid_request_error", "invalid_value", "no"), {})
    assert bench.step(failed) == [failed]


def test_the_tree_gets_its_texts() -> None:
    bench = Bench(byte_level())
    dog = byte_level().encode("the dog").ids
    node = {"ids": dog, "children": [{"ids": [], "children": []}]}
    bench.step(Ask(6, "tree", 0, None, "", {"depth": 2}))
    assert bench.scheduler.take() == [Ask(6, "tree", 3, None, "", {"depth": 2})]
    told = bench.until(bench.server, Answer, Answer(6, None, {"namespaces": [{"children": [node]}]})).data
    (shown,) = told["namespaces"][0]["children"]
    assert shown["text"] == "the dog"
    assert shown["children"][0]["text"] is None


# ---- explain


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level().encode(text).ids
    return ids


def test_both_sides_of_the_stop_are_shown_as_tokens() -> None:
    prompt = TextPrompt("the quick brown fox jumps over the lazy dog, again and again; the dog sleeps on.")
    ids = ids_of(prompt.text)
    at = len(ids) - 4
    told = Bench(byte_level()).explain(prompt, {"matched": at, "stopped": "diverged", "goes_on": True})
    assert [token["id"] for token in told["matched_text_tail"]] == ids[max(0, at - 20) : at]
    assert [token["id"] for token in told["next"]] == ids[at:]
    shown = "".join(token["text"] for token in told["matched_text_tail"] + told["next"])
    assert prompt.text.endswith(shown)
    assert (told["prompt_tokens"], told["matched"]) == (len(ids), at)
    assert "cached_instead" not in told
    assert "segments" not in told


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"stopped": "cold", "goes_on": False}, "Nothing is cached without a cache_salt"),
        ({"stopped": "cold", "goes_on": True}, "begins with token 0 ('the'"),
        ({"stopped": "diverged", "goes_on": True, "matched": 1}, "goes on otherwise at token 1 ("),
        ({"stopped": "diverged", "goes_on": False, "matched": 1}, "ends before token 1 ("),
        ({"stopped": "evicted", "goes_on": False, "matched": 1}, "evicted to make room"),
        ({"stopped": "last_token", "goes_on": True, "matched": 1}, "but its last token"),
        ({"stopped": "disabled", "goes_on": False}, "--disable-radix-cache"),
        ({"stopped": "logprobs", "goes_on": True, "matched": 1}, "from token 2 on"),
    ],
)
def test_every_reason_is_a_plain_sentence(data: dict[str, Any], words: str) -> None:
    options = {"logprob_start_len": 2} if data["stopped"] == "logprobs" else {}
    told = Bench(byte_level()).explain(TextPrompt("the dog"), {"matched": 0, **data}, **options)
    assert words in told["reason"]
    assert told["reason"].rstrip(")").endswith(".")


def test_with_a_salt_the_reason_speaks_of_that_salts_cache() -> None:
    bench = Bench(byte_level())
    cold = {"matched": 0, "stopped": "cold", "goes_on": False}
    assert (
        "Nothing is cached with this cache_salt" in bench.explain(TextPrompt("a"), cold, "salt:x")["reason"]
    )
    told = bench.explain(TextPrompt("a"), cold | {"stopped": "namespace"}, "salt:x")
    assert "The shared cache" in told["reason"]


def revealed(prompt: str, cached: list[list[int]], matched: int) -> str:
    data = {
        "matched": matched,
        "stopped": "diverged",
        "goes_on": True,
        "segments": [],
        "cached_instead": cached,
    }
    told = Bench(byte_level()).explain(TextPrompt(prompt), data, reveal=True)
    assert [[token["id"] for token in branch] for branch in told["cached_instead"]] == cached
    reason: str = told["reason"]
    return reason


def test_what_is_cached_instead_is_named_when_it_may_be_shown() -> None:
    ids = ids_of("the fox")
    assert "Cached is ' dog sleeps'" in revealed("the fox", [ids_of(" dog sleeps"), ids[:1]], 1)


def test_a_difference_of_white_space_is_called_that() -> None:
    matched = len(ids_of("the dog"))
    assert "Only white space differs" in revealed("the dog\n\nsleeps", [ids_of(" sleeps")], matched)


def test_the_same_text_in_other_tokens_is_called_that() -> None:
    """What a model generated as "d", "og" comes back as "dog"."""
    cut = [*ids_of(" "), *ids_of("d"), *ids_of("o"), *ids_of("g")]
    assert "cut into other tokens" in revealed("the dog", [cut], 1)


# ---- the place in a chat


def place(template: str, messages: list[dict[str, Any]], needle: str, **kwargs: Any) -> str | None:
    bench = Bench(byte_level(), template)
    prompt = ChatPrompt(messages, template_kwargs=kwargs)
    return place_of(prompt, bench.encoder.render(prompt).index(needle), bench.encoder.render)


TALK = [
    {"role": "system", "content": "  Be the river.\n"},
    {"role": "user", "content": [{"type": "text", "text": "user"}, {"type": "text", "text": "What now?"}]},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "user"},
]


@pytest.mark.parametrize("template", [CHAT, CHAT.replace(" | trim", "")])
@pytest.mark.parametrize(
    ("needle", "where"),
    [
        ("Monday", "before messages[0].content"),
        ("Be the", "in messages[0].content"),
        ("river", "in messages[0].content"),
        ("user: user", "before messages[1].content"),
        ("What now", "in messages[1].content"),
        ("assistant: ", "before messages[2].content"),
        ("assistant:", "before messages[2].content"),
    ],
)
def test_a_miss_is_placed_in_the_message_that_it_is_in(template: str, needle: str, where: str) -> None:
    found = place(template, TALK, needle)
    assert found is not None
    assert found.endswith(where)


def test_the_generation_prompt_is_the_templates() -> None:
    found = place(CHAT, TALK[:1], "assistant:")
    assert found == "in what the chat template writes after the last message"


def test_nothing_is_said_of_a_template_that_rewrites_contents() -> None:
    assert place("{{ messages[0]['content'] | upper }}", TALK[:1], "RIVER") is not None
    assert place("{{ messages[0]['content'][2:8] }}", TALK[:1], "Be") is None
    assert place("{{ messages[0]['content'] | length }}", TALK[:1], "1") is None


def test_explaining_a_chat_says_where_it_misses() -> None:
    bench, prompt = Bench(byte_level()), ChatPrompt(TALK, template_kwargs={"day": "Sunday"})
    before = len(ids_of("Today is ")) + 1
    told = bench.explain(prompt, {"matched": before - 1, "stopped": "diverged", "goes_on": True})
    assert told["place"] == "in what the chat template writes before messages[0].content"
    assert told["place"] in told["reason"]
