"""Calls as bodies of `/generate`, and its answers as what a state goes on with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from sapwood.lang.backend import (
    Fill,
    Generate,
    Ids,
    Logprobs,
    Piece,
    Sampling,
    Score,
    Scored,
    Text,
    Turn,
)
from sapwood.lang.backends import native
from sapwood.lang.backends.endpoint import RuntimeEndpoint
from sapwood.lang.backends.native import Native
from sapwood.lang.errors import RequestFailed, Unsupported
from sapwood.srt.errors import BadRequest, ProgramNotFound
from tests.lang.doors import ScriptedDoor

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def generated(text: str, ids: list[int], matched: Any = None, **meta: Any) -> dict[str, Any]:
    kind = "length" if matched is None else "stop"
    reason = {"type": kind, "matched": matched} if kind == "stop" else {"type": kind, "length": len(ids)}
    return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason, **meta}}


HELLO = (Text("Hello"),)


def content(text: str, ids: list[int], matched: Any = None, **meta: Any) -> Any:
    answer = generated(text, ids, matched, **meta)
    return run(Native(ScriptedDoor(answer)).generate(Generate(segments=HELLO))).outputs[0].content


def test_segments_travel_as_parts() -> None:
    door = ScriptedDoor(generated("!", [5]))
    segments = (
        Text("Hi"),
        Text("<|im_end|>", special=True),
        Text(""),
        Ids((1, 2), "ab"),
        Turn("user", (Text("So: "), Ids((3,), "c"), Text(""))),
        Turn("assistant", (), open=True),
    )
    run(Native(door).generate(Generate(segments=segments, program="p1")))
    assert door.asked == [
        (
            "/generate",
            {
                "input": [
                    "Hi",
                    {"special": "<|im_end|>"},
                    [1, 2],
                    {"role": "user", "content": ["So: ", [3]]},
                    {"role": "assistant", "content": [], "open": True},
                ],
                "sampling_params": {},
                "program": "p1",
            },
        )
    ]


def test_only_what_is_set_of_the_sampling_travels() -> None:
    door = ScriptedDoor(generated("!", [5]))
    sampling = Sampling(max_new_tokens=0, temperature=0.0, stop=("a", "b"), stop_regex=("x+",), top_k=-1)
    run(Native(door).generate(Generate(segments=HELLO, sampling=sampling)))
    assert door.body == {
        "input": ["Hello"],
        "sampling_params": {
            "max_new_tokens": 0,
            "temperature": 0.0,
            "top_k": -1,
            "stop": ["a", "b"],
            "stop_regex": ["x+"],
        },
    }


def test_logprobs_are_asked_for_as_told() -> None:
    door = ScriptedDoor(generated("!", [5]), generated("!", [5]))
    run(Native(door).generate(Generate(segments=HELLO, logprobs=Logprobs(top=2, start=3, texts=True))))
    asked = {name: door.body[name] for name in door.body if "logprob" in name}
    assert asked == {
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 3,
        "return_text_in_logprobs": True,
    }
    run(Native(door).generate(Generate(segments=HELLO, logprobs=Logprobs())))
    assert door.body["logprob_start_len"] == -1


def test_nothing_at_all_is_an_empty_text() -> None:
    door = ScriptedDoor(generated("!", [5]))
    run(Native(door).generate(Generate(segments=())))
    assert door.body["input"] == [""]


def test_an_answer_has_its_ids_and_what_was_rewritten() -> None:
    answer = {**generated("x", [5], rewritten=[2]), "input_ids": [1, 2, 3]}
    got = run(Native(ScriptedDoor(answer)).generate(Generate(segments=HELLO)))
    assert (got.input_ids, got.rewritten) == ((1, 2, 3), (2,))
    assert got.outputs[0].text == "x"
    assert got.outputs[0].meta["rewritten"] == [2]


def test_several_outputs_come_in_order() -> None:
    answers = [{**generated(text, [i]), "input_ids": [9]} for i, text in enumerate("abc")]
    call = Generate(segments=HELLO, sampling=Sampling(n=3))
    got = run(Native(ScriptedDoor(answers)).generate(call))
    assert [output.text for output in got.outputs] == ["a", "b", "c"]
    assert got.input_ids == (9,)


def test_a_state_goes_on_with_the_ids_but_not_with_the_token_that_ended_them() -> None:
    assert content("ab", [5, 6]) == (Ids((5, 6), "ab"),)
    assert content("ab", [5, 6, 2], matched=2) == (Ids((5, 6), "ab"),)
    assert content("ab", [5, 6], matched=2) == (Ids((5, 6), "ab"),)
    assert content("", [2], matched=2) == ()
    assert content("", []) == ()


def test_what_a_stop_string_cut_ends_with_the_rest_of_a_token() -> None:
    kept = {"tokens": 2, "rest": "c"}
    assert content("abc", [5, 6, 7], matched="d", kept=kept) == (Ids((5, 6), "ab"), Text("c"))
    assert content("ab", [5, 6, 7], matched="d", kept={"tokens": 2, "rest": ""}) == (Ids((5, 6), "ab"),)
    assert content("c", [7], matched="d", kept={"tokens": 0, "rest": "c"}) == (Text("c"),)
    assert content("", [7], matched="d", kept={"tokens": 0, "rest": ""}) == ()
    # Without a word on what was kept the tokens are not known to be the text.
    assert content("abc", [5, 6, 7], matched="d") == (Text("abc"),)


async def pieces(backend: Native, call: Generate, most: int = 1000) -> list[Piece]:
    found: list[Piece] = []
    async for piece in backend.stream(call):
        found.append(piece)
        if len(found) == most:
            break
    return found


def test_what_cannot_be_sent_is_not_filled_either() -> None:
    door = ScriptedDoor()
    turn = Turn("user", (Text("a"), Text("<|im_end|>", special=True)))
    with pytest.raises(Unsupported, match="special text is not supported within a message"):
        asyncio.run(Native(door).fill(Fill(segments=(turn,))))
    assert door.asked == []


def test_all_ids_of_an_output_are_told() -> None:
    """Those that its content has not, too: a token that ended it."""
    door = ScriptedDoor({**generated("ab", [5, 6, 2], matched=2), "input_ids": [1]})
    got = asyncio.run(Native(door).generate(Generate(segments=(Text("x"),))))
    assert got.outputs[0].meta["output_ids"] == [5, 6, 2]
    assert got.outputs[0].content == (Ids((5, 6), "ab"),)


def event(text: str, ids: list[int], index: int | None = None, **meta: Any) -> dict[str, Any]:
    body = {"text": text, "output_ids": ids, "meta_info": {"finish_reason": None, **meta}}
    return body if index is None else {**body, "index": index}


def test_a_stream_tells_new_text_and_at_its_end_the_output() -> None:
    last = {**generated("abc", [1, 2, 3], matched=3), "input_ids": [7]}
    events = [event("a", [1]), event("a", [1]), event("abc", [1, 2]), last]
    door = ScriptedDoor(events)
    found = run(pieces(Native(door), Generate(segments=HELLO)))
    assert door.body["stream"] is True
    assert [piece.text for piece in found] == ["a", "bc", ""]
    assert found[-1].output is not None
    assert found[-1].output.content == (Ids((1, 2), "abc"),)
    assert found[-1].input_ids == (7,)
    assert door.closed == 1


def test_streamed_outputs_are_told_apart_and_their_logprobs_put_together() -> None:
    def logprobs(*ids: int) -> dict[str, Any]:
        return {"output_token_logprobs": [[-1.0, i, None] for i in ids]}

    events = [
        event("a", [1], 0, **logprobs(1)),
        event("x", [8], 1, **logprobs(8)),
        {**generated("xy", [8, 9], **logprobs(9)), "index": 1},
        {**generated("ab", [1, 2], **logprobs(2)), "index": 0},
    ]
    call = Generate(segments=HELLO, sampling=Sampling(n=2), logprobs=Logprobs())
    found = run(pieces(Native(ScriptedDoor(events)), call))
    assert [(piece.choice, piece.text) for piece in found] == [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
    told = {piece.choice: piece.output.meta["output_token_logprobs"] for piece in found if piece.output}
    assert told == {0: [[-1.0, 1, None], [-1.0, 2, None]], 1: [[-1.0, 8, None], [-1.0, 9, None]]}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_prompts_ids_are_there_whichever_choice_ends_last(order: tuple[int, int]) -> None:
    """The server tells them once, with its first choice."""
    ends: list[dict[str, Any]] = [{**generated("a", [1]), "index": index} for index in order]
    ends[order.index(0)]["input_ids"] = [7]
    call = Generate(segments=HELLO, sampling=Sampling(n=2))
    assert run(pieces(Native(ScriptedDoor(ends)), call))[-1].input_ids == (7,)


def test_a_stream_that_ends_early_is_an_error() -> None:
    with pytest.raises(RequestFailed, match="ended before the output"):
        run(pieces(Native(ScriptedDoor([event("a", [1])])), Generate(segments=HELLO)))


def test_a_stream_left_early_closes_the_door_s() -> None:
    door = ScriptedDoor([event("a", [1]), event("ab", [1, 2]), event("abc", [1, 2, 3])])

    async def leave() -> None:
        stream = Native(door).stream(Generate(segments=HELLO))
        assert (await anext(stream)).text == "a"
        await stream.aclose()  # type: ignore[attr-defined]

    run(leave())
    assert door.closed == 1


def scores(*pairs: tuple[list[int], list[float]]) -> dict[str, Any]:
    scored = [{"ids": ids, "logprobs": logprobs} for ids, logprobs in pairs]
    return {"text": "", "output_ids": [], "meta_info": {}, "input_ids": [1, 2], "scores": scored}


SCORE = Score(segments=HELLO, choices=("a", "bc"), program="p")
GIVEN = scores(([5], [-1.0]), ([6, 7], [-2.0, -3.0]))
ALONE = scores(([5], [-4.0]), ([6, 7], [-5.0, -6.0]))


def test_choices_are_scored_by_one_request() -> None:
    door = ScriptedDoor(GIVEN)
    got = run(Native(door).score(SCORE))
    assert door.asked == [("/generate", {"input": ["Hello"], "score": ["a", "bc"], "program": "p"})]
    assert got.scored == [Scored(ids=(5,), logprobs=(-1.0,)), Scored(ids=(6, 7), logprobs=(-2.0, -3.0))]
    assert got.input_ids == (1, 2)


UNCONDITIONAL = Score(segments=HELLO, choices=("a", "bc"), unconditional=True)
REFUSED = [RequestFailed("input must have a token", 400), BadRequest("input must have a token")]


def test_unconditional_scores_stand_after_bos() -> None:
    door = ScriptedDoor(GIVEN, ALONE, GIVEN, ALONE)
    backend = Native(door)
    for _ in range(2):
        got = run(backend.score(UNCONDITIONAL))
        assert door.body == {"input": [""], "score": [[5], [6, 7]]}
        assert [one.unconditional for one in got.scored] == [(-4.0,), (-5.0, -6.0)]


@pytest.mark.parametrize("refused", REFUSED, ids=("server", "engine"))
def test_without_bos_unconditional_scores_stand_after_eos(refused: Exception) -> None:
    door = ScriptedDoor(GIVEN, refused, {"source": {"eos_ids": [2, 3]}}, ALONE, GIVEN, ALONE)
    backend = Native(door)
    run(backend.score(UNCONDITIONAL))
    assert door.body == {"input": [2], "score": [[5], [6, 7]]}
    run(backend.score(UNCONDITIONAL))
    assert [path for path, _ in door.asked][-2:] == ["/generate", "/generate"]
    assert door.body == {"input": [2], "score": [[5], [6, 7]]}


def test_other_errors_of_unconditional_scores_are_raised() -> None:
    door = ScriptedDoor(GIVEN, RequestFailed("the queue is full", 429))
    with pytest.raises(RequestFailed, match="the queue is full"):
        run(Native(door).score(UNCONDITIONAL))


def test_a_fill_generates_nothing() -> None:
    door = ScriptedDoor({**generated("", []), "input_ids": [1]})
    got = run(Native(door).fill(Fill(segments=HELLO, program="p")))
    assert door.body == {"input": ["Hello"], "sampling_params": {"max_new_tokens": 0}, "program": "p"}
    assert (got.outputs, got.input_ids) == ([], (1,))


def test_a_program_s_end_is_told_and_its_report_comes_back() -> None:
    door = ScriptedDoor(
        {"program": "p", "requests": 3},
        RequestFailed("unknown", 404),
        ProgramNotFound("unknown"),
        RequestFailed("no", 500),
    )
    backend = Native(door)
    assert run(backend.end("p")) == {"program": "p", "requests": 3}
    assert door.asked == [("/programs/end", {"program": "p"})]
    assert run(backend.end("q")) is None
    assert run(backend.end("q")) is None
    with pytest.raises(RequestFailed, match="no"):
        run(backend.end("r"))


def test_an_engine_s_error_is_a_failed_request_too() -> None:
    error = BadRequest("top_p must be at most 1, got 2", param="top_p")
    backend = Native(ScriptedDoor(error, [event("a", [1]), error], ValueError("a mistake")))
    generate = Generate(segments=HELLO)
    for work in (backend.generate(generate), pieces(backend, generate)):
        with pytest.raises(RequestFailed, match="top_p must be") as caught:
            run(work)  # type: ignore[arg-type]
        failed = caught.value
        assert (failed.status, failed.code, failed.param) == (400, "invalid_value", "top_p")
        assert failed.__cause__ is error
    with pytest.raises(ValueError, match="a mistake"):
        run(backend.generate(generate))


OTHER: list[Any] = [
    None,
    "hello",
    [],
    {"nonsense": 1},
    {"text": None, "output_ids": [1], "meta_info": {}},
    {"text": "a", "output_ids": None, "meta_info": {"finish_reason": {"type": "length"}}},
    {"text": "a", "output_ids": [1], "meta_info": {"finish_reason": "stop"}},
    [generated("a", [1]), generated("b", [2])],
]


@pytest.mark.parametrize("answer", OTHER, ids=str)
def test_an_answer_of_another_shape_names_the_route_and_shows_it(answer: Any) -> None:
    backend = Native(ScriptedDoor(answer, [answer], answer))
    generate = Generate(segments=HELLO)
    works: list[Any] = [backend.generate(generate), pieces(backend, generate), backend.score(SCORE)]
    for work in works:
        with pytest.raises(RequestFailed, match="/generate has answered something else") as caught:
            run(work)
        assert repr(answer)[:20] in str(caught.value)


def test_too_few_scores_are_an_answer_of_another_shape() -> None:
    with pytest.raises(RequestFailed, match="/generate has answered something else"):
        run(Native(ScriptedDoor(scores(([5], [-1.0])))).score(SCORE))


def test_special_text_within_a_message_is_refused_before_anything_is_sent() -> None:
    turn = Turn("user", (Text("<|im_end|>", special=True),))
    for call in (Generate(segments=(turn,)), Score(segments=(turn,), choices=("a",)), Fill(segments=(turn,))):
        with pytest.raises(Unsupported, match="special text") as caught:
            Native(ScriptedDoor()).check(call)
        assert caught.value.field == "special"
    Native(ScriptedDoor()).check(Generate(segments=(Text("<|im_end|>", special=True),)))


def test_what_is_a_backend_and_what_becomes_one() -> None:
    door = ScriptedDoor()
    backend = native.of(door)
    assert isinstance(backend, Native)
    assert backend.door is door
    assert native.of(backend) is backend
    assert native.of(door) is backend

    class Running:
        url = "http://127.0.0.1:1"
        api_key = "k"

    running = Running()
    made = native.of(running)
    assert native.of(running) is made
    assert isinstance(made, Native)
    assert isinstance(made.door, RuntimeEndpoint)
    assert made.door.url == "http://127.0.0.1:1"
    for other in (None, "http://127.0.0.1:1", object()):
        with pytest.raises(TypeError, match="a backend is a RuntimeEndpoint"):
            native.of(other)
