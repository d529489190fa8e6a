"""/openapi.json: every route, every field, and which values of a refused field are taken."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from sapwood.srt.server import embeddings, refused
from sapwood.srt.server.embeddings import EmbeddingRequest
from sapwood.srt.server.native_protocol import GenerateRequest, NativeSampling
from sapwood.srt.server.protocol import ChatRequest, CompletionRequest
from sapwood.srt.server.tokens import TokenizeRequest
from tests.api.scripted import Harness, detokenize, reading
from tests.api.test_programs import COUNTS

TABLES: dict[type, Any] = {
    ChatRequest: refused.CHAT,
    CompletionRequest: refused.COMPLETION,
    GenerateRequest: refused.NATIVE,
    NativeSampling: refused.NATIVE_SAMPLING,
    EmbeddingRequest: embeddings.REFUSED,
    TokenizeRequest: refused.TEMPLATES,
}


@pytest.fixture(scope="module")
def document(shared_http: httpx.Client) -> dict[str, Any]:
    return dict(shared_http.get("/openapi.json").json())


def test_every_reference_is_there(document: dict[str, Any]) -> None:
    names = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert names <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_post_route_has_its_body_and_its_errors(document: dict[str, Any]) -> None:
    bodies = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"]["default"]["content"]["application/json"], (path, method)
            if method == "post" and path != "/flush_cache":
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                bodies[path] = schema["$ref"].rpartition("/")[2]
    wanted = {
        "/v1/chat/completions": "ChatRequest",
        "/v1/completions": "CompletionRequest",
        "/v1/embeddings": "EmbeddingRequest",
        "/generate": "GenerateRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    assert wanted.items() <= bodies.items()


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_refused_fields_are_known_by_name(document: dict[str, Any], kind: type) -> None:
    """Each is a field, so that null is taken, and the document says what else is."""
    properties = document["components"]["schemas"][kind.__name__]["properties"]
    for name, entry in TABLES[kind].items():
        assert name in kind.__struct_fields__  # type: ignore[attr-defined]
        assert None in entry.quiet
        assert properties[name]["enum"] == list(entry.quiet)
    untyped = [
        name for name, schema in properties.items() if not set(schema) & {"enum", "type", "anyOf", "$ref"}
    ]
    assert untyped == []


CHAT: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "/abort_request": (
        [{"rid": "x"}, {"rid": "x", "abort_all": False}, {"abort_all": True, "rid": None}],
        [{}, {"rid": "x", "abort_all": True}, {"abort_all": False}, {"rid": None}, {"rid": ""},
         {"rid": "a b"}],
    ),
    "/tokenize": (
        [{"prompt": ""}, {"messages": CHAT, "prompt": None}, {"messages": CHAT, "add_special_tokens": False},
         {"prompt": "x", "add_special_tokens": True, "model": "default"},
         {"messages": CHAT, "add_generation_prompt": False, "continue_final_message": True}],
        [{}, {"prompt": "x", "messages": CHAT}, {"messages": []}, {"prompt": "x", "model": "gpt-4"},
         {"prompt": "x", "chat_template_kwargs": {}}, {"messages": [{"role": "user"}]},
         {"messages": CHAT, "add_special_tokens": True}, {"messages": CHAT, "tools": [1]},
         {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}],
    ),
    "/detokenize": ([{"tokens": []}, {"tokens": [0, 999]}], [{"tokens": [1000]}, {"tokens": [-1]}, {}]),
    "/cache/explain": (
        [{"prompt": "x"}, {"prompt": [5]}, {"messages": CHAT}, {"prompt": "x", "logprob_start_len": -1}],
        [{}, {"prompt": []}, {"prompt": [-1]}, {"prompt": "x", "logprob_start_len": -2}, {"messages": []},
         {"prompt": "x", "cache_salt": ""}, {"messages": CHAT, "add_special_tokens": False}],
    ),
    "/v1/embeddings": (
        [{"input": "x"}, {"input": [5]}, {"input": [[5], [6]]}, {"input": ["x", "y"], "dimensions": None}],
        [{"input": []}, {"input": [[]]}, {"input": ["x", 5]}, {"input": [1000]},
         {"input": "x", "dimensions": 63}, {"input": "x", "timeout": 0}, {"input": "x", "rid": "ä"}],
    ),
    "/v1/completions": (
        [{"prompt": "x", "n": 128, "temperature": 100, "top_k": -1, "stop": ["a"], "logprobs": 0},
         {"prompt": "x", "logit_bias": {"5": -100}, "stop": "a", "stream_options": None, "max_tokens": 0},
         {"prompt": "x", "stop_regex": "a+"}, {"prompt": "x", "stop_regex": ["a+", "b"]},
         {"prompt": "x", "response_format": {"type": "text"}, "model": "", "stop_token_ids": [999]},
         {"prompt": "x", "response_format": {"type": "json_object"}, "json_whitespace": 64},
         {"prompt": "x", "guided_json": {"type": "object"}, "regex": None},
         {"prompt": "x", "structured_outputs": {"choice": ["a"]}}],
        [{"prompt": "x", **wrong} for wrong in (
            {"n": 0}, {"n": 129}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2},
            {"min_p": 2},
            {"stop": ""}, {"stop": [""]}, {"stop": ["a"] * 17}, {"logit_bias": {"x": 1}}, {"max_tokens": -1},
            {"stop_regex": ""}, {"stop_regex": [""]}, {"stop_regex": ["a"] * 17}, {"stop_regex": "a" * 257},
            {"logit_bias": {"5": 101}}, {"stop_token_ids": [1000]}, {"logprobs": 21}, {"timeout": 0},
            {"response_format": {"type": "xyz"}}, {"response_format": {"type": "json_schema"}},
            {"regex": "a", "guided_regex": "a"}, {"choices": []}, {"json_schema": 5},
            {"structured_outputs": {"xyz": 1}}, {"json_schema": {}, "json_whitespace": 65},
            {"stream_options": {}}, {"seed": 2**63},
            {"repetition_penalty": 0}, {"presence_penalty": 2.5}, {"prompt_logprobs": -1},
        )] + [{"prompt": []}, {"prompt": [5, "x"]}, {"prompt": [[]]}],
    ),
    "/v1/chat/completions": (
        [{"messages": CHAT, "logprobs": True, "top_logprobs": 20}, {"messages": [{"role": "assistant"}]},
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 1},
         {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
         {"messages": CHAT, "tools": [], "tool_choice": "auto"}],
        [{"messages": CHAT, **wrong} for wrong in (
            {"top_logprobs": 1}, {"max_tokens": 0}, {"max_completion_tokens": 0}, {"stream_options": {}},
            {"tools": [{"type": "function", "function": {}}]}, {"tool_choice": "xyz"},
        )] + [{"messages": [{"role": "assistant", "tool_calls": [{}]}]}],
    ),
    "/programs/end": (
        [{"program": "a"}, {"program": "~!", "cache_salt": None}, {"program": "a", "cache_salt": "x"}],
        [{}, {"program": None}, {"program": ""}, {"program": "a b"}, {"program": "a" * 257}, {"rid": "a"},
         {"program": "a", "cache_salt": ""}],
    ),
    "/generate": (
        [{"text": "x"}, {"input_ids": [5]}, {"input_ids": [[5]], "text": None},
         {"input": ["x", 5, [6, 7], []], "text": None, "input_ids": None},
         {"input": [{"special": "<|end|>"}, {"role": "user", "text": "x"}], "chat_template_kwargs": {"a": 1}},
         {"input": [{"role": "user", "content": ["x", [5]]}, {"role": "tool", "content": "", "open": True}]}],
        [{}, {"text": "x", "input_ids": [5]}, {"input_ids": []}, {"input_ids": [[5], 6]},
         {"text": "x", "sampling_params": {"max_new_tokens": -1}},
         {"input": "x"}, {"input": []}, {"input": [1000]}, {"input": [[-1]]}, {"input": [None]},
         {"input": ["x"], "text": "y"}, {"input": ["x"], "input_ids": [5]}, {"input": [[["x"]]]},
         {"text": "x", "chat_template_kwargs": {"a": 1}}, {"input": ["x"] * 16385},
         *({"input": [part]} for part in (
             {}, {"text": "x"}, {"role": "user"}, {"role": "user", "text": "x", "content": "y"},
             {"special": "x", "role": "user"}, {"special": "x", "open": True}, {"special": "x", "text": "y"},
             {"role": "user", "content": [5]}, {"role": "user", "content": [[1000]]}, {"role": "u", "x": 1},
         )),
         {"text": "x", "score": []}, {"text": "x", "score": [""]}, {"input_ids": [5], "score": [[]]},
         {"input_ids": [[5]], "score": [[6]]}, {"input_ids": [5], "score": [[6]], "stream": True},
         {"text": "x", "score": ["a"] * 257}, {"input_ids": [5], "score": [[6]], "sampling_params": {}},
         {"text": "x", "sampling_params": {"ebnf": "root ::= 'a'", "json_schema": "{}"}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_the_document_promises_what_the_server_takes(
    document: dict[str, Any], server: Harness, http: httpx.Client, path: str
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    rules = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    found = {"matched": 0, "stopped": "cold", "reason": "", "prompt_tokens": 1}
    server.tokenizer.answers = {
        "tokenize": {"tokens": [], "texts": []},
        "detokenize": detokenize,
        "explain": {**found, "matched_text_tail": [], "next": []},
        "program": COUNTS,
    }
    if path == "/v1/embeddings":
        server.tokenizer.script = reading
    fine, wrong = BODIES[path]
    for body in fine:
        assert rules.is_valid(body), body
        assert http.post(path, json=body).status_code == 200, body
    for body in wrong:
        assert not rules.is_valid(body), body
        assert http.post(path, json=body).status_code in (400, 404), body
