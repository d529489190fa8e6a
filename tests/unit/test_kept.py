"""Which tokens a stop string has left whole: their batch decode and the rest are the text that was shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sapwood.srt.messages import Done, Finish, Kept
from sapwood.srt.params import SamplingParams
from sapwood.srt.tokenizer.detokenizer import WINDOW
from sapwood.srt.tokenizer.kept import Borders
from sapwood.srt.tokenizer.requests import Request
from tests.tokenizer_kinds import START, TEXTS
from tests.unit.test_detokenizer import NAMES, batch, id_lists, kinds, tokenizers


def run(name: str, ids: list[int], **params: Any) -> tuple[str, Finish]:
    """The text of one choice and its end; 0 is the only EOS, which is ignored."""
    request = Request("r", 1, SamplingParams(ignore_eos=True, **params))
    (choice,) = request.choices(kinds()[name], [0])
    text = ""
    for token in ids:
        hit = choice.push(token)
        if (chunk := choice.chunk()) is not None:
            text += chunk.text
        if hit:
            break
    last = choice.finish(Done(1, 0, choice.count, "length"))
    assert last is not None
    assert last.finish is not None
    return text + last.text, last.finish


def spelt(name: str, text: str) -> list[int]:
    ids: list[int] = tokenizers()[name].encode(text, add_special_tokens=False).ids
    return ids


def check(name: str, ids: list[int], text: str, finish: Finish, skip: bool) -> None:
    assert finish.reason == "stop"
    kept = finish.kept
    assert kept is not None
    assert batch(name, ids[: kept.tokens], skip) + kept.rest == text
    if finish.completion_tokens > 2 * WINDOW:
        return  # a run of bytes may be too long to be looked into
    for more in range(kept.tokens + 1, finish.completion_tokens + 1):
        assert not text.startswith(batch(name, ids[:more], skip))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(ids=id_lists(), skip=st.booleans(), data=st.data())
def test_a_cut_anywhere(name: str, ids: list[int], skip: bool, data: st.DataObject) -> None:
    whole = batch(name, ids, skip)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 5))]
    text, finish = run(name, ids, stop=[stop], skip_special_tokens=skip)
    assert whole.startswith(text)
    check(name, ids, text, finish, skip)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(ids=id_lists(), pattern=st.sampled_from(["[a-z][^a-z]", r"\s[\s\S]{0,9}o", "\ufffd", "[^ -~]{3}"]))
def test_a_cut_by_a_pattern(name: str, ids: list[int], pattern: str) -> None:
    text, finish = run(name, ids, stop_regex=[pattern])
    if finish.reason == "stop":
        check(name, ids, text, finish, True)
    else:
        assert (text, finish.kept) == (batch(name, ids), None)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "gemma"])
def test_plain_text(name: str) -> None:
    ids = spelt(name, TEXTS[0])
    text, finish = run(name, ids, stop=["fox ju"])
    assert text.lstrip() == "The quick brown "
    check(name, ids, text, finish, True)
    assert run(name, ids)[1].kept is None
    assert run(name, ids, stop=["not there"])[1].kept is None


def test_a_token_that_is_cut_within() -> None:
    ids = spelt("byte_level", "so plain words")
    assert ids[-1:] == spelt("byte_level", "plain words")
    _, finish = run("byte_level", ids, stop=["n wo"])
    assert finish.kept == Kept(len(ids) - 1, "plai")
    _, finish = run("byte_level", ids, stop=["plain"])
    assert finish.kept == Kept(len(ids) - 1, "")


def test_special_tokens_that_are_not_shown_are_kept() -> None:
    (start,) = spelt("byte_level", START)
    ids = [*spelt("byte_level", "a"), start, start, *spelt("byte_level", "b")]
    assert run("byte_level", ids, stop=["b"])[1].kept == Kept(3, "")
    assert run("byte_level", ids, stop=[START], skip_special_tokens=False)[1].kept == Kept(1, "")


def test_incomplete_characters_are_the_rest() -> None:
    ids = spelt("metaspace", "🌳")
    assert len(ids) >= 4
    text, finish = run("gemma", [*ids[-4:], *spelt("gemma", "s")[-1:]], stop=["s"])
    assert (text, finish.kept) == ("🌳", Kept(4, ""))
    text, finish = run("gemma", ids[-4:-1], stop=["\ufffd"])
    assert (text, finish.kept) == ("", Kept(0, ""))
    _, finish = run("byte_level", spelt("byte_level", "é🌳")[:-1], stop=["\ufffd"])
    assert finish.kept is not None
    assert finish.kept.rest == ""


def test_a_long_run_of_bytes_is_not_decoded_again_and_again() -> None:
    (one,) = spelt("metaspace", "\u0001")[-1:]
    stream = kinds()["metaspace"].stream(True)
    for _ in range(2 * WINDOW):
        stream.push(one)
        assert stream.pending() is not None
    stream.push(one)
    assert stream.pending() is None


def test_only_what_a_cut_may_still_reach_is_remembered() -> None:
    borders = Borders()
    for _ in range(1000):
        borders.token("ab", "")
        borders.token("", "")
        borders.show(2)
    assert len(borders._borders) <= 2
    borders.token("abcdef", "")
    borders.token("gh", "")
    borders.show(3)
    assert borders.kept("") == Kept(2000, "abc")
    borders.show(3)
    assert borders.kept("") == Kept(2001, "")
