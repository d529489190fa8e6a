"""How many tokens a Chunk holds: `--stream-interval`, and answers that nobody sees in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt.channel import FRAME_WEIGHT, weight
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import (
    Abort,
    Admitted,
    Cancel,
    Chunk,
    Done,
    Ended,
    Finish,
    Generate,
    IdsPrompt,
    Kept,
    Refused,
    StopAt,
    TokenLogprob,
    Tokens,
    Verdict,
    pack,
)
from sapwood.srt.params import SamplingParams
from sapwood.srt.tokenizer.process import TokenizerLoop
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.requests import WHOLE_PIECE, NoTexts, Texts
from tests.tokenizer_kinds import byte_level
from tests.unit.test_tokenizer_loop import SOURCE, VOCABULARY, Bench, Box, World, check_choice, ids_of, tokens

LETTER = ids_of("b")[0]


def bench_of(interval: int, texts: Texts = VOCABULARY) -> Bench:
    bench = Bench()
    encoder = PromptEncoder(SOURCE, byte_level(), True)
    bench.loop = TokenizerLoop(
        0, SOURCE, encoder, texts, bench.scheduler, bench.server, Box(), interval=interval
    )
    return bench


def begin(bench: Bench, streamed: bool = True, **params: Any) -> int:
    """A request's key, once it was admitted."""
    bench.step(Generate("r", IdsPrompt(pack([5, 6])), SamplingParams(**params), streamed=streamed))
    (submit,) = bench.scheduler.take()
    key: int = submit.key
    bench.step(Admitted(key, Verdict(0, "cold"), 0.0))
    bench.server.take()
    return key


def sizes(bench: Bench) -> list[int]:
    """Tokens of each Chunk that the server has got."""
    return [len(m.ids) // 4 for m in bench.server.take() if isinstance(m, Chunk)]


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_the_first_token_goes_at_once_and_the_others_together(interval: int) -> None:
    bench = bench_of(interval)
    key = begin(bench)
    for _ in range(1 + 2 * interval + interval // 2):
        bench.step(tokens((key, LETTER)))
    assert sizes(bench) == [1, interval, interval]
    bench.step(Done(key, 0, 1 + 2 * interval + interval // 2, "length"))
    last, ended = bench.server.take()
    assert (last.ids, last.finish.reason) == (pack([LETTER] * (interval // 2)), "length")
    assert ended == Ended("r")


def test_the_first_token_is_one_that_is_seen() -> None:
    """A character of three tokens shows with the third: until then every token goes out alone."""
    bench = bench_of(8)
    key = begin(bench)
    tree = ids_of("🌳")
    assert len(tree) == 3
    for token in [*tree, *[LETTER] * 8]:
        bench.step(tokens((key, token)))
    assert sizes(bench) == [1, 1, 1, 8]


def test_without_texts_the_first_token_is_seen_as_it_is() -> None:
    bench = bench_of(4, NoTexts())
    key = begin(bench)
    for _ in range(9):
        bench.step(tokens((key, LETTER)))
    assert sizes(bench) == [1, 4, 4]


def test_what_nobody_sees_in_pieces_comes_in_few() -> None:
    bench = bench_of(1)
    key = begin(bench, streamed=False)
    for _ in range(2 * WHOLE_PIECE):
        bench.step(tokens((key, LETTER)))
    bench.step(Done(key, 0, 2 * WHOLE_PIECE, "length"))
    assert sizes(bench) == [1, WHOLE_PIECE, WHOLE_PIECE - 1]


@pytest.mark.parametrize(("streamed", "interval"), [(False, 1), (True, 1024)])
def test_logprobs_never_make_more_than_a_frame(streamed: bool, interval: int) -> None:
    bench = bench_of(interval)
    key = begin(bench, streamed=streamed, logprobs=20, logprob_ids=[5, 6])
    value = TokenLogprob(LETTER, -1.0, [(LETTER, -1.0)] * 20, [-1.0, -2.0])
    for _ in range(1000):
        plain = tokens((key, LETTER))
        bench.step(Tokens(plain.keys, plain.ids, {0: value}))
    chunks = [m for m in bench.server.take() if isinstance(m, Chunk)]
    assert 1000 // len(chunks) > 100
    assert max(weight(chunk) for chunk in chunks) <= FRAME_WEIGHT


@pytest.mark.parametrize("how", ["abort", "error", "refused", "stop"])
def test_an_end_of_any_kind_brings_what_waited(how: str) -> None:
    bench = bench_of(100)
    key = begin(bench, stop=["."])
    for token in ids_of("abcd"):
        bench.step(tokens((key, token)))
    seen = [m.text for m in bench.server.take()]
    assert seen == ["a"]
    if how == "abort":
        bench.step(Abort("r"))
        assert bench.scheduler.take() == [Cancel(key)]
        bench.step(Done(key, 0, 4, "abort"))
        last = Finish("abort", None, 4)
    elif how == "stop":
        bench.step(tokens((key, ids_of(".")[0])))
        assert bench.scheduler.take() == [StopAt(key, 0, 5)]
        bench.step(Done(key, 0, 5, "stop"))
        last = Finish("stop", ".", 5, kept=Kept(4, ""))
    else:
        error = ErrorInfo(500, "server_error", "x", "y")
        bench.step(Done(key, 0, 4, "error", None, error) if how == "error" else Refused(key, error))
        chunk, ended = bench.server.take()
        assert (chunk.text, chunk.finish, ended) == ("bcd", None, Ended("r", error))
        return
    chunk, ended = bench.server.take()
    assert (chunk.text, chunk.finish, ended) == ("bcd", last, Ended("r"))


@pytest.mark.parametrize("seed", range(40))
def test_larger_pieces_are_the_same_text(seed: int) -> None:
    interval = (2, 5, 100)[seed % 3]
    world = World(seed)
    world.bench = bench_of(interval)
    generate = world._generate
    unseen = {f"r{i}" for i in range(0, 12, 4)}

    def some_unseen(rid: str) -> Generate:
        message = generate(rid)
        message.streamed = rid not in unseen
        return message

    world._generate = some_unseen  # type: ignore[method-assign]
    world.run(12)
    ends = [m.rid for m in world.got if isinstance(m, Ended)]
    assert sorted(ends) == sorted(f"r{i}" for i in range(12))
    for rid in ends:
        submit = world.requests.get(rid)
        for choice in range(submit.params.n if submit is not None else 0):
            chunks = [m for m in world.got if isinstance(m, Chunk) and (m.rid, m.choice) == (rid, choice)]
            check_choice(world, rid, chunks, choice)
            check_pieces(chunks, WHOLE_PIECE if rid in unseen else interval, rid not in unseen)


def check_pieces(chunks: list[Chunk], least: int, streamed: bool) -> None:
    """All but the last hold enough, once there was something to see."""
    seen = not streamed
    for i, chunk in enumerate(chunks[:-1]):
        assert len(chunk.ids) // 4 >= (least if seen and i else 1)
        seen = seen or bool(chunk.text)
