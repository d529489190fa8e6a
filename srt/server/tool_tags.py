"""Structural tags that constrain calls: a form's marks, a tool's name, arguments by the tool's own schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.params import Constraint
from sapwood.srt.server.constraints import decoded, encoded
from sapwood.srt.server.tools import Tool, Wanted

_PLACE = re.compile(r"/format(?:(?:/\w+)*/tags/(\d+)/content|/elements/0)/json_schema")
_PYTHONIC = "[<function-name>(<argument>=<value>, ...)]"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


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


def names(wanted: Wanted, document: Constraint | None) -> Callable[[ErrorInfo], ErrorInfo]:
    """Errors about such a tag with the fields of the request in place of the places in it."""

    def name(found: re.Match[str]) -> str:
        if found[1] is None:
            return document.field if document is not None else "tools"
        tool = wanted.callable[int(found[1])]
        return f"tools[{wanted.tools.index(tool)}].function.parameters"

    def rename(error: ErrorInfo) -> ErrorInfo:
        found = _PLACE.search(error.message)
        if found is None:
            return error
        return structs.replace(error, message=_PLACE.sub(name, error.message), param=name(found))

    return rename


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
        "tags": [_tag(tool, form, wanted.must) for tool in wanted.callable],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not wanted.parallel,
    }


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _tag(tool: Tool, form: Form, must: bool) -> dict[str, Any]:
    """One call. A tool that is not strict, and need not be called, takes any object."""
    function = tool.function
    schema = function.parameters if must or function.strict else None
    return {
        "type": "tag",
        "begin": f"{form.begin}{json.dumps(function.name)[1:-1]}{form.middle}",
        "content": {"type": "json_schema", "json_schema": schema or _ANY_OBJECT},
        "end": form.end,
    }
