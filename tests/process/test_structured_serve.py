"""Constraints and tools over HTTP on a tiny random model, which by itself writes neither JSON nor calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.models import CHATML, tiny_llama
from tests.serving import Server, events, serve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "adopt", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}},
]
# No call of it is whole within the tokens that the tests of cut calls allow.
LONG_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"sheep": {"type": "array", "items": {"type": "boolean"}, "minItems": 60}},
            "required": ["sheep"],
        },
    },
}
ASK: list[Any] = [{"role": "user", "content": "A cat, please."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structured")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_llama(folder / "model", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    with serve(model, folder, max_total_tokens=8192) as running:
        yield running


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {"messages": ASK, "temperature": 1, "seed": 1, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_calls(choice: dict[str, Any]) -> None:
    calls = choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        (tool,) = (t["function"] for t in TOOLS if t["function"]["name"] == call["function"]["name"])
        jsonschema.validate(json.loads(call["function"]["arguments"]), tool["parameters"])


@pytest.mark.parametrize("several", [True, False])
def test_required_calls_are_valid(server: Server, several: bool) -> None:
    finished = 0
    for seed in range(6):
        answer = chat(
            server,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=several,
            seed=seed,
            max_tokens=400,
            logit_bias={"2": 4},
        )
        choice = answer["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice)
            assert choice["message"]["content"] is None
            assert several or len(choice["message"]["tool_calls"]) == 1
            finished += 1
        else:
            assert choice["finish_reason"] == "length"
    assert finished >= 3


def test_p26_a_call_that_is_cut_is_none(server: Server) -> None:
    places = set()
    for limit in (1, 3, 10, 20, 30, 40, 50, 60):
        choice = chat(server, tools=[LONG_TOOL], tool_choice="required", max_tokens=limit)["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["incomplete"]["inside"]
        assert choice["message"]["content"] is None
        places.add(choice["incomplete"]["pointer"].partition("/arguments")[0])
    assert "/tool_calls/0/function" in places
    none = chat(server, tools=TOOLS, tool_choice="none", max_tokens=10)["choices"][0]
    assert "tool_calls" not in none["message"]
    assert chat(server, tools=TOOLS, max_tokens=10)["choices"][0]["finish_reason"] in ("length", "stop")


def test_streamed_calls_are_the_whole_ones(server: Server) -> None:
    named = {"type": "function", "function": {"name": "adopt"}}
    fields = {"tools": TOOLS, "tool_choice": named, "seed": 3, "max_tokens": 400}
    whole = chat(server, **fields)["choices"][0]
    body = {"messages": ASK, "temperature": 1, **fields, "stream": True}
    lines = iter(server.post("/v1/chat/completions", body).text.split("\n"))
    parts = [choice for event in events(lines) if event != "[DONE]" for choice in event["choices"]]
    deltas = [call["function"] for part in parts for call in part["delta"].get("tool_calls", [])]
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"
    check_calls(whole)
    called = whole["message"]["tool_calls"][0]["function"]
    assert "".join(delta.get("name", "") for delta in deltas) == called["name"]
    assert "".join(delta["arguments"] for delta in deltas) == called["arguments"]


def test_documents_are_valid_and_cuts_are_told(server: Server) -> None:
    """P36"""
    format_ = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": False}}
    for choice in chat(server, response_format=format_, n=3, max_tokens=300)["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    cut = chat(server, response_format=format_, max_tokens=5)
    assert cut["usage"]["completion_tokens"] == 5
    assert cut["choices"][0]["finish_reason"] == "length"
    assert set(cut["choices"][0]["incomplete"]) == {"pointer", "inside"}
    stopped = chat(server, response_format=format_, max_tokens=100, stop=["age"])["choices"][0]
    assert (stopped["finish_reason"], stopped["matched_stop"]) == ("stop", "age")
    assert stopped["message"]["content"].startswith('{"kind": ')


def test_the_grammar_beats_min_tokens_and_ignore_eos(server: Server) -> None:
    fields = {"choices": ["yes", "no"], "min_tokens": 20, "max_tokens": 40, "ignore_eos": True}
    choice = chat(server, **fields)["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"


def test_what_is_lenient_is_told(server: Server) -> None:
    schema = {**SCHEMA, "$dynamicRef": "#x"}
    refused = server.post("/generate", {"text": "x", "sampling_params": {"json_schema": schema}})
    assert refused.status_code == 400
    assert "$dynamicRef" in refused.json()["error"]["message"]
    lenient = {"text": "x", "sampling_params": {"json_schema": {**schema, "x-lenient": True}}}
    meta = server.post("/generate", lenient).json()["meta_info"]
    assert len(meta["warnings"]) == 1
    assert "$dynamicRef" in meta["warnings"][0]


def test_errors_name_the_tool(server: Server) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "wat"}}}
    body = {"messages": ASK, "tools": [TOOLS[0], bad], "tool_choice": "required"}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[1].function.parameters"


def test_a_constraint_comes_after_the_reasoning(model: Path, folder: Path) -> None:
    template = folder / "thinking.jinja"
    template.write_text(
        CHATML + "{% if think %}<think>\n{% elif think == 0 %}<think>\n\n</think>\n\n{% endif %}"
    )
    with serve(model, folder, chat_template=template, max_total_tokens=4096) as server:

        def message(**kwargs: Any) -> dict[str, Any]:
            fields = {"regex": "[ab]{3}", "chat_template_kwargs": kwargs, "max_tokens": 20}
            found: dict[str, Any] = chat(server, **fields)["choices"][0]["message"]
            return found

        # The model knows of no </think>: what it has begun it goes on with.
        begun = message(think=1)
        assert begun["content"] == ""
        assert begun["reasoning_content"]
        for kwargs in ({"think": 0}, {"enable_thinking": False}):
            answer = message(**kwargs)
            assert set(answer["content"]) <= {"a", "b"}
            assert len(answer["content"]) == 3
        free = message()
        assert free.get("reasoning_content") or len(free["content"]) == 3
