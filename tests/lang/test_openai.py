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
    Sampling,
    Score,
    Segments,
    Text,
    Turn,
)
from sapwood.lang.backends.openai import OpenAI
from sapwood.lang.errors import Unsupported
from tests.lang.doors import Web, web
from tests.lang.openai_doors import (
    BEGUN,
    CHAT,
    OPEN,
    TEXT,
    USER,
    answer,
    backend,
    completion,
    generate,
    message,
)


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as server:
        yield server


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
        with pytest.raises(Unsupported, match="computes nothing ahead"):
            made.check(Fill(segments=segments))
        assert asyncio.run(made.fill(Fill(segments=segments))) == Answer()
    assert asyncio.run(made.end("p")) is None
    assert server.asked == []
    for work in (made.flush_cache(), made.server_info()):
        with pytest.raises(Unsupported):
            asyncio.run(work)


def test_where_and_as_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert repr(OpenAI("gpt-x")) == "OpenAI('gpt-x', 'https://api.openai.com/v1')"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    assert repr(OpenAI("gpt-x")) == "OpenAI('gpt-x', 'http://127.0.0.1:1/v1')"
    with pytest.raises(ValueError, match="server must be"):
        OpenAI("gpt-x", server="other")  # type: ignore[arg-type]
