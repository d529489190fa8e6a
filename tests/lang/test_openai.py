"""Calls as OpenAI's chats and completions; what an endpoint cannot do is refused before anything is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sapwood.lang.backend import (
    Answer,
    Fill,
    Generate,
    Ids,
    Logprobs,
    Output,
    Piece,
    Sampling,
    Score,
    Scored,
    Segments,
    Text,
    Turn,
)
from sapwood.lang.backends.openai import OpenAI
from sapwood.lang.choices import greedy_token_selection
from sapwood.lang.errors import LangError, RequestFailed, Unsupported
from tests.lang.doors import Request, Web, web

SYSTEM = Turn("system", (Text("Be "), Text("brief.")))
USER = Turn("user", (Text("2+2="),))
OPEN = Turn("assistant", (), open=True)
BEGUN = Turn("assistant", (Text("It is "), Ids((5, 6), "about ")), open=True)
CHAT: Segments = (SYSTEM, USER, OPEN)
TEXT: Segments = (Text("2+2"), Ids((7,), "="))


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as server:
        yield server


def answering(*values: Any) -> Any:
    left = list(values)

    async def handler(request: Request) -> None:
        value = left.pop(0)
        if isinstance(value, tuple):
            await request.events(*value)
        else:
            await request.answer(value)

    return handler


def message(text: str | None, index: int = 0, reason: str = "stop", **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, **more.pop("message", {})}
    return {"index": index, "message": said, "finish_reason": reason, **more}


def completion(text: str, index: int = 0, reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, **more}


def answer(*choices: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    return {"id": "x-1", "choices": list(choices), "usage": usage}


def backend(at: Web, **options: Any) -> OpenAI:
    return OpenAI("tiny", at.url + "/v1", "key", **options)


def generate(at: Web, segments: Segments, given: Any, call: Any = None, **options: Any) -> Answer:
    at.handler = answering(given)
    call = call or Generate(segments=segments)
    made = backend(at, **options)
    made.check(call)
    return asyncio.run(made.generate(call))


def test_messages_go_as_a_chat(server: Web) -> None:
    got = generate(server, CHAT, answer(message("4", matched_stop=2)))
    (request,) = server.asked
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer key"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    assert request.body == {"model": "tiny", "messages": messages}
    meta = {
        "id": "x-1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "completion_tokens": 3,
    }
    assert got.outputs == [Output(text="4", content=(Text("4"),), meta=meta)]
    assert got.input_ids is None


def test_text_goes_as_a_completion(server: Web) -> None:
    got = generate(server, TEXT, answer(completion("4")))
    (request,) = server.asked
    assert (request.path, request.body) == ("/v1/completions", {"model": "tiny", "prompt": "2+2="})
    assert (got.outputs[0].text, got.outputs[0].content) == ("4", (Text("4"),))


def test_an_empty_output_adds_nothing(server: Web) -> None:
    assert generate(server, CHAT, answer(message(None))).outputs[0].content == ()


def test_several_outputs_are_in_the_order_of_their_index(server: Web) -> None:
    call = Generate(segments=CHAT, sampling=Sampling(n=2))
    got = generate(server, CHAT, answer(message("b", 1), message("a", 0)), call)
    assert [output.text for output in got.outputs] == ["a", "b"]
    assert "completion_tokens" not in got.outputs[0].meta
    assert server.asked[0].body["n"] == 2


def test_a_begun_message_is_gone_on_with_where_the_server_can(server: Web) -> None:
    generate(server, (USER, BEGUN), answer(message("4")), server="vllm")
    body = server.asked[0].body
    assert body["messages"][-1] == {"role": "assistant", "content": "It is about "}
    assert (body["add_generation_prompt"], body["continue_final_message"]) == (False, True)


SAMPLING = Sampling(
    max_new_tokens=8,
    temperature=0.5,
    top_p=0.9,
    seed=3,
    stop=("\n",),
    presence_penalty=0.1,
    frequency_penalty=0.2,
)
PLAIN = {
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["\n"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
}
MORE = Sampling(
    min_new_tokens=2, top_k=5, min_p=0.1, repetition_penalty=1.5, stop_token_ids=(3,), ignore_eos=True
)
ADDED = {
    "min_tokens": 2,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "stop_token_ids": [3],
    "ignore_eos": True,
}
FORMAT = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }
}
BODIES: list[tuple[str, Segments, Sampling, dict[str, Any]]] = [
    ("openai", CHAT, SAMPLING, PLAIN),
    ("openai", TEXT, SAMPLING, PLAIN),
    ("openai", CHAT, Sampling(json_schema='{"type": "object"}'), FORMAT),
    ("vllm", CHAT, MORE, ADDED),
    ("vllm", TEXT, Sampling(json_schema='{"type": "object"}'), FORMAT),
    ("vllm", TEXT, Sampling(regex="a+"), {"structured_outputs": {"regex": "a+"}}),
    ("vllm", TEXT, Sampling(choices=("a", "b")), {"structured_outputs": {"choice": ["a", "b"]}}),
    ("vllm", TEXT, Sampling(ebnf="root ::= 'a'"), {"structured_outputs": {"grammar": "root ::= 'a'"}}),
    ("sglang", CHAT, Sampling(regex="a+", stop_regex=("b",)), {"regex": "a+", "stop_regex": ["b"]}),
    ("sapwood", TEXT, Sampling(choices=("a", "b")), {"choices": ["a", "b"]}),
    ("openai", CHAT, Sampling(top_k=-1, min_p=0.0, repetition_penalty=1.0, ignore_eos=False), {}),
]


@pytest.mark.parametrize(("kind", "segments", "sampling", "fields"), BODIES)
def test_sampling_goes_in_the_endpoint_s_own_fields(
    server: Web, kind: Any, segments: Segments, sampling: Sampling, fields: dict[str, Any]
) -> None:
    given = message("4") if segments is CHAT else completion("4")
    generate(server, segments, answer(given), Generate(segments=segments, sampling=sampling), server=kind)
    body = server.asked[0].body
    assert {name: body[name] for name in body.keys() - {"model", "messages", "prompt"}} == fields


def test_openai_s_own_chats_have_another_name_for_the_limit() -> None:
    official = OpenAI("gpt-x", "https://api.openai.com/v1", "key")
    path, body = official._generation(Generate(segments=CHAT, sampling=Sampling(max_new_tokens=4)))
    assert (path, body["max_completion_tokens"]) == ("/chat/completions", 4)
    instruct = OpenAI("gpt-3.5-turbo-instruct", "https://api.openai.com/v1", "key")
    path, body = instruct._generation(Generate(segments=TEXT, sampling=Sampling(max_new_tokens=4)))
    assert (path, body["max_tokens"]) == ("/completions", 4)


def of(segments: Segments, **sampling: Any) -> Generate:
    return Generate(segments=segments, sampling=Sampling(**sampling))


CANNOT: list[tuple[str, Any, dict[str, Any]]] = [
    ("min_new_tokens", of(CHAT, min_new_tokens=1), {}),
    ("top_k", of(CHAT, top_k=4), {}),
    ("min_p", of(TEXT, min_p=0.5), {}),
    ("repetition_penalty", of(CHAT, repetition_penalty=1.1), {}),
    ("stop_token_ids", of(CHAT, stop_token_ids=(1,)), {}),
    ("ignore_eos", of(CHAT, ignore_eos=True), {}),
    ("skip_special_tokens", of(CHAT, skip_special_tokens=False), {}),
    ("regex", of(CHAT, regex="a"), {}),
    ("ebnf", of(CHAT, ebnf="a"), {}),
    ("choices", of(CHAT, choices=("a",)), {}),
    ("choices", of(CHAT, choices=("a",)), {"server": "sglang"}),
    ("stop_regex", of(CHAT, stop_regex=("a",)), {"server": "vllm"}),
    ("json_schema", of(TEXT, json_schema="{}"), {}),
    ("logprob_start_len", Generate(segments=TEXT, logprobs=Logprobs(start=0)), {}),
    ("separate_reasoning", Generate(segments=CHAT, reasoning=True), {}),
    ("separate_reasoning", Generate(segments=TEXT, reasoning=True), {"server": "sglang"}),
    ("role", of((USER, BEGUN)), {}),
    ("role", of((USER,)), {"server": "vllm"}),
    ("role", of((Turn("user", (), open=True),)), {"server": "vllm"}),
    ("role", of((Text("a"), USER, OPEN)), {"server": "vllm"}),
    ("role", of(TEXT), {"is_chat_model": True}),
    ("role", of(CHAT), {"is_chat_model": False}),
    ("ids", of((Ids((1, 2), ""),)), {"server": "vllm"}),
    ("special", of((Text("<s>", special=True),)), {"server": "vllm"}),
    ("choices", Score(segments=TEXT, choices=("a",)), {}),
    ("choices", Score(segments=CHAT, choices=("a",)), {"server": "vllm"}),
    ("choices", Score(segments=(), choices=("a",)), {"server": "vllm"}),
    ("choices_method", Score(segments=TEXT, choices=("a",), unconditional=True), {"server": "vllm"}),
]


@pytest.mark.parametrize(("field", "call", "options"), CANNOT)
def test_what_an_endpoint_cannot_do_is_refused_by_name(
    server: Web, field: str, call: Any, options: dict[str, Any]
) -> None:
    made = backend(server, **options)
    with pytest.raises(Unsupported) as caught:
        made.check(call)
    assert caught.value.field == field
    assert isinstance(caught.value, NotImplementedError)
    with pytest.raises(Unsupported):
        asyncio.run(made.score(call) if isinstance(call, Score) else made.generate(call))
    assert server.asked == []


def test_a_fill_and_an_end_send_nothing(server: Web) -> None:
    made = backend(server)
    for segments in (CHAT, TEXT, (USER, BEGUN)):
        made.check(Fill(segments=segments))
        assert asyncio.run(made.fill(Fill(segments=segments))) == Answer()
    assert asyncio.run(made.end("p")) is None
    assert server.asked == []
    for work in (made.flush_cache(), made.server_info()):
        with pytest.raises(Unsupported):
            asyncio.run(work)


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
    found = asyncio.run(pieces(backend(server), of(TEXT, n=2)))
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


def test_where_and_as_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert repr(OpenAI("gpt-x")) == "OpenAI('gpt-x', 'https://api.openai.com/v1')"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    assert repr(OpenAI("gpt-x")) == "OpenAI('gpt-x', 'http://127.0.0.1:1/v1')"
    with pytest.raises(ValueError, match="server must be"):
        OpenAI("gpt-x", server="other")  # type: ignore[arg-type]
