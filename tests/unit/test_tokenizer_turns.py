"""Chats in messages: what is known is not made again, and nothing is made that nobody needs."""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import ChatPrompt, PartsPrompt, Spoken, pack, unpack
from sapwood.srt.tokenizer import isolation, turn_cache, turns
from sapwood.srt.tokenizer.parts import _check_order
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.render_child import BLOCK_CHARS, _in_common
from sapwood.srt.tokenizer.templates import ChatTemplate
from sapwood.srt.tokenizer.turn_cache import Shown, Trail, Turn, TurnCache
from tests.tokenizer_kinds import byte_level
from tests.unit.test_template_renderings import FOLDER, template
from tests.unit.test_tokenizer_parts import encoded, ids_of, said
from tests.unit.test_tokenizer_prompts import CHATML, source

COUNTING = "{{ messages | length }}" + CHATML
"""Changes what came before at each message."""
TALK = [said("user" if i % 2 == 0 else "assistant", f"word {i}") for i in range(200)]

Make = Callable[[str], PromptEncoder]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PromptEncoder] = []

    def new(chat_template: str) -> PromptEncoder:
        made.append(PromptEncoder(source(template=chat_template), byte_level(), True))
        return made[-1]

    yield new
    for prompts in made:
        prompts.close()


def inner(prompts: PromptEncoder) -> turns.Turns:
    assert prompts._parts is not None
    assert prompts._parts._turns is not None
    return prompts._parts._turns


def rendered(prompts: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many renderings were asked for each time."""
    asked: list[int] = []
    of_chats = prompts._template
    assert of_chats is not None
    plain = of_chats.views

    def counted(messages: Any, kwargs: Any, views: Any, work: Any) -> Any:
        asked.append(len(views))
        return plain(messages, kwargs, views, work)

    monkeypatch.setattr(of_chats, "views", counted)
    return asked


def tokenized(prompts: PromptEncoder) -> list[str]:
    """Each text of chats that was encoded."""
    texts: list[str] = []
    words = inner(prompts)._words

    def begin(text: str) -> list[int]:
        texts.append(text)
        return words.begin(text)

    def go_on(ending: str, text: str) -> list[int]:
        texts.append(text)
        return words.go_on(ending, text)

    inner(prompts)._words = words._replace(begin=begin, go_on=go_on)
    return texts


def chat_of(talk: list[Spoken]) -> ChatPrompt:
    said = [{"role": one.role, "content": one.content[0].text} for one in talk]  # type: ignore[union-attr]
    return ChatPrompt(said, add_generation_prompt=False)


# ---- what is rendered


def test_only_what_is_new_is_rendered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make(CHATML)
    asked = rendered(prompts, monkeypatch)
    talk = TALK[:100]
    first = ids_of(prompts, *talk)
    assert sum(asked) == 102, "each message, and twice a short chat to know the template"
    asked.clear()
    assert ids_of(prompts, *talk, said("user", "more"))[: len(first)] == first
    assert asked == [1]
    asked.clear()
    assert ids_of(prompts, *talk) == first
    assert asked == []
    assert ids_of(prompts, *talk, kind="other") == first
    assert sum(asked) == 100, "other arguments may make another text"
    asked.clear()
    assert unpack(prompts.encode_parts(PartsPrompt([*talk]), "salt:x").ids).tolist() == first
    assert sum(asked) == 100, "nobody can tell by the time what others have said"


def test_what_was_found_before_a_failure_is_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "{% if messages | length == 150 %}{{ 1 // 0 }}{% endif %}"
    prompts = make("{% if messages[0].content == 'word 0' %}" + refuses + "{% endif %}" + CHATML)
    asked = rendered(prompts, monkeypatch)
    with pytest.raises(BadRequest, match="division"):
        encoded(prompts, *TALK[:150])
    assert sum(asked) == 150 + 2
    asked.clear()
    assert ids_of(prompts, *TALK[:128]) == unpack(prompts.encode(chat_of(TALK[:128]))).tolist()
    assert asked == []


def test_all_of_a_chats_renderings_have_one_limit_of_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done by then is kept: who asks again gets further."""
    prompts = make(CHATML)
    ids_of(prompts, said("user", "Hi"))
    asked = rendered(prompts, monkeypatch)
    monkeypatch.setattr(isolation, "OF_PROMPT", 1e-9)
    for _ in range(3):
        with pytest.raises(BadRequest, match="2e-09 s of computing") as caught:
            encoded(prompts, *TALK)
        assert caught.value.param == "input"
    assert asked == [64, 64, 64, 64, 64, 8], "the second of each try was not begun"
    assert ids_of(prompts, *TALK) == unpack(prompts.encode(chat_of(TALK))).tolist()


# ---- what is encoded


def test_a_chat_that_is_rewritten_again_and_again_is_encoded_once(make: Make) -> None:
    prompts = make(COUNTING)
    texts = tokenized(prompts)
    got = encoded(prompts, *TALK)
    assert [*got.rewritten] == [*range(1, 200)]
    assert unpack(got.ids).tolist() == unpack(prompts.encode(chat_of(TALK))).tolist()
    assert len(texts) == 1
    assert len(inner(prompts)._cache._turns) == 200


def test_a_shorter_chat_is_encoded_when_it_is_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make(COUNTING)
    ids_of(prompts, *TALK)
    asked = rendered(prompts, monkeypatch)
    for count in (150, 100, 1):
        assert ids_of(prompts, *TALK[:count]) == unpack(prompts.encode(chat_of(TALK[:count]))).tolist()
    assert asked == [1, 1, 1]
    asked.clear()
    other = [*TALK[:120], said("user", "more")]
    assert ids_of(prompts, *other) == unpack(prompts.encode(chat_of(other))).tolist()
    assert asked == [2]


def test_a_template_that_is_never_the_same_is_encoded_all_the_same(make: Make) -> None:
    prompts = make("{{ ['a', 'b', 'c', 'd'] | random }}" + CHATML)
    whole = byte_level()
    for count in (40, 30, 20, 25, 40, 10):
        text = whole.decode(ids_of(prompts, *TALK[:count]), skip_special_tokens=False)
        assert text[1:] == whole.decode(ids_of(make(CHATML), *TALK[:count]), skip_special_tokens=False)


def test_what_is_no_message_is_not_looked_through_again_for_each_message() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(at)

    raw = Counted(range(10_000))
    _check_order([Turn(rewritten=True)] * 300, range(10_000, 10_300), raw)
    assert Counted.reads <= 300 * 15
    with pytest.raises(BadRequest, match=r"input\[9999\], which is no message, among that"):
        _check_order([Turn(), Turn(rewritten=True)], (9_998, 10_000), raw)


# ---- who has left


def test_nothing_more_is_done_for_one_who_has_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make(CHATML)
    ids_of(prompts, said("user", "Hi"))
    asked, texts = rendered(prompts, monkeypatch), tokenized(prompts)
    prompt = PartsPrompt([*TALK])
    words = inner(prompts)._words

    def leave(ending: str, text: str) -> list[int]:
        prompts.stop(PartsPrompt([*TALK]))  # another one's
        if len(texts) == 10:
            prompts.stop(prompt)
        return words.go_on(ending, text)

    inner(prompts)._words = words._replace(go_on=leave)
    with pytest.raises(BadRequest, match="not wanted"):
        prompts.encode_parts(prompt)
    assert len(texts) == 11
    assert asked == [64]
    inner(prompts)._words = words
    assert prompts.encode_parts(prompt).ids == prompts.encode(chat_of(TALK)), "it may come again"


def test_nor_are_texts_encoded_that_are_no_messages(make: Make) -> None:
    prompts = make(CHATML)
    parts = prompts._parts
    assert parts is not None
    prompt = PartsPrompt([*(said("user", "a").content[0] for _ in range(50)), said("user", "Hi")])
    seen: list[int] = []
    raw = parts._raw

    def leave(part: Any, first: bool) -> list[int]:
        seen.append(len(seen))
        prompts.stop(prompt)
        return raw(part, first)

    parts._raw = leave  # type: ignore[method-assign]
    with pytest.raises(BadRequest, match="not wanted"):
        prompts.encode_parts(prompt)
    assert seen == [0]


# ---- what is known


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("", "never"),
        ("{% if strftime_now is defined %}{% endif %}", "never"),
        ("{{ strftime_now('%Y-%m-%d') }}", "daily"),
        ("{% if strftime_now is defined %}{% set a = strftime_now('%d %B %Y, 100%%') %}{% endif %}", "daily"),
        ("{{ strftime_now('%d') }}{{ strftime_now('%H:%M') }}", "always"),
        ("{{ strftime_now('%c') }}", "always"),
        ("{{ strftime_now('%-d %5') }}", "always"),
        ("{{ strftime_now(form) }}", "always"),
        ("{{ strftime_now(form='%d') }}", "always"),
        ("{% set now = strftime_now %}{{ now('%S') }}", "always"),
        ("{% for now in [strftime_now] %}{{ now('%S') }}{% endfor %}", "always"),
    ],
)
def test_a_template_says_how_long_its_text_is_the_same(text: str, changes: str) -> None:
    assert ChatTemplate(text + CHATML, {}).changes == changes


def test_no_models_template_tells_the_time_of_the_day() -> None:
    found = {path.stem: template(path.stem).changes for path in (FOLDER / "templates").iterdir()}
    assert {*found.values()} == {"never", "daily"}
    assert found["openai-gpt-oss-120b"] == "daily"


def test_a_date_is_known_for_a_day_and_a_time_is_not(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    daily, always = make("{{ strftime_now('%Y') }}" + CHATML), make("{{ strftime_now('%S') }}" + CHATML)
    for prompts in (daily, always):
        ids_of(prompts, *TALK[:10])
    asked = rendered(daily, monkeypatch)
    ids_of(daily, *TALK[:10])
    assert asked == []
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    today = SimpleNamespace(date=SimpleNamespace(today=lambda: tomorrow))
    monkeypatch.setattr(turns, "datetime", today)
    ids_of(daily, *TALK[:10])
    assert asked == [10]
    asked = rendered(always, monkeypatch)
    ids_of(always, *TALK[:10])
    assert asked == [10]


def test_what_is_known_is_bounded_and_forgotten_from_the_end() -> None:
    known = TurnCache(4 * 1024)
    names = [bytes([i]) for i in range(10)]
    found = [Turn(pack([i] * 100), False, Shown.of("x" * i)) for i in range(10)]
    known.put(names, found)
    assert known.known(names) == found[: len(known.known(names))]
    assert 0 < len(known.known(names)) < 10
    known.put([b"a"], found[:1])
    assert known.known(names[:1]) == found[:1], "a chat's beginning goes last"


def test_the_bytes_that_are_held_are_counted_however_often_a_turn_is_put() -> None:
    known = TurnCache(8 * 1024)
    rng = random.Random(5)
    for _ in range(300):
        names = [bytes([rng.randrange(20)]) for _ in range(3)]
        known.put(names, [Turn(rng.choice((None, b"", pack([5] * rng.randrange(200))))) for _ in names])
        held = sum(turn_cache._size(turn) for turn in known._turns.values())
        assert known._bytes == held <= 8 * 1024


# ---- long texts


def test_a_rendering_begins_another() -> None:
    assert Shown.of("abc").begins("abcd")
    assert not Shown.of("abc").begins("ab")
    assert not Shown.of("abc").begins("abdd")
    assert Shown.of("").begins("")


def test_a_trail_is_what_its_text_is() -> None:
    rng = random.Random(5)
    for _ in range(200):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(6)))
        trail = Trail(Shown.of(text) if rng.random() < 0.5 else None)
        known = text if trail._text is None else ""
        for _ in range(4):
            other = "".join(rng.choice("ab") for _ in range(rng.randrange(9)))
            assert trail.begins(other) == other.startswith(known)
            if other.startswith(known):
                assert trail.text == known
            if rng.random() < 0.7:
                assert trail.reach(other) == Shown.of(other)
                known = other


def test_a_long_text_is_hashed_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages come after it."""
    hashed: list[int] = []

    class Counted:
        def __init__(self, data: bytes = b"") -> None:
            self._hash = hashlib.blake2b(data)
            hashed.append(len(data))

        def update(self, data: bytes) -> None:
            self._hash.update(data)
            hashed.append(len(data))

        def digest(self) -> bytes:
            return self._hash.digest()

    monkeypatch.setattr(turn_cache, "hashlib", SimpleNamespace(blake2b=Counted))
    prompts = make(CHATML)
    talk = [said("user", "the dog sleeps " * 2000), *TALK]
    encoded(prompts, *talk)
    assert 30_000 < sum(hashed) < 45_000
    hashed.clear()
    encoded(prompts, *talk, said("user", "more"))
    assert 30_000 < sum(hashed) < 90_000, "what was known is hashed, to know it again"


def test_what_two_texts_have_in_common() -> None:
    rng = random.Random(5)
    for _ in range(300):
        size = rng.choice((0, 1, 5, BLOCK_CHARS - 1, BLOCK_CHARS, BLOCK_CHARS + 1, 3 * BLOCK_CHARS))
        common = "x" * rng.randint(max(0, size - 3), size)
        before, text = (common + rest for rest in rng.sample(["", "a", "b" * rng.randrange(1, 30), "ab"], 2))
        naive = next(
            (i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]),
            min(len(before), len(text)),
        )
        assert _in_common(before, text) == naive
