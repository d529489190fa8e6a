"""Tools over HTTP: what the model is told, what its output is constrained to, and how calls come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from sapwood.srt.config import ModelSource, make
from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import CallDelta, ChatPrompt, Chunk, Ended, Finish, Generate, Message, pack
from tests.api.scripted import Harness, client, source, started

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: list[Any] = [{"role": "user", "content": "Weather in Köln?"}]

HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
LLAMA3 = HERMES.replace("<tool_call>", "<|python_tag|>")
UNKNOWN = HERMES.replace("<tool_call>", "")
THINKS = HERMES + "{# </think> #}"


@pytest.fixture(scope="module")
def hermes() -> Iterator[Harness]:
    harness = Harness(model=source(chat_template=HERMES))
    yield harness
    harness.close()


@pytest.fixture
def http(hermes: Harness) -> Iterator[httpx.Client]:
    hermes.reset()
    with client(hermes) as http:
        yield http


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": ASK, **fields})


def sent(harness: Harness) -> Generate:
    return harness.tokenizer.wait_for(Generate)[-1]


def asked(harness: Harness, **fields: Any) -> Generate:
    """What the tokenizer gets of a request that is taken."""
    harness.tokenizer.reset()
    with client(harness) as http:
        response = post(http, **fields)
        assert response.status_code == 200, response.text
    return sent(harness)


def tag_of(g: Generate) -> dict[str, Any]:
    assert g.constraint is not None
    assert (g.constraint.kind, g.constraint.field) == ("structural_tag", "tools")
    value = json.loads(g.constraint.text)
    assert value["type"] == "structural_tag"
    found: dict[str, Any] = value["format"]
    return found


def prompt_of(g: Generate) -> ChatPrompt:
    assert isinstance(g.prompt, ChatPrompt)
    return g.prompt


def test_auto_leaves_the_choice_to_the_model(hermes: Harness) -> None:
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}, {"parallel_tool_calls": True}):
        g = asked(hermes, tools=[WEATHER, NOW], **choice)
        assert g.constraint is None
        assert g.parsing is not None
        assert (g.parsing.tool_format, g.parsing.tool_names) == ("hermes", ["get_weather", "now"])
        assert prompt_of(g).tools == [WEATHER, NOW]


def test_none_is_a_plain_answer(hermes: Harness) -> None:
    """P26"""
    g = asked(hermes, tools=[WEATHER], tool_choice="none")
    assert (g.constraint, g.parsing, prompt_of(g).tools) == (None, None, None)
    assert asked(hermes, tools=[], tool_choice="auto").parsing is None


def test_required_is_a_constraint(hermes: Harness) -> None:
    found = tag_of(asked(hermes, tools=[WEATHER, NOW], tool_choice="required"))
    assert found == {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema},
                "end": "}\n</tool_call>",
            }
            for name, schema in (("get_weather", PARAMETERS), ("now", {"type": "object"}))
        ],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": False,
    }
    one = tag_of(asked(hermes, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False))
    assert one == {**found, "stop_after_first": True}


def test_a_named_function_is_called_once(hermes: Harness) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    g = asked(hermes, tools=[WEATHER, NOW], tool_choice=choice)
    found = tag_of(g)
    assert [tag["begin"] for tag in found["tags"]] == ['<tool_call>\n{"name": "now", "arguments": ']
    assert found["stop_after_first"]
    assert g.parsing is not None
    assert g.parsing.tool_names == ["now"]
    assert prompt_of(g).tools == [WEATHER, NOW]


def test_a_strict_tool_is_constrained_where_it_is_called(hermes: Harness) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    other = {"type": "function", "function": {"name": "other", "parameters": PARAMETERS}}
    g = asked(hermes, tools=[strict, other])
    found = tag_of(g)
    assert (found["type"], found["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert (found["at_least_one"], found["stop_after_first"]) == (False, False)
    schemas = [tag["content"]["json_schema"] for tag in found["tags"]]
    assert schemas == [PARAMETERS, {"type": "object"}]
    tools = prompt_of(g).tools
    assert tools is not None
    assert tools[0] == WEATHER
    single = tag_of(asked(hermes, tools=[other], parallel_tool_calls=False))
    assert single["stop_after_first"]


@pytest.mark.parametrize(
    ("template", "parser", "form", "begin"),
    [
        (LLAMA3, "auto", "llama3_json", '{"name": "now", "parameters": '),
        (MISTRAL, "auto", "mistral", '{"name": "now", "arguments": '),
        (MISTRAL + "[ARGS]", "auto", "mistral_args", "[TOOL_CALLS]now[ARGS]"),
        (PLAIN, "auto", "hermes", '<tool_call>\n{"name": "now", "arguments": '),
        (UNKNOWN, "llama3_json", "llama3_json", '{"name": "now", "parameters": '),
        (UNKNOWN, "pythonic", "llama3_json", '{"name": "now", "parameters": '),
    ],
)
def test_the_form_is_the_templates(
    new_server: Any, template: str, parser: Any, form: str, begin: str
) -> None:
    harness = new_server(make(tool_call_parser=parser), source(chat_template=template))
    g = asked(harness, tools=[NOW], tool_choice="required")
    assert g.parsing is not None
    assert g.parsing.tool_format == form
    found = tag_of(g)
    if form == "mistral":
        opening, found, closing = found["elements"]
        assert (opening["value"], closing["value"]) == ("[TOOL_CALLS] [", "]")
    assert found["tags"][0]["begin"] == begin
    auto = asked(harness, tools=[NOW]).parsing
    assert auto is not None
    assert auto.tool_format == ("pythonic" if parser == "pythonic" else form)


@pytest.mark.parametrize(
    ("template", "parser", "reason"),
    [(UNKNOWN, "auto", "no form that is known"), (HERMES, "none", "--tool-call-parser none")],
)
def test_a_form_that_is_not_read_is_refused(new_server: Any, template: str, parser: Any, reason: str) -> None:
    harness = new_server(make(tool_call_parser=parser), source(chat_template=template))
    with client(harness) as http:
        error = post(http, tools=[NOW]).json()["error"]
        assert error["param"] == "tools"
        assert reason in error["message"]
        assert post(http, tools=[NOW], tool_choice="none").status_code == 200


def test_a_document_or_a_call(hermes: Harness) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    g = asked(hermes, tools=[NOW], response_format=format_)
    assert g.constraint is not None
    found = json.loads(g.constraint.text)["format"]
    assert found["type"] == "or"
    assert found["elements"][0] == {"type": "json_schema", "json_schema": PARAMETERS}
    assert found["elements"][1]["type"] == "tags_with_separator"
    with client(hermes) as http:
        error = post(http, tools=[NOW], tool_choice="required", response_format=format_).json()["error"]
        assert error["param"] == "response_format.json_schema.schema"
        assert "tool_choice" in error["message"]
        assert post(http, tools=[NOW], regex="a").json()["error"]["param"] == "regex"


def called_with(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [NOW, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "zz": 1}}]}, "tools[0].function.zz"),
    ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [called_with('{"a": ["\\ud83d"]}')]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [called_with('{"\\udfff": 1}')]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_wrong_is_refused_by_name(
    hermes: Harness, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    response = post(http, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert hermes.tokenizer.received == []


def test_errors_about_a_schema_name_the_tool(hermes: Harness, http: httpx.Client) -> None:
    said = [""]

    def script(g: Generate) -> list[Message]:
        where = f"{said[0]}/json_schema"
        return [Ended(g.rid, BadRequest(f"{where} at /type: it is wrong", param="tools").info())]

    hermes.tokenizer.script = script
    choice = {"type": "function", "function": {"name": "now"}}
    format_ = {"type": "json_object"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/format/tags/1/content", {"tool_choice": "required"}, "tools[1].function.parameters"),
        ("/format/tags/0/content", {"tool_choice": choice}, "tools[1].function.parameters"),
        ("/format/elements/1/tags/0/content", {"tool_choice": "required"}, "tools[0].function.parameters"),
        ("/format/tags/0/content/tags/1/content", {"parallel_tool_calls": False},
         "tools[1].function.parameters"),
        ("/format/elements/0", {"response_format": format_}, "response_format"),
    ]  # fmt: skip
    for place, fields, param in cases:
        said[0] = place
        error = post(http, tools=[WEATHER, NOW], **fields).json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param} at /type: it is wrong")


@pytest.mark.parametrize("streamed", [False, True])
def test_warnings_about_a_schema_name_the_tool(hermes: Harness, http: httpx.Client, streamed: bool) -> None:
    places = ["/format/tags/1/content/json_schema at /x: it is odd", "and 3 more"]

    def script(g: Generate) -> list[Message]:
        begun = msgspec.structs.replace(started(g), warnings=places)
        return [begun, Chunk(g.rid, 0, "", b"", None, Finish("length")), Ended(g.rid)]

    hermes.tokenizer.script = script
    text = post(http, tools=[WEATHER, NOW], tool_choice="required", stream=streamed).text
    first = text.partition("data: ")[2].partition("\n")[0] if streamed else text
    assert json.loads(first)["warnings"] == ["tools[1].function.parameters at /x: it is odd", "and 3 more"]


def test_a_forced_call_that_is_cut_has_no_content(hermes: Harness, http: httpx.Client) -> None:
    def script(g: Generate) -> list[Message]:
        return [started(g), Chunk(g.rid, 0, "", b"", None, Finish("length")), Ended(g.rid)]

    hermes.tokenizer.script = script
    named = {"type": "function", "function": {"name": "now"}}
    contents = []
    for choice in ("required", named, "auto"):
        answer = post(http, tools=[WEATHER, NOW], tool_choice=choice).json()
        contents.append(answer["choices"][0]["message"]["content"])
        parsing = hermes.tokenizer.wait_for(Generate)[-1].parsing
        assert parsing is not None
        assert parsing.calls_only == (choice != "auto")
    assert contents == [None, None, ""]


HISTORY: list[Any] = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}},
            {
                "id": "call_2",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
]


def test_results_go_to_the_template(hermes: Harness) -> None:
    messages = prompt_of(asked(hermes, messages=HISTORY, tools=[WEATHER, NOW])).messages
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [{}, {"city": "Köln"}]
    assert messages[1]["content"] == ""
    assert messages[2] == HISTORY[2]


def test_a_template_without_tools_is_told_in_words(new_server: Any) -> None:
    harness = new_server(model=source(chat_template=PLAIN))
    prompt = prompt_of(asked(harness, messages=HISTORY, tools=[WEATHER, NOW]))
    assert prompt.tools is None
    system, _user, calls, results = prompt.messages
    assert system["role"] == "system"
    assert json.dumps(WEATHER, ensure_ascii=False) in system["content"]
    assert '<tool_call>\n{"name": "<function-name>"' in system["content"]
    assert calls == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    }
    assert results == {
        "role": "user",
        "content": "<tool_response>\n12:00\n</tool_response>\n<tool_response>\nrain\n</tool_response>",
    }
    with_system = [{"role": "system", "content": "Be brief."}, *ASK]
    first, second = prompt_of(asked(harness, messages=with_system, tools=[NOW])).messages
    assert first["content"].startswith("Be brief.\n\n# Tools")
    assert second == ASK[0]


def test_mistrals_ids_have_nine_characters(new_server: Any) -> None:
    harness = new_server(model=source(chat_template=MISTRAL))
    messages = prompt_of(asked(harness, messages=HISTORY, tools=[WEATHER, NOW])).messages
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert ids == [messages[2]["tool_call_id"], messages[3]["tool_call_id"]]
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def calling(g: Generate) -> list[Message]:
    """Two calls, in pieces, after some reasoning and some text."""
    return [
        started(g),
        Chunk(g.rid, 0, "", pack([50]), reasoning="Hm."),
        Chunk(g.rid, 0, "I look.", pack([51])),
        Chunk(g.rid, 0, "", pack([52]), calls=[CallDelta(0, "", "call_a", "get_weather")]),
        Chunk(g.rid, 0, "", pack([53]), calls=[CallDelta(0, '{"city": '), CallDelta(0, '"Köln"}')]),
        Chunk(g.rid, 0, "", pack([54]), calls=[CallDelta(1, "{}", "call_b", "now")]),
        Chunk(g.rid, 0, "", pack([2]), None, Finish("tool_calls", 2, 6)),
        Ended(g.rid),
    ]


CALLS = [("call_a", "get_weather", '{"city": "Köln"}'), ("call_b", "now", "{}")]


def test_calls_come_back(hermes: Harness, http: httpx.Client) -> None:
    hermes.tokenizer.script = calling
    choice = post(http, tools=[WEATHER, NOW]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call, name, arguments in CALLS
        ],
    }


def test_content_is_null_beside_calls_alone(hermes: Harness, http: httpx.Client) -> None:
    hermes.tokenizer.script = lambda g: [m for m in calling(g) if not (isinstance(m, Chunk) and m.text)]
    assert post(http, tools=[WEATHER, NOW]).json()["choices"][0]["message"]["content"] is None


def test_the_openai_client_streams_calls(hermes: Harness) -> None:
    hermes.reset()
    hermes.tokenizer.script = calling
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as ai:
        with ai.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER, NOW]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.finish_reason == "tool_calls"
        found = final.message.tool_calls or []
        assert [(c.id, c.function.name, c.function.arguments) for c in found] == CALLS
        assert final.message.content == "I look."
        whole = ai.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER, NOW])
        message = whole.choices[0].message
        again: list[Any] = [*ASK, message, {"role": "tool", "tool_call_id": "call_a", "content": "rain"}]
        hermes.reset()
        ai.chat.completions.create(model="tiny", messages=again, tools=[WEATHER])
    sent_back = prompt_of(sent(hermes)).messages[1]
    assert sent_back["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Köln"}}
    assert sent_back["reasoning_content"] == "Hm."


def test_tokens_and_explanations_are_of_the_chat_with_its_tools(new_server: Any) -> None:
    model: ModelSource = source(chat_template=HERMES)
    harness = new_server(model=model)
    found = {"matched": 0, "stopped": "cold", "reason": "", "prompt_tokens": 1}
    harness.tokenizer.answers = {
        "tokenize": {"tokens": [], "texts": []},
        "explain": {**found, "matched_text_tail": [], "next": []},
    }
    with client(harness) as http:
        for route in ("/tokenize", "/cache/explain"):
            body = {"messages": ASK, "tools": [NOW]}
            assert http.post(route, json=body).status_code == 200
            assert harness.tokenizer.received[-1].prompt.tools == [NOW]


@pytest.mark.parametrize(("template", "parser"), [(LLAMA3, "auto"), (UNKNOWN, "pythonic")])
def test_what_cannot_be_enforced_in_a_free_choice_is_refused(
    new_server: Any, template: str, parser: Any
) -> None:
    harness = new_server(make(tool_call_parser=parser), source(chat_template=template))
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with client(harness) as http:
        error = post(http, tools=[NOW, strict]).json()["error"]
        assert error["param"] == "tools[1].function.strict"
        assert "tool_choice required" in error["message"]
        error = post(http, tools=[NOW], parallel_tool_calls=False).json()["error"]
        assert error["param"] == "parallel_tool_calls"
    assert asked(harness, tools=[NOW, WEATHER]).constraint is None
    assert asked(harness, tools=[strict], tool_choice="required", parallel_tool_calls=False).constraint


def test_arguments_are_an_object_whatever_the_schema_says(hermes: Harness, http: httpx.Client) -> None:
    city = {"properties": {"city": {"type": "string"}}}
    node = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": city}}
    cases: list[tuple[Any, Any]] = [
        ({}, {"type": "object"}),
        (city, {**city, "type": "object"}),
        ({**city, "type": ["null", "object"]}, {**city, "type": "object"}),
        (
            {**node, "$ref": "#/definitions/a"},
            {**node, "type": "object", "allOf": [{"$ref": "#/definitions/a"}]},
        ),
    ]
    for parameters, schema in cases:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        (tag,) = tag_of(asked(hermes, tools=[tool], tool_choice="required"))["tags"]
        assert tag["content"]["json_schema"] == schema
    for kinds in ("string", ["string", "null"], 5):
        function = {"name": "f", "parameters": {"type": kinds}}
        tools = [NOW, {"type": "function", "function": function}]
        assert post(http, tools=tools).status_code == 200
        for fields in (
            {"tools": tools, "tool_choice": "required"},
            {"tools": [NOW, {"type": "function", "function": {**function, "strict": True}}]},
        ):
            error = post(http, **fields).json()["error"]
            assert error["param"] == "tools[1].function.parameters"


def test_free_calls_are_constrained_after_the_reasoning(new_server: Any) -> None:
    harness = new_server(model=source(chat_template=THINKS))
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    constraint = asked(harness, tools=[strict]).constraint
    assert constraint is not None
    assert (constraint.after, constraint.opening) == ("</think>", "<think>")


def test_white_space_is_that_of_the_calls(hermes: Harness, http: httpx.Client) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for fields in ({"tools": [WEATHER], "tool_choice": "required"}, {"tools": [strict]}):
        for given, space in (({}, 0), ({"json_whitespace": 3}, 3)):
            constraint = asked(hermes, **fields, **given).constraint
            assert constraint is not None
            assert constraint.whitespace == space
    assert post(http, tools=[WEATHER], json_whitespace=3).json()["error"]["param"] == "json_whitespace"


def test_the_limit_on_free_form_values_is_the_requests(hermes: Harness, http: httpx.Client) -> None:
    many = json.dumps({"a": [0] * 40_000})
    message = {"role": "assistant", "tool_calls": [called_with(many)]}
    assert post(http, messages=[*ASK, message]).status_code == 200
    error = post(http, messages=[*ASK, message, message]).json()["error"]
    assert error["param"] == "messages[2].tool_calls[0].function.arguments"
    kwargs = {"x": [0] * 40_000}
    error = post(http, messages=[*ASK, message], chat_template_kwargs=kwargs).json()["error"]
    assert error["param"] == "chat_template_kwargs"


def test_only_the_place_at_an_errors_beginning_is_renamed(hermes: Harness, http: httpx.Client) -> None:
    place = "/format/tags/0/content/json_schema"
    field = "tools[0].function.parameters"
    cases: list[tuple[str, str, str | None]] = [
        (f"tools: it is like {place}", "tools", f"tools: it is like {place}"),
        (f"/format/tags/9/content/json_schema at {place}", "tools", None),
        (f"{place} at /a: it is like {place}", field, f"{field} at /a: it is like {place}"),
    ]
    said = ""

    def script(g: Generate) -> list[Message]:
        return [Ended(g.rid, BadRequest(said, param="tools").info())]

    hermes.tokenizer.script = script
    for said, param, shown in cases:
        found = post(http, tools=[NOW], tool_choice="required").json()["error"]
        assert (found["param"], found["message"]) == (param, said if shown is None else shown)
