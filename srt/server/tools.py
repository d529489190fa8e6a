"""Tools of a chat request: checked, told to the model, and which of them it may or must call.

Needs no web framework.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sapwood.srt.errors import BadRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Function(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A tool's function. `parameters` is a JSON schema of an object; absent, any object will do. `strict`:
    its arguments are constrained to that schema even where the model is free to call it or not."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Wanted(NamedTuple):
    """The tools that a request's output may call. `must`: it has to call one of `callable`, or several if
    `parallel`."""

    tools: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    must: bool = False
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.callable]

    @property
    def constrained(self) -> bool:
        """Whether what is called, or how often, is not left to the model."""
        strict = any(tool.function.strict for tool in self.callable)
        return bool(self.callable) and (self.must or strict or not self.parallel)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [
            {"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}}
            for function in (msgspec.to_builtins(tool.function) for tool in self.tools)
        ]


NO_TOOLS = Wanted()


def wanted(
    tools: Sequence[Tool] | None, choice: ToolChoice | None = None, parallel: bool | None = None
) -> Wanted:
    """What a request says of tools. Raises BadRequest naming the field."""
    given = tools or []
    _check(given)
    names = [tool.function.name for tool in given]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise BadRequest(
            f"tool_choice names {choice.function.name[:100]!r}, which is no tool",
            param="tool_choice",
        )
    if choice == "required" and not given:
        raise BadRequest("tool_choice is required, but there are no tools", param="tool_choice")
    if choice == "none" or not given:
        return NO_TOOLS
    if isinstance(choice, NamedTool):
        one = [given[names.index(choice.function.name)]]
        # One named function is called once, as OpenAI has it.
        return Wanted(given, one, must=True, parallel=False)
    return Wanted(given, given, must=choice == "required", parallel=parallel is not False)


def _check(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools may hold {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{i}].function.name"
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"{where} must have from 1 to 64 characters of A-Z, a-z, 0-9, _, . and -, got {name[:100]!r}",
                param=where,
            )
        if name in seen:
            raise BadRequest(f"{where}: there are two tools called {name!r}", param=where)
        seen.add(name)
