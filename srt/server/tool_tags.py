"""Structural tags that constrain calls: a form's marks, a tool's name, arguments by the tool's own schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import structs

from sapwood.srt.errors import BadRequest, ErrorInfo
from sapwood.srt.params import Constraint
from sapwood.srt.server.constraints import decoded, encoded
from sapwood.srt.server.tools import Tool, Wanted

_PLACE = re.compile(r"/format(?:(?:/\w+)*/tags/([0-9]{1,3})/content|/elements/0)/json_schema\b")
_PYTHONIC = "[<function-name>(<argument>=<value>, ...)]"


class Form(NamedTuple):
    """How one call is written: `begin`, name, `middle`, arguments, `end`. Around all of them `opening` and
    `closing`, between two of them `separator`. Where a call begins, the model writes `trigger`."""

    trigger: str
    begin: str
    middle: str
    end: str
    separator: str
    opening: str = ""
    closing: str = ""


_FORMS = {
    "hermes": Form(
        "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"
    ),
    "llama3_json": Form('{"name": "', '{"name": "', '", "parameters": ', "}", "; "),
    "mistral": Form(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"
    ),
    "mistral_args": Form("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", ""),
}  # fmt: skip

JSON_FORM = {"pythonic": "llama3_json"}
"""Forms whose calls are written in another one where they are constrained."""
UNMARKED = ("llama3_json", "pythonic")
"""Forms in which no mark tells a call from text: where calls are free they cannot be constrained."""


def example(form: str) -> str:
    """How a model is told to write one call."""
    return _PYTHONIC if form == "pythonic" else written([("<function-name>", "<arguments>")], form)


def written(calls: Sequence[tuple[str, str]], form: str) -> str:
    """Calls (name, arguments as JSON) as a model writes them."""
    shape = _FORMS[JSON_FORM.get(form, form)]
    each = [f"{shape.begin}{name}{shape.middle}{arguments}{shape.end}" for name, arguments in calls]
    return f"{shape.opening}{shape.separator.join(each)}{shape.closing}"


def constraint(wanted: Wanted, form: str, whitespace: int, document: Constraint | None = None) -> Constraint:
    """The constraint of an output that calls these tools, or is the JSON `document` instead. Raises
    BadRequest."""
    shape = _FORMS[form]
    if document is None:
        text = encoded({"type": "structural_tag", "format": _format(wanted, shape)}, "tools")
        return Constraint("structural_tag", text, "tools", whitespace)
    schema = {"type": "json_schema", "json_schema": decoded(document.text, document.field)}
    either = {"type": "or", "elements": [schema, _calls(wanted, shape)]}
    text = encoded({"type": "structural_tag", "format": either}, document.field)
    return Constraint("structural_tag", text, document.field, document.whitespace)


class Names:
    """Names places in such a tag as the request does of whose tools, and `document`, it was made."""

    def __init__(self, wanted: Wanted, document: Constraint | None) -> None:
        self._wanted = wanted
        self._document = document

    def error(self, error: ErrorInfo) -> ErrorInfo:
        """An error about the tag as one about the request."""
        found = self._found(error.message)
        return error if found is None else structs.replace(error, message=found[1], param=found[0])

    def warning(self, text: str) -> str:
        """A warning about the tag as one about the request."""
        found = self._found(text)
        return text if found is None else found[1]

    def _found(self, text: str) -> tuple[str, str] | None:
        """The field of the place that a text begins with, and the text with the field for it."""
        found = _PLACE.match(text)
        field = None if found is None else self._field(found[1])
        return None if found is None or field is None else (field, field + text[found.end() :])

    def _field(self, number: str | None) -> str | None:
        wanted, document = self._wanted, self._document
        if number is None:
            return document.field if document is not None else "tools"
        known = int(number) < len(wanted.callable)
        return _parameters(wanted, wanted.callable[int(number)]) if known else None


def _parameters(wanted: Wanted, tool: Tool) -> str:
    """Where the request has the schema of a tool's arguments."""
    return f"tools[{wanted.tools.index(tool)}].function.parameters"


def _calls(wanted: Wanted, form: Form) -> dict[str, Any]:
    """At least one call, and nothing else."""
    calls = _list(wanted, form)
    if not form.opening:
        return calls
    parts = [_const(form.opening), calls, _const(form.closing)]
    return {"type": "sequence", "elements": parts}


def _format(wanted: Wanted, form: Form) -> dict[str, Any]:
    if wanted.must:
        return _calls(wanted, form)
    calls = _list(wanted, form)
    whole = {"type": "tag", "begin": form.opening, "content": calls, "end": form.closing}
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": [whole] if form.opening else calls["tags"],
        "at_least_one": False,
        "stop_after_first": not wanted.parallel or bool(form.opening),
    }


def _list(wanted: Wanted, form: Form) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": [_tag(tool, form, _arguments(wanted, tool)) for tool in wanted.callable],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not wanted.parallel,
    }


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _tag(tool: Tool, form: Form, schema: dict[str, Any]) -> dict[str, Any]:
    """One call."""
    return {
        "type": "tag",
        "begin": f"{form.begin}{json.dumps(tool.function.name)[1:-1]}{form.middle}",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": form.end,
    }


def _arguments(wanted: Wanted, tool: Tool) -> dict[str, Any]:
    """What a call's arguments must be: an object, whatever the schema says. A tool that is not strict, and
    need not be called, takes any. Raises BadRequest."""
    function = tool.function
    schema = (function.parameters if wanted.must or function.strict else None) or {}
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        field = _parameters(wanted, tool)
        raise BadRequest(f"{field}.type must allow an object, got {kinds!r:.100}", param=field)
    schema = {**schema, "type": "object"}
    if "$ref" in schema and "allOf" not in schema:
        # Beside a reference older drafts know of nothing else.
        schema["allOf"] = [{"$ref": schema.pop("$ref")}]
    return schema
