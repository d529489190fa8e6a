"""`/v1/chat/completions`: shapes, counts, and which field means what."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from sapwood.srt.messages import Chunk, Ended, Finish, Generate, Message, TextLogprob, pack
from tests.api.scripted import Harness, answer, client, refuse, source, started

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "The capital of France?"}]}


def events(text: str) -> list[Any]:
    """The values of a stream's events; the last one must be [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def generated(server: Harness) -> Generate:
    return server.tokenizer.wait_for(Generate)[-1]


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={**ASK, **fields})


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


def test_whole_answer_through_the_openai_client(server: Harness, ai: openai.OpenAI) -> None:
    server.tokenizer.script = lambda g: answer(g, matched=12, stopped="diverged")
    completion = ai.chat.completions.create(model="tiny", messages=ASK["messages"])
    assert completion.object == "chat.completion"
    assert completion.choices[0].message.content == "Paris"
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == "tiny"
    usage = completion.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 2, 42)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 12
    assert not hasattr(usage, "cache")


def test_stream_through_the_openai_client(server: Harness, ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(model="default", messages=ASK["messages"], stream=True)
    chunks = list(stream)
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Paris"
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_each_choice_has_one_finish_chunk(server: Harness, http: httpx.Client, n: int, reason: str) -> None:
    """P09"""
    server.tokenizer.script = lambda g: answer(g, finish=reason)
    values = events(post(http, stream=True, n=n).text)
    finishes = [(c["index"], c["finish_reason"]) for v in values for c in v["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [(i, reason) for i in range(n)]
    for i in range(n):
        mine = [c for v in values for c in v["choices"] if c["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"].get("role") for c in mine[1:]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == reason
        assert mine[-1]["delta"] == {}
        assert "".join(c["delta"].get("content", "") for c in mine) == "Paris"


def test_eos_as_the_first_token_ends_the_stream(server: Harness, http: httpx.Client) -> None:
    """P13: no content chunk, finish "stop", one token counted, [DONE]."""

    def script(g: Generate) -> list[Message]:
        finish = Finish("stop", 2, 1)
        return [started(g), Chunk(g.rid, 0, "", pack([2]), None, finish), Ended(g.rid)]

    server.tokenizer.script = script
    values = events(post(http, stream=True, stream_options={"include_usage": True}).text)
    assert [v["choices"][0]["finish_reason"] for v in values[:-1]] == [None, "stop"]
    assert values[-1]["usage"]["completion_tokens"] == 1
    whole = post(http).json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_in_streams(server: Harness, http: httpx.Client, options: Any, n: int) -> None:
    """P22"""
    server.tokenizer.script = lambda g: answer(g, matched=7)
    values = events(post(http, stream=True, stream_options=options, n=n).text)
    if options == {"include_usage": True}:
        assert values[-1]["choices"] == []
        assert values[-1]["usage"] == post(http, n=n).json()["usage"]
        assert values[-1]["usage"]["completion_tokens"] == 2 * n
        assert all(v["usage"] is None and v["choices"] for v in values[:-1])
    else:
        assert all("usage" not in v and v["choices"] for v in values)


def test_stream_options_need_a_stream(http: httpx.Client) -> None:
    """P22"""
    assert refused(http, stream_options={"include_usage": True})["param"] == "stream_options"
    assert refused(http, stream_options={}, stream=False)["param"] == "stream_options"


def test_the_prompt_counts_once_for_n_choices(server: Harness, http: httpx.Client) -> None:
    """P05"""
    server.tokenizer.script = lambda g: answer(g, matched=39, stopped="last_token")
    usage = post(http, n=4, cache_report=True).json()["usage"]
    assert usage == {
        "prompt_tokens": 40,
        "completion_tokens": 8,
        "total_tokens": 48,
        "prompt_tokens_details": {"cached_tokens": 39},
        "cache": {"matched": 39, "stopped": "last_token"},
    }


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}], None])
def test_empty_assistant_message_in_the_history(server: Harness, http: httpx.Client, content: Any) -> None:
    """P23"""
    history = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "B"},
    ]
    assert post(http, messages=history).status_code == 200
    sent = generated(server).prompt.messages[1]  # type: ignore[union-attr]
    assert sent == {"role": "assistant", "content": content or ""}


def test_messages_go_to_the_template_as_they_were_sent(server: Harness, http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "Be brief", "name": "boss"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "reasoning_content": "r"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert post(http, messages=messages, chat_template_kwargs={"thinking": False}).status_code == 200
    prompt = generated(server).prompt
    messages[2] = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    assert prompt.messages == messages  # type: ignore[union-attr]
    assert prompt.template_kwargs == {"thinking": False}  # type: ignore[union-attr]


def test_an_answer_can_come_back_as_history(server: Harness, http: httpx.Client) -> None:
    answered = post(http).json()["choices"][0]["message"]
    history = [*ASK["messages"], answered, {"role": "user", "content": "And of Spain?"}]
    assert post(http, messages=history).status_code == 200


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 1}, 1),
        ({"max_completion_tokens": 9, "max_tokens": 5}, 9),
        ({"max_completion_tokens": 1_000_000}, 1_000_000),
    ],
)
def test_token_limits(server: Harness, http: httpx.Client, fields: Any, limit: int | None) -> None:
    """P24, P27: the newer name counts; a limit beyond the context is the scheduler's to cap."""
    assert post(http, **fields).status_code == 200
    assert generated(server).params.max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -5, "5", 1.5, True])
def test_bad_token_limits(http: httpx.Client, name: str, value: Any) -> None:
    """P24"""
    error = refused(http, **{name: value})
    assert error["param"] == name
    assert name in error["message"]


def test_sampling_fields_reach_the_scheduler(server: Harness, http: httpx.Client) -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "seed": -7,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "top_k": 40,
        "min_p": 0.05,
        "min_tokens": 2,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "skip_special_tokens": False,
    }
    body = {**fields, "stop": "END", "logit_bias": {"50": -100, "7": 1.5}, "max_tokens": 20}
    assert post(http, **body).status_code == 200
    params = generated(server).params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop == ["END"]
    assert params.logit_bias == {50: -100.0, 7: 1.5}
    assert params.logprobs is None


def test_top_k_off_and_large(server: Harness, http: httpx.Client) -> None:
    """P14: 0, -1 and more than the vocabulary are legal."""
    for value in (0, -1, 1, 1000, 10**9):
        assert post(http, top_k=value).status_code == 200
        assert generated(server).params.top_k == value


def test_top_k_off_in_the_models_defaults(new_server: Any) -> None:
    """P14"""
    harness = new_server(model=source(sampling_defaults={"top_k": 0.0}))
    with client(harness) as http:
        assert post(http).status_code == 200
    assert generated(harness).params.top_k == 0


def test_impossible_tokens_have_a_finite_floor(server: Harness, http: httpx.Client) -> None:
    """P20: under a constraint of one possible text all others are impossible."""
    low = float("-inf")

    def script(g: Generate) -> list[Message]:
        top = [(i, low if i else -0.0, f"t{i}", f"t{i}".encode()) for i in range(20)]
        item = TextLogprob(0, -0.0, "t0", b"t0", top)
        return [
            started(g),
            Chunk(g.rid, 0, "t0", pack([0]), [item], Finish("length", None, 1)),
            Ended(g.rid),
        ]

    server.tokenizer.script = script
    answered = post(http, logprobs=True, top_logprobs=20)
    top = answered.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [0.0] + [-9999.0] * 19


def test_defaults_of_the_model_fill_what_is_absent(new_server: Any) -> None:
    defaults = {"temperature": 0.2, "top_k": 50.0, "top_p": 0.9, "max_length": 20.0}
    harness = new_server(model=source(sampling_defaults=defaults))
    with client(harness) as http:
        assert post(http, top_p=0.5, temperature=None).status_code == 200
        params = generated(harness).params
        assert (params.temperature, params.top_k, params.top_p) == (0.2, 50, 0.5)
        assert post(http, temperature=0).status_code == 200
        assert generated(harness).params.temperature == 0.0


def test_generation_prompt_and_continuation(server: Harness, http: httpx.Client) -> None:
    """P04, as far as the server goes."""

    def sent(**fields: Any) -> tuple[bool, bool]:
        assert post(http, **fields).status_code == 200
        prompt = generated(server).prompt
        return prompt.add_generation_prompt, prompt.continue_final  # type: ignore[union-attr]

    assert sent() == (True, False)
    assert sent(add_generation_prompt=False) == (False, False)
    assert sent(continue_final_message=True) == (False, True)
    assert sent(continue_final_message=True, add_generation_prompt=False) == (False, True)


def test_cache_salts_are_namespaces(server: Harness, http: httpx.Client) -> None:
    namespaces = set()
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "health"}):
        assert post(http, **fields).status_code == 200
        namespaces.add(generated(server).namespace)
    assert namespaces == {"", "salt:a", "salt:b", "salt:health"}


def test_logprobs(server: Harness, ai: openai.OpenAI) -> None:
    completion = ai.chat.completions.create(
        model="tiny", messages=ASK["messages"], logprobs=True, top_logprobs=2
    )
    assert generated(server).params.logprobs == 2
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(t.token, t.logprob, t.bytes) for t in logprobs.content] == [
        ("Pa", -0.25, [80, 97]),
        ("ris", -0.5, [114, 105, 115]),
    ]
    assert [(t.token, t.logprob) for t in logprobs.content[0].top_logprobs] == [("t0", -0.5), ("t1", -1.5)]


def test_logprobs_in_a_stream_go_with_their_text(server: Harness, http: httpx.Client) -> None:
    values = events(post(http, stream=True, logprobs=True).text)
    assert generated(server).params.logprobs == 0
    content = [c["logprobs"]["content"] for v in values for c in v["choices"] if c["logprobs"]]
    assert [[t["token"] for t in tokens] for tokens in content] == [["Pa"], ["ris"]]
    assert content[0][0]["top_logprobs"] == []


def test_a_refused_prompt_is_plain_json_also_for_a_stream(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = refuse
    for stream in (False, True):
        error = refused(http, stream=stream)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_models(http: httpx.Client, server: Harness) -> None:
    for name in ("tiny", "default", "", None):
        assert post(http, model=name).status_code == 200
    response = post(http, model="gpt-4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert "'gpt-4'" in error["message"]
    assert "'tiny'" in error["message"]
    assert error["param"] == "model"
