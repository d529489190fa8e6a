"""What is read of prompts, on its way to the server: named, in order, in frames that hold nobody up."""

from __future__ import annotations

import itertools
import time

import pytest

from sapwood.srt.channel import FRAME_WEIGHT, weight
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
    PromptRead,
    Read,
    Started,
    TextLogprob,
    TokenLogprob,
    Tokens,
    Verdict,
    encode,
    pack,
)
from sapwood.srt.params import SamplingParams
from sapwood.srt.tokenizer.delivery import Delivery
from tests.unit.test_tokenizer_delivery import Server
from tests.unit.test_tokenizer_loop import VOCABULARY, Bench, Box, ids_of

WORDS = ids_of("the quick dog runs again")
VERDICT = Verdict(3, "logprobs")


def value(token: int, top: int = 0, chosen: list[float] | None = None) -> TokenLogprob:
    return TokenLogprob(token, -1.5, [(t, -2.0 - t) for t in WORDS[:top]], chosen or [])


def read_request(bench: Bench, **params: object) -> int:
    asked = SamplingParams(**{"logprobs": 2, "logprob_start": 0, **params})  # type: ignore[arg-type]
    bench.step(Generate("r", IdsPrompt(pack(WORDS)), asked))
    (submit,) = bench.scheduler.take()
    key: int = submit.key
    return key


def test_values_get_the_text_and_bytes_of_every_token() -> None:
    bench = Bench()
    key = read_request(bench, logprob_ids=[WORDS[3], 40])
    told = PromptRead(key, 1, [value(WORDS[1], 2, [-7.0, -8.0])])
    bench.step(Admitted(key, VERDICT, 0.0, 0.25), told)
    started, read = bench.server.take()
    assert (started.verdict, started.saved) == (VERDICT, 0.25)
    describe = VOCABULARY.describe
    first, second = WORDS[:2]
    assert read == Read(
        "r",
        1,
        [
            TextLogprob(
                second,
                -1.5,
                *describe(second),
                [(first, -2.0 - first, *describe(first)), (second, -2.0 - second, *describe(second))],
                [(WORDS[3], -7.0, *describe(WORDS[3])), (40, -8.0, *describe(40))],
            )
        ],
    )
    assert describe(second)[1] == b" qu"


def test_output_tells_the_chosen_ids_too() -> None:
    bench = Bench()
    key = read_request(bench, logprob_ids=[40])
    keys = key.to_bytes(8, "little")
    bench.step(Admitted(key, VERDICT, 0.0), Tokens(keys, pack(WORDS[:1]), {0: value(WORDS[0], 1, [-9.0])}))
    chunk = bench.server.take()[-1]
    assert chunk.logprobs[0].chosen == [(40, -9.0, *VOCABULARY.describe(40))]


def test_what_is_read_comes_between_the_start_and_the_first_chunk() -> None:
    bench = Bench()
    key = read_request(bench)
    keys = key.to_bytes(8, "little")
    bench.step(
        Admitted(key, VERDICT, 0.0),
        PromptRead(key, 1, [value(t) for t in WORDS[1:]]),
        Tokens(keys, pack(WORDS[:1]), {0: value(WORDS[0])}),
        Done(key, 0, 1, "length"),
    )
    assert [type(m) for m in bench.server.take()] == [Started, Read, Chunk, Ended]


def test_no_output_ends_with_a_finish_of_nothing() -> None:
    bench = Bench()
    key = read_request(bench, max_tokens=0, n=3)
    bench.step(
        Admitted(key, VERDICT, 0.0),
        PromptRead(key, 1, [value(t) for t in WORDS[1:]]),
        *(Done(key, choice, 0, "length") for choice in range(3)),
    )
    _started, _read, *chunks, ended = bench.server.take()
    assert chunks == [Chunk("r", c, "", b"", [], Finish("length", None, 0)) for c in range(3)]
    assert ended == Ended("r")


def test_a_hidden_state_is_passed_on() -> None:
    bench = Bench()
    key = read_request(bench, logprobs=None, logprob_start=None, max_tokens=0, pooling="mean")
    bench.step(Admitted(key, VERDICT, 0.0), PromptRead(key, pooled=b"1234"), Done(key, 0, 0, "length"))
    _started, read, chunk, _ended = bench.server.take()
    assert read == Read("r", pooled=b"1234")
    assert chunk == Chunk("r", 0, "", b"", None, Finish("length", None, 0))


def test_what_comes_after_the_end_is_dropped() -> None:
    bench = Bench()
    key = read_request(bench)
    bench.step(Admitted(key, VERDICT, 0.0), Abort("r"), Done(key, 0, 0, "abort"))
    bench.server.take()
    bench.step(PromptRead(key, 1, [value(WORDS[1])]))
    assert bench.server.take() == []


def long_read(key: int, count: int, alternatives: int) -> list[PromptRead]:
    """What a scheduler tells of a prompt after one step."""
    top = [(token, -float(token)) for token in range(20, 20 + alternatives)]
    values = [TokenLogprob(WORDS[i % 5], -float(i), top) for i in range(count)]
    size = FRAME_WEIGHT // (1 + alternatives)
    return [PromptRead(key, 1 + at, values[at : at + size]) for at in range(0, count, size)]


def test_other_streams_go_on_while_a_long_prompt_is_told() -> None:
    bench = Bench()
    other = bench.submit("other", max_tokens=50)
    key = read_request(bench, logprobs=20)
    bench.server.frames.clear()
    mine = key.to_bytes(8, "little")
    parts = long_read(key, 5000, 20)
    bench.step(
        Admitted(key, VERDICT, 0.0), *parts, Tokens(mine, pack(WORDS[:1]), {0: value(WORDS[0])}),
        Done(key, 0, 1, "length"),
    )  # fmt: skip
    steps = 0
    while not any(m == Ended("r") for frame in bench.server.frames for m in frame):
        bench.step(Tokens(other.to_bytes(8, "little"), pack([40])))
        steps += 1
    assert steps >= len(parts) // 2
    got = bench.server.take()
    rids = [m.rid for m in got if m.rid == "other" or isinstance(m, Read)]
    before = [len(list(run)) for rid, run in itertools.groupby(rids) if rid == "r"]
    assert max(before[1:]) <= 2, "no more than a frame is told before it is the other stream's turn"
    of_mine = [m for m in got if m.rid == "r"]
    kinds = [type(m) for m in of_mine]
    told = 1 + len(parts)
    assert kinds[:told] == [Started, *[Read] * len(parts)]
    assert (set(kinds[told:-1]), kinds[-1]) == ({Chunk}, Ended)
    assert b"".join(chunk.ids for chunk in of_mine[told:-1]) == pack(WORDS[:1])
    assert [v.logprob for m in of_mine if isinstance(m, Read) for v in m.logprobs] == [
        -i for i in range(5000)
    ]
    assert of_mine[-2].finish == Finish("length", None, 1)


def test_an_end_by_an_error_does_not_wait_for_what_is_left_to_tell() -> None:
    bench = Bench()
    bench.loop._server = Delivery(bench.server, limit=20)
    key = read_request(bench, logprobs=20)
    bench.server.open = False
    mine = key.to_bytes(8, "little")
    bench.step(Admitted(key, VERDICT, 0.0), *long_read(key, 5000, 20), Tokens(mine, pack(WORDS[:1])))
    bench.step()
    assert bench.scheduler.take() == [Cancel(key)]
    bench.server.open = True
    while bench.loop._unnamed:
        bench.step()
    (ended,) = bench.server.take()
    assert (ended.rid, ended.error.code) == ("r", "queue_full")
    assert bench.loop._patience() > 0


@pytest.mark.parametrize(("alternatives", "chosen"), [(0, 0), (20, 0), (20, 256)])
def test_a_long_prompt_is_sent_in_bounded_frames(alternatives: int, chosen: int) -> None:
    pairs = 1 + alternatives + chosen
    read = Read("r", 1, [TextLogprob(5, -1.0, "x", b"x", [(5, -1.0, "x", b"x")] * (pairs - 1))] * 10)
    chunk = Chunk("r", 0, "x", pack([5]), read.logprobs)
    server = Box()
    Delivery(server).send([read, chunk] * 300)
    assert [m for frame in server.frames for m in frame] == [read, chunk] * 300
    sizes = [sum(map(weight, frame)) for frame in server.frames]
    assert max(sizes) < FRAME_WEIGHT + 10 * pairs
    assert min(sizes[:-1]) >= FRAME_WEIGHT
    assert len(encode(server.frames[0])) < 2**20


def test_a_backlog_counts_values_and_gives_them_up_as_output() -> None:
    server = Server()
    delivery = Delivery(server, limit=1000)
    values = [TextLogprob(5, -1.0, "x", b"x", [(5, -1.0, "x", b"x")] * 4)] * 50
    read = Read("r", 1, values)
    delivery.send([Started("r", b"", VERDICT, 0.0), *[read] * 3])
    assert not delivery.overfull
    delivery.send([Chunk("r", 0, "x", pack([5]), values)])
    assert delivery.overfull
    assert delivery.shed() == ["r"]
    assert not delivery.overfull
    assert len(delivery) == 0
    delivery.send([read, Ended("r")])
    server.room = 10
    delivery.retry()
    assert server.got == [read, Ended("r")]
    assert not delivery.overfull


def test_a_value_is_cheap() -> None:
    """Values with 20 alternatives, as one message brings them: the best time, against many times that."""
    bench = Bench()
    key = read_request(bench, logprobs=20)
    bench.step(Admitted(key, VERDICT, 0.0))
    seconds = []
    for _ in range(10):
        (message, *_rest) = long_read(key, FRAME_WEIGHT, 20)
        begin = time.perf_counter()
        bench.step(message)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.05
