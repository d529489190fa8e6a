"""Incremental detokenising equals the batch decode, for every kind of tokenizer and any ids."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders

from sapwood.srt.tokenizer.vocabulary import Vocabulary
from tests.tokenizer_kinds import SPECIAL, TEXTS, byte_level, metaspace


def with_decoder(make: Callable[[], Tokenizer], decoder: object) -> Tokenizer:
    tokenizer = Tokenizer.from_str(make().to_str())
    tokenizer.decoder = decoder
    return tokenizer


@functools.cache
def kinds() -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in tokenizers().items()}


@functools.cache
def tokenizers() -> dict[str, Tokenizer]:
    return {
        "byte_level": byte_level(),
        "byte_level_fused": with_decoder(
            byte_level, decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
        ),
        "byte_level_windowed": with_decoder(
            byte_level, decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 0, 0)])
        ),
        "metaspace": metaspace(),
        "gemma": with_decoder(
            metaspace,
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        ),
        "metaspace_always": with_decoder(metaspace, decoders.Metaspace(prepend_scheme="always")),
        "metaspace_never": with_decoder(metaspace, decoders.Metaspace(prepend_scheme="never")),
        "metaspace_bytes": with_decoder(
            metaspace,
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
        ),
        "strip_two": with_decoder(
            metaspace,
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        ),
        "wordpiece": with_decoder(metaspace, decoders.WordPiece(prefix="s", cleanup=False)),
    }  # fmt: skip


NAMES = [
    "byte_level", "byte_level_fused", "byte_level_windowed", "metaspace", "gemma",
    "metaspace_always", "metaspace_never", "metaspace_bytes", "strip_two", "wordpiece",
]  # fmt: skip


def batch(name: str, ids: list[int], skip: bool = True) -> str:
    text: str = tokenizers()[name].decode(ids, skip_special_tokens=skip)
    return text


def stream(name: str, ids: list[int], skip: bool = True) -> list[str]:
    out = kinds()[name].stream(skip)
    return [*(out.push(token) for token in ids), out.finish()]


@st.composite
def id_lists(draw: st.DrawFn) -> list[int]:
    """Random ids, encodings of real text cut anywhere, runs of byte tokens, ids of no token, mixed."""
    some = st.one_of(
        st.lists(st.integers(0, 470), max_size=6),
        st.lists(st.integers(0, 262), min_size=1, max_size=6),
        st.builds(
            lambda text, start, length: byte_level().encode(text).ids[start : start + length],
            st.sampled_from(TEXTS), st.integers(0, 30), st.integers(0, 12),
        ),
        st.builds(
            lambda text, start, length: metaspace().encode(text).ids[start : start + length],
            st.sampled_from(TEXTS), st.integers(0, 30), st.integers(0, 12),
        ),
        st.just([100_000, 2**31 - 1]),
    )  # fmt: skip
    return [token for part in draw(st.lists(some, max_size=8)) for token in part]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(ids=id_lists(), skip=st.booleans())
def test_joined_deltas_are_the_batch_decode(name: str, ids: list[int], skip: bool) -> None:
    assert "".join(stream(name, ids, skip)) == batch(name, ids, skip)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(ids=id_lists())
def test_at_any_time_what_was_sent_begins_the_batch_decode(name: str, ids: list[int]) -> None:
    out, sent = kinds()[name].stream(True), ""
    for n, token in enumerate(ids, 1):
        sent += out.push(token)
        assert batch(name, ids[:n]).startswith(sent)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_with_a_space_after_an_incomplete_character(name: str) -> None:
    """An incomplete byte, then a word with its space: nothing raises, nothing is lost or doubled."""
    tokenizer = tokenizers()[name]
    word = tokenizer.encode(" the", add_special_tokens=False).ids
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for cut in range(len(ids) + 1):
            mixed = ids[:cut] + word + ids[cut:]
            assert "".join(stream(name, mixed)) == batch(name, mixed)


@pytest.mark.parametrize("name", ["byte_level", "byte_level_windowed"])
def test_a_character_comes_as_soon_as_it_is_whole(name: str) -> None:
    ids = byte_level().encode("é🌳").ids
    deltas = stream(name, ids)
    assert [d for d in deltas if d] == ["é", "🌳"]
    assert deltas[-2:] == ["🌳", ""]


@pytest.mark.parametrize("name", NAMES)
def test_incomplete_bytes_are_flushed_as_in_a_batch_decode(name: str) -> None:
    ids = tokenizers()[name].encode("a🌳").ids[:-1]
    assert "".join(stream(name, ids)) == batch(name, ids)


def test_words_of_a_metaspace_tokenizer_keep_their_spaces() -> None:
    vocab = metaspace().get_vocab()
    ids = [vocab[piece] for piece in ("▁the", "▁dog", "▁sleeps", ",", "▁dog", "s", "▁", "▁the")]
    assert stream("metaspace", ids) == ["the", " dog", " sleeps", ",", " dog", "s", " ", " the", ""]
    ids = metaspace().encode("the dog sleeps,  dogs the").ids
    assert "".join(stream("metaspace", ids)) == "the dog sleeps,  dogs the"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("byte_level")])
def test_spaces_survive_wherever_a_window_is_cut(name: str) -> None:
    vocab = metaspace().get_vocab()
    for before in range(20):
        ids = [vocab["dog"]] * before + [vocab[piece] for piece in ("▁", "▁dog", "▁▁", "▁", "▁▁a", "dog")]
        assert "".join(stream(name, ids)) == batch(name, ids)


def test_a_wrong_byte_spoils_its_whole_run_but_no_more() -> None:
    """Byte fallback makes text of a run of byte tokens as a whole, so it is held until the run is over."""
    vocab = metaspace().get_vocab()
    run = [vocab[f"<0x{b:02X}>"] for b in "木".encode()]
    assert stream("metaspace", [*run, vocab["dog"]]) == ["", "", "", "木dog", ""]
    assert stream("metaspace", [*run, run[0], vocab["dog"]]) == ["", "", "", "", "\ufffd" * 4 + "dog", ""]
    assert stream("metaspace", run) == ["", "", "", "木"]


@pytest.mark.parametrize("name", NAMES)
def test_unknown_ids_are_nothing(name: str) -> None:
    some = tokenizers()[name].encode("dog é").ids
    for token in (5_000, 2**31 - 1, -1):
        mixed = [x for known in some for x in (token, known, token)]
        assert "".join(stream(name, mixed)) == batch(name, some)
        assert kinds()[name].describe(token) == ("", b"")


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_skipped_or_shown(name: str) -> None:
    start, end = (tokenizers()[name].token_to_id(s) for s in SPECIAL)
    ids = [start, *tokenizers()[name].encode("dog").ids, end]
    assert not any(s in "".join(stream(name, ids, skip=True)) for s in SPECIAL)
    assert all(s in "".join(stream(name, ids, skip=False)) for s in SPECIAL)


def test_single_tokens_are_described_with_space_and_bytes() -> None:
    level, meta = kinds()["byte_level"], kinds()["metaspace"]
    first = byte_level().encode(" é").ids
    assert b"".join(level.describe(token)[1] for token in first) == " é".encode()
    assert level.describe(byte_level().token_to_id("<|end|>")) == ("<|end|>", b"<|end|>")
    half = byte_level().encode("🌳").ids[0]
    assert level.describe(half)[0] == "\ufffd"
    vocab = metaspace().get_vocab()
    assert meta.describe(vocab["▁dog"]) == (" dog", b" dog")
    assert meta.describe(vocab["<0xE6>"]) == ("\ufffd", b"\xe6")
    assert meta.describe(vocab["<|end|>"]) == ("<|end|>", b"<|end|>")


def test_a_window_does_not_grow_with_the_output() -> None:
    """A thousand tokens later a token costs no more than at the start."""
    ids = metaspace().encode("the dog sleeps, " * 400).ids
    out = kinds()["metaspace"].stream(True)
    for token in ids:
        out.push(token)
        assert len(out._ids) <= 16  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "limit"), [("byte_level", 10e-6), ("metaspace", 40e-6)])
def test_a_token_is_cheap(name: str, limit: float) -> None:
    """The best of several runs, against four times the aim, so that a busy machine does not fail it."""
    ids = tokenizers()[name].encode("the dog sleeps, again and again " * 50).ids
    best = min(_seconds(name, ids) for _ in range(5))
    assert best / len(ids) < limit


def _seconds(name: str, ids: list[int]) -> float:
    out = kinds()[name].stream(True)
    begin = time.perf_counter()
    for token in ids:
        out.push(token)
    return time.perf_counter() - begin
