"""What chats and completions answer, whole and streamed, as outputs and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sapwood.lang.backend import (
    Generate,
    Logprobs,
    Piece,
    Sampling,
    Score,
    Scored,
    Text,
)
from sapwood.lang.backends.openai import OpenAI
from sapwood.lang.choices import greedy_token_selection
from sapwood.lang.errors import LangError, RequestFailed
from tests.lang.doors import Request, Web, web
from tests.lang.openai_doors import (
    CHAT,
    TEXT,
    answer,
    answering,
    backend,
    completion,
    generate,
    message,
)


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as server:
        yield server


def test_logprobs_come_as_generate_has_them(server: Web) -> None:
    top = [{"token": "4", "logprob": -0.5}, {"token": "5", "logprob": -1.5}]
    told = {"content": [{"token": "4", "logprob": -0.5, "top_logprobs": top}]}
    call = Generate(segments=CHAT, logprobs=Logprobs(top=2))
    got = generate(server, CHAT, answer(message("4", logprobs=told)), call)
    body = server.asked[0].body
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    tops = [[[-0.5, None, "4"], [-1.5, None, "5"]]]
    assert got.outputs[0].meta["output_token_logprobs"] == [[-0.5, None, "4"]]
    assert got.outputs[0].meta["output_top_logprobs"] == tops

    told = {
        "tokens": ["4"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"4": -0.5, "5": -1.5}],
        "text_offset": [0],
    }
    call = Generate(segments=TEXT, logprobs=Logprobs(top=2))
    got = generate(server, TEXT, answer(completion("4", logprobs=told)), call)
    assert server.asked[1].body["logprobs"] == 2
    assert got.outputs[0].meta["output_token_logprobs"] == [[-0.5, None, "4"]]
    assert got.outputs[0].meta["output_top_logprobs"] == tops


def test_reasoning_is_told_apart_by_servers_that_do(server: Web) -> None:
    call = Generate(segments=CHAT, reasoning=True)
    given = answer(message("4", message={"reasoning_content": "hm"}))
    got = generate(server, CHAT, given, call, server="sglang")
    assert (got.outputs[0].text, got.outputs[0].meta["reasoning_content"]) == ("4", "hm")


def delta(text: str | None, index: int = 0, reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason, **more}
    return {"id": "x-1", "choices": [choice]}


USAGE = {"id": "x-1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


async def pieces(made: OpenAI, call: Generate) -> list[Piece]:
    return [piece async for piece in made.stream(call)]


def test_a_chat_s_stream(server: Web) -> None:
    logprobs = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}]}
    events = (
        {"id": "x-1", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        delta("a", logprobs=logprobs),
        delta("b", logprobs=logprobs),
        delta(None, reason="length"),
        USAGE,
    )
    server.handler = answering(events)
    found = asyncio.run(pieces(backend(server), Generate(segments=CHAT)))
    body = server.asked[0].body
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert "".join(piece.text for piece in found) == "ab"
    assert [piece.output is None for piece in found] == [True] * (len(found) - 1) + [False]
    output = found[-1].output
    assert output is not None
    assert (output.text, output.content) == ("ab", (Text("ab"),))
    assert output.meta["finish_reason"] == {"type": "length", "matched": None}
    assert output.meta["prompt_tokens"] == 9
    assert output.meta["output_token_logprobs"] == [[-1.0, None, "a"]] * 2


def test_a_completion_s_stream_of_two_outputs(server: Web) -> None:
    def chunk(text: str, index: int, reason: str | None = None) -> dict[str, Any]:
        return {"id": "x-1", "choices": [completion(text, index, reason)]}  # type: ignore[arg-type]

    server.handler = answering(
        (chunk("a", 0), chunk("x", 1), chunk("y", 1, "stop"), chunk("b", 0, "stop"), USAGE)
    )
    found = asyncio.run(pieces(backend(server), Generate(segments=TEXT, sampling=Sampling(n=2))))
    told = [(piece.choice, piece.text) for piece in found if piece.output is None]
    assert told == [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
    assert [(piece.choice, piece.output.text) for piece in found if piece.output] == [(0, "ab"), (1, "xy")]


def test_a_stream_that_ends_early_is_an_error(server: Web) -> None:
    server.handler = answering((delta("a"),))
    with pytest.raises(RequestFailed, match="ended before the output"):
        asyncio.run(pieces(backend(server), Generate(segments=CHAT)))


def test_an_error_is_raised_with_the_server_s_words(server: Web) -> None:
    async def refuse(request: Request) -> None:
        error = {"message": "no such model", "type": "invalid_request_error", "code": "model_not_found"}
        await request.answer({"error": error}, 404)

    server.handler = refuse
    with pytest.raises(RequestFailed, match="no such model") as caught:
        asyncio.run(backend(server).generate(Generate(segments=CHAT)))
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def echoed(index: int, *tokens: tuple[str, float | None]) -> dict[str, Any]:
    offsets, at = [], 0
    for token, _ in tokens:
        offsets.append(at)
        at += len(token)
    logprobs = {
        "tokens": [token for token, _ in tokens],
        "token_logprobs": [value for _, value in tokens],
        "text_offset": offsets,
        "top_logprobs": None,
    }
    return completion("".join(token for token, _ in tokens), index, "length", logprobs=logprobs)


def test_choices_are_scored_by_echoed_prompts(server: Web) -> None:
    """The second choice's first token begins before the choice: it counts."""
    server.handler = answering(
        answer(
            echoed(1, ("2+", None), ("2", -1.0), ("=5", -0.75), ("0", -0.25)),
            echoed(0, ("2+", None), ("2", -1.0), ("=", -2.0), ("4", -0.5)),
        )
    )
    call = Score(segments=TEXT, choices=("4", "50"))
    made = backend(server, server="vllm")
    made.check(call)
    got = asyncio.run(made.score(call))
    (request,) = server.asked
    assert request.path == "/v1/completions"
    assert request.body == {
        "model": "tiny",
        "prompt": ["2+2=4", "2+2=50"],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
    }
    assert got.scored == [Scored(ids=(), logprobs=(-0.5,)), Scored(ids=(), logprobs=(-0.75, -0.25))]
    assert greedy_token_selection(call.choices, got.scored).decision == "4"


def test_an_endpoint_without_echoed_logprobs_is_an_error(server: Web) -> None:
    server.handler = answering(answer(completion("2+2=4", logprobs=None)))
    with pytest.raises(LangError, match="does not tell the logprobs"):
        asyncio.run(backend(server, server="vllm").score(Score(segments=TEXT, choices=("4",))))


OTHER: list[Any] = [None, [], {"nonsense": 1}, {"choices": []}, {"choices": [{"index": "a"}]}]


@pytest.mark.parametrize("given", OTHER, ids=str)
def test_an_answer_of_another_shape_names_the_route_and_shows_it(server: Web, given: Any) -> None:
    async def always(request: Request) -> None:
        if request.body.get("stream"):
            await request.events(given)
        else:
            await request.answer(given)

    server.handler = always
    made = backend(server, server="vllm")
    works: list[Any] = [
        made.generate(Generate(segments=CHAT)),
        made.generate(Generate(segments=TEXT)),
        made.score(Score(segments=TEXT, choices=("4", "5"))),
        pieces(made, Generate(segments=CHAT)),
    ]
    for work in works:
        with pytest.raises(RequestFailed) as caught:
            asyncio.run(work)
        assert server.url in str(caught.value) or "ended before the output" in str(caught.value)
    with pytest.raises(RequestFailed, match="/v1/chat/completions has answered something else"):
        generate(server, CHAT, {"choices": [message(["a"])]})  # type: ignore[arg-type]
