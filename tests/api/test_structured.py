"""Constraints over HTTP: each name for one means the same, at most one a request; and what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from sapwood.srt.config import make
from sapwood.srt.grammar import child, limits
from sapwood.srt.messages import Chunk, Ended, Finish, Generate, Incomplete, Message, Started, pack
from sapwood.srt.params import MAX_CONSTRAINT_BYTES, Constraint
from sapwood.srt.server import constraints
from tests.api.scripted import Harness, client, source, started

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": 0.10}}}
TEXT = json.dumps(SCHEMA)
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "any_text"}}
PATTERN = {"json": {}, "whitespace_pattern": " "}
GRAMMAR = 'root ::= "yes" | "no"'
ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate")


def post(http: httpx.Client, route: str, **fields: Any) -> httpx.Response:
    if route == "/generate":
        return http.post(route, json={"text": "x", "sampling_params": fields})
    prompt = (
        {"prompt": "x"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    return http.post(route, json={**prompt, **fields})


def sent(server: Harness) -> Constraint:
    """The constraint of the last request."""
    constraint = server.tokenizer.wait_for(Generate)[-1].constraint
    assert isinstance(constraint, Constraint)
    return constraint


SAME: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": SCHEMA}, "json_schema", TEXT),
    ({"json_schema": TEXT}, "json_schema", TEXT),
    ({"json_schema": True}, "json_schema", "true"),
    ({"guided_json": SCHEMA}, "json_schema", TEXT),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
    ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ({"regex": "a+"}, "regex", "a+"),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, "regex", "a+"),
    ({"ebnf": GRAMMAR}, "ebnf", GRAMMAR),
    ({"guided_grammar": GRAMMAR}, "ebnf", GRAMMAR),
    ({"structured_outputs": {"grammar": GRAMMAR}}, "ebnf", GRAMMAR),
    ({"choices": ["é", "b"]}, "choices", '["é", "b"]'),
    ({"guided_choice": ["é", "b"]}, "choices", '["é", "b"]'),
    ({"structured_outputs": {"choice": ["é", "b"]}}, "choices", '["é", "b"]'),
    ({"structural_tag": TAG}, "structural_tag", json.dumps(TAG)),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag", json.dumps(TAG)),
    ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", json.dumps(TAG)),
]


@pytest.mark.parametrize("route", ROUTES)
def test_every_name_means_the_same(server: Harness, http: httpx.Client, route: str) -> None:
    for fields, kind, text in SAME:
        assert post(http, route, **fields).status_code == 200, fields
        found = sent(server)
        (name,) = fields
        field = name if not isinstance(fields[name], dict) or name != "structured_outputs" else found.field
        assert (found.kind, found.text, found.field, found.whitespace) == (kind, text, field, 0), fields
        assert found.field.split(".")[0] == name
        assert (found.after, found.opening) == ("", "")
        server.tokenizer.reset()


@pytest.mark.parametrize("route", ROUTES[:2])
def test_response_formats(server: Harness, http: httpx.Client, route: str) -> None:
    """P25; strict or not, a schema is enforced."""
    assert post(http, route, response_format={"type": "json_object"}).status_code == 200
    assert (sent(server).kind, sent(server).text) == ("json_schema", '{"type": "object"}')
    for strict in ({"strict": True}, {"strict": False}, {"strict": None}, {}):
        server.tokenizer.reset()
        inner = {"name": "answer", "description": "d", "schema": SCHEMA, **strict}
        value = {"type": "json_schema", "json_schema": inner}
        assert post(http, route, response_format=value).status_code == 200
        assert sent(server).text == TEXT
        assert sent(server).field == "response_format.json_schema.schema"
    server.tokenizer.reset()
    assert post(http, route, response_format=TAG).status_code == 200
    assert (sent(server).kind, sent(server).text) == ("structural_tag", json.dumps(TAG))
    for nothing in (None, {"type": "text"}):
        server.tokenizer.reset()
        assert post(http, route, response_format=nothing).status_code == 200
        assert server.tokenizer.wait_for(Generate)[-1].constraint is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a", "choices": ["a"]}, "choices"),
    ({"json_schema": {}, "guided_json": {}}, "guided_json"),
    ({"regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "zz": 1}}, "structured_outputs.zz"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    (
        {"structured_outputs": PATTERN},
        "structured_outputs.whitespace_pattern",
    ),
    ({"choices": []}, "choices"),
    ({"choices": [1]}, "choices"),
    ({"regex": 5}, "regex"),
    ({"json_schema": 5}, "json_schema"),
    ({"json_schema": []}, "json_schema"),
    ({"json_schema": {}, "json_whitespace": 65}, "json_whitespace"),
    ({"json_schema": {}, "json_whitespace": -1}, "json_whitespace"),
    ({"regex": "a", "json_whitespace": 1}, "json_whitespace"),
    ({"json_whitespace": 1}, "json_whitespace"),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}, "json_whitespace": 5},
        "json_whitespace",
    ),
    ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "regex"),
]


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_wrong_is_refused_by_name(server: Harness, http: httpx.Client, route: str) -> None:
    for fields, param in WRONG:
        response = post(http, route, **fields)
        assert response.status_code == 400, fields
        error = response.json()["error"]
        assert param in error["param"], (fields, error)
        assert param.split(".")[-1] in error["message"]
    assert server.tokenizer.received == []


def test_two_constraints_are_both_named(http: httpx.Client) -> None:
    format_ = {"type": "json_object"}
    error = post(http, "/v1/completions", regex="a", response_format=format_).json()["error"]
    assert "regex" in error["message"]
    assert "response_format" in error["message"]


def test_what_is_called_otherwise_here_is_said(http: httpx.Client) -> None:
    hints = [
        (
            "/v1/completions",
            {"structured_outputs": PATTERN},
            "json_whitespace",
        ),
        ("/v1/completions", {"guided_json": {}, "guided_whitespace_pattern": " "}, "json_whitespace"),
        ("/generate", {"json_schema": {}, "guided_whitespace_pattern": " "}, "json_whitespace"),
        ("/generate", {"response_format": {"type": "json_object"}}, "json_schema in sampling_params"),
    ]
    for route, fields, hint in hints:
        response = post(http, route, **fields)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported"), fields
        assert hint in response.json()["error"]["message"]
    outside = {"text": "x", "response_format": {"type": "json_object"}}
    assert "json_schema in sampling_params" in http.post("/generate", json=outside).text


def test_an_error_in_a_list_of_parameters_names_the_entry(server: Harness, http: httpx.Client) -> None:
    for wrong, field in (({"temperature": -1}, "temperature"), ({"regex": "a", "choices": ["b"]}, "choices")):
        body = {"text": ["x", "y"], "sampling_params": [{}, wrong]}
        error = http.post("/generate", json=body).json()["error"]
        assert error["param"] == f"sampling_params[1].{field}"
        assert error["message"].startswith("sampling_params[1]: ")
    body = {"text": ["x", "y"], "sampling_params": [{}, {"json_schema": {}}]}
    assert http.post("/generate", json=body).status_code == 200
    found = [g.constraint for g in server.tokenizer.wait_for(Generate, 2)]
    assert [one.field for one in found if one is not None] == ["sampling_params[1].json_schema"]


def test_response_formats_that_are_none(http: httpx.Client) -> None:
    inner = {"name": "x", "schema": {}}
    wrong: list[tuple[Any, str]] = [
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {**inner, "zz": 1}}, "response_format.json_schema.zz"),
        (
            {"type": "json_schema", "json_schema": {**inner, "strict": "yes"}},
            "response_format.json_schema.strict",
        ),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": 5}, "response_format"),
        ({}, "response_format"),
    ]
    for value, param in wrong:
        response = post(http, "/v1/chat/completions", response_format=value)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), value


def test_a_constraint_needs_an_output(http: httpx.Client) -> None:
    assert post(http, "/v1/completions", regex="a", max_tokens=0).json()["error"]["param"] == "regex"
    assert post(http, "/generate", regex="a", max_new_tokens=0).json()["error"]["param"] == "regex"


def test_white_space_is_the_requests_or_the_servers(new_server: Any) -> None:
    harness = new_server(make(json_whitespace=2))
    with client(harness) as http:
        for fields, space in (({}, 2), ({"json_whitespace": 0}, 0), ({"json_whitespace": 64}, 64)):
            assert post(http, "/v1/completions", json_schema={}, **fields).status_code == 200
            assert sent(harness).whitespace == space
            harness.reset()
        structured = {"json": {}, "disable_any_whitespace": True}
        assert post(http, "/v1/completions", structured_outputs=structured).status_code == 200
        assert sent(harness).whitespace == 0


def test_each_prompt_of_a_request_has_it(server: Harness, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": ["x", "y"], "regex": "a"}).status_code == 200
    assert [g.constraint.text for g in server.tokenizer.wait_for(Generate, 2) if g.constraint] == ["a", "a"]
    server.tokenizer.reset()
    each = [{"regex": "a"}, {}, {"choices": ["b"]}]
    assert http.post("/generate", json={"text": ["x", "y", "z"], "sampling_params": each}).status_code == 200
    found = [g.constraint for g in server.tokenizer.wait_for(Generate, 3)]
    assert [None if one is None else one.text for one in found] == ["a", None, '["b"]']


def test_what_prompts_share_is_read_once(
    server: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    encoded = constraints.encoded

    def counted(value: Any, where: str) -> str:
        read.append(where)
        return encoded(value, where)

    monkeypatch.setattr(constraints, "encoded", counted)
    body = {"text": ["x"] * 40, "sampling_params": {"json_schema": SCHEMA}}
    assert http.post("/generate", json=body).status_code == 200
    found = {g.constraint.text for g in server.tokenizer.wait_for(Generate, 40) if g.constraint}
    assert (found, read) == ({TEXT}, ["json_schema"])
    body["sampling_params"] = {"json_schema": {"const": "x" * MAX_CONSTRAINT_BYTES}}
    assert http.post("/generate", json=body).json()["error"]["param"] == "json_schema"
    assert read == ["json_schema"] * 2


def test_the_openai_client(server: Harness, ai: openai.OpenAI) -> None:
    class Answer(msgspec.Struct):
        city: str

    schema = msgspec.json.schema(Answer)
    ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "json_schema", "json_schema": {"name": "Answer", "schema": schema}},
    )
    assert json.loads(sent(server).text) == schema
    server.tokenizer.reset()
    ai.completions.create(model="tiny", prompt="x", extra_body={"guided_choice": ["a", "b"]})
    assert sent(server).kind == "choices"


def cut(g: Generate) -> list[Message]:
    """A document that was cut off, with warnings and drafts."""
    begun = msgspec.structs.replace(started(g), warnings=["/x: format is not enforced"])
    finish = Finish("length", None, 2, Incomplete("/a/0", "string"), 7, 4)
    return [
        begun,
        Chunk(g.rid, 0, '{"a": ["', pack([50, 51])),
        Chunk(g.rid, 0, "", b"", None, finish),
        Ended(g.rid),
    ]


INCOMPLETE = {"pointer": "/a/0", "inside": "string"}
DETAILS = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}
WARNINGS = ["/x: format is not enforced"]


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("route", ROUTES[:2])
def test_where_a_document_was_cut_and_what_is_not_enforced(
    server: Harness, http: httpx.Client, route: str
) -> None:
    server.tokenizer.script = cut
    whole = post(http, route, json_schema={}).json()
    assert whole["warnings"] == WARNINGS
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["incomplete"] == INCOMPLETE
    assert whole["usage"]["completion_tokens_details"] == DETAILS
    options = {"include_usage": True}
    chunks = events(post(http, route, json_schema={}, stream=True, stream_options=options).text)
    assert [chunk.get("warnings") for chunk in chunks] == [WARNINGS] + [None] * (len(chunks) - 1)
    ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert [end["incomplete"] for end in ends] == [INCOMPLETE]
    assert chunks[-1]["usage"]["completion_tokens_details"] == DETAILS


def test_the_same_of_the_native_route(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = cut
    meta = post(http, "/generate", json_schema={}).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert meta["incomplete"] == INCOMPLETE
    assert (meta["drafted_tokens"], meta["accepted_tokens"]) == (7, 4)
    assert meta["warnings"] == WARNINGS


def test_what_is_not_there_is_not_shown(http: httpx.Client) -> None:
    whole = post(http, "/v1/chat/completions").json()
    assert "warnings" not in whole
    assert "incomplete" not in whole["choices"][0]
    assert "completion_tokens_details" not in whole["usage"]
    meta = post(http, "/generate").json()["meta_info"]
    assert not {"warnings", "incomplete", "drafted_tokens", "accepted_tokens"} & meta.keys()


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"


def test_a_constraint_begins_after_the_reasoning(new_server: Any) -> None:
    harness = new_server(model=source(chat_template=THINKS))
    with client(harness) as http:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("/v1/chat/completions", {}, "</think>"),
            ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, ""),
            ("/v1/completions", {}, ""),
        ]
        for route, fields, after in cases:
            assert post(http, route, regex="a", **fields).status_code == 200
            assert sent(harness).after == after
            parsing = harness.tokenizer.wait_for(Generate)[-1].parsing
            assert (parsing is not None) == bool(after)
            harness.reset()


def test_reasoning_is_told_apart(new_server: Any) -> None:
    harness = new_server(model=source(chat_template=THINKS))

    def script(g: Generate) -> list[Message]:
        assert g.parsing is not None
        assert g.parsing.reasoning_format == "think"
        return [
            Started(g.rid, pack([1]), started(g).verdict, 0.0),
            Chunk(g.rid, 0, "", pack([5]), reasoning="Hm."),
            Chunk(g.rid, 0, "Yes", pack([6]), None, Finish("stop", 2, 2), " So."),
            Ended(g.rid),
        ]

    harness.tokenizer.script = script
    with client(harness) as http:
        message = post(http, "/v1/chat/completions").json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm. So.", "Yes")
        chunks = events(post(http, "/v1/chat/completions", stream=True).text)
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
        assert deltas == [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "Hm."},
            {"content": "Yes", "reasoning_content": " So."},
            {},
        ]


def test_support_is_what_the_front_pass_reads(http: httpx.Client) -> None:
    support = http.get("/structured/support").json()
    statuses = {keyword["status"] for keyword in support["json_schema"]["keywords"].values()}
    assert {"full", "limited", "refused"} <= statuses
    assert support["json_schema"]["limits"]["items"] == limits.MAX_ITEMS
    assert support["fields"]["guided_choice"] == "choices"
    assert support["fields"]["structured_outputs.grammar"] == "ebnf"
    assert support["fields"]["structured_outputs.json_object"] == "json_schema"
    assert support["fields"]["response_format"] == "json_schema or structural_tag"
    assert support["limits"]["choices"] == limits.MAX_CHOICES
    assert support["limits"]["compile_cpu_seconds"] == child.CPU_SECONDS
    assert support["max_bytes"] == MAX_CONSTRAINT_BYTES
    assert (support["tool_call_format"], support["reasoning_format"]) == (None, None)
