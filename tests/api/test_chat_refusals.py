"""`/v1/chat/completions`: what is refused, by name and with a reason, and what asks for nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.scripted import Harness
from tests.api.test_chat import generated, post, refused


def test_null_means_absent_for_every_optional_field(server: Harness, http: httpx.Client) -> None:
    """P25"""
    from sapwood.srt.server.protocol import ChatRequest

    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    assert post(http, **dict.fromkeys(names)).status_code == 200
    nulls = generated(server)
    assert post(http).status_code == 200
    assert generated(server).params == nulls.params
    assert generated(server).prompt == nulls.prompt


def test_response_formats(http: httpx.Client) -> None:
    """P25"""
    assert post(http, response_format={"type": "text"}).status_code == 200
    assert post(http, response_format={"type": "json_object"}).status_code == 200
    error = refused(http, response_format={"type": "json_schema"})
    assert error["param"] == "response_format.json_schema.schema"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    assert post(http, response_format=schema).status_code == 200
    assert "'xyz'" in refused(http, response_format={"type": "xyz"})["message"]
    assert refused(http, response_format=5)["param"] == "response_format"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "x", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("echo", True),
        ("echo", 0),
        ("best_of", 2),
        ("add_special_tokens", True),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
        ("session_params", {}),
        ("bootstrap_host", "x"),
        ("priority", 1),
        ("lora_path", "x"),
        ("guided_whitespace_pattern", "[ ]?"),
        ("guided_decoding_backend", "outlines"),
        ("allowed_token_ids", [5]),
        ("truncate_prompt_tokens", 5),
        ("use_beam_search", True),
        ("include_stop_str_in_output", True),
        ("return_hidden_states", True),
        ("separate_reasoning", False),
        ("request_id", "x"),
    ],
)
def test_what_is_not_supported_yet_is_refused_by_name(http: httpx.Client, name: str, value: Any) -> None:
    error = refused(http, **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported")
    assert name in error["message"]


def test_what_asks_for_nothing_is_accepted(server: Harness, http: httpx.Client) -> None:
    fields = {
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "service_tier": "auto",
        "logit_bias": {},
        "stop": [],
        "parallel_tool_calls": True,
        "reasoning_effort": "none",
        "separate_reasoning": True,
        "guided_decoding_backend": "xgrammar",
        "verbosity": "medium",
        "prediction": None,
        "web_search_options": None,
        "priority": 0,
        "length_penalty": 1.0,
        "spaces_between_special_tokens": True,
        "add_special_tokens": False,
        "documents": [],
        "bad_words": [],
    }
    assert post(http, **fields).status_code == 200
    quiet = generated(server)
    assert post(http).status_code == 200
    assert generated(server).params == quiet.params


@pytest.mark.parametrize("key", ["xyz", "skip_cache", "skip_radix_cache", "_internal", "key", "namespace"])
def test_unknown_fields_are_refused_by_name(http: httpx.Client, key: str) -> None:
    """P06"""
    error = refused(http, **{key: 1})
    assert (error["param"], error["code"]) == (key, "unknown_field")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 10**400}, "n"),  # more than a float can hold
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(10**400)}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),  # logits divided by it would be infinite
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"1" + "0" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"1" + "0" * 400: 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"rid": ""}, "rid"),
        ({"rid": "x" * 257}, "rid"),
        ({"rid": "a b"}, "rid"),
        ({"rid": "a\r\nset-cookie: x"}, "rid"),
        ({"rid": "é"}, "rid"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "zz": 1}]}]},
            "messages[0].content[0].zz",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1.5}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "zz": 1}]}, "messages[0].zz"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"a": 10**30}}, "chat_template_kwargs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_values_name_their_field(server: Harness, http: httpx.Client, fields: Any, param: str) -> None:
    error = refused(http, **fields)
    assert error["param"] == param
    assert server.tokenizer.received == []
