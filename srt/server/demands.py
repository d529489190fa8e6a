"""What a chat's output must be, and how it is told apart: response format, tools and reasoning together.

Needs no web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import Constraint, Parsing
from sapwood.srt.server import constraints, formats, tool_tags
from sapwood.srt.server.tools import Wanted

if TYPE_CHECKING:
    from sapwood.srt.server.protocol import ChatRequest
    from sapwood.srt.server.service import Service


class Demands(NamedTuple):
    """A constraint that comes with a chat begins after its reasoning. What is said about one that is made of
    several fields calls these as the request does by its `names`."""

    constraint: Constraint | None = None
    parsing: Parsing | None = None
    names: tool_tags.Names | None = None


def of_chat(service: Service, body: ChatRequest, wanted: Wanted) -> Demands:
    """What the fields of a chat request ask for. Raises BadRequest naming the field."""
    config, source = service.config, service.source
    reasoning = formats.reasoning_format(config, source, body.chat_template_kwargs or {})
    whitespace = config.json_whitespace
    constraint = constraints.read(
        body, whitespace=whitespace, response_format=body.response_format, calls=wanted.constrained
    )
    if not wanted.callable:
        return Demands(_after(reasoning, constraint), _parsing(reasoning=reasoning))
    _check_beside_tools(constraint, wanted)
    form = formats.tool_format(config, source)
    names = tool_tags.Names(wanted, constraint)
    if constraint is not None or wanted.constrained:
        if constraint is None and not wanted.must:
            _check_enforceable(form, wanted)
        form = tool_tags.JSON_FORM.get(form, form)
        given: int | None = getattr(body, "json_whitespace", None)
        whitespace = whitespace if given is None else given
        constraint = _after(reasoning, tool_tags.constraint(wanted, form, whitespace, constraint))
    return Demands(constraint, _parsing(form, wanted, reasoning), names)


def of_offline_chat(service: Service, body: ChatRequest, constraint: Constraint | None) -> Demands:
    """The same for a chat whose answer is its text: reasoning is told apart only if a constraint follows."""
    reasoning = formats.reasoning_format(service.config, service.source, body.chat_template_kwargs or {})
    if constraint is None or not reasoning:
        return Demands(constraint)
    return Demands(_after(reasoning, constraint), _parsing(reasoning=reasoning))


def reasoned(service: Service, demands: Demands, template_kwargs: dict[str, Any] | None) -> Demands:
    """The same of an output whose reasoning is told apart, if the model writes any."""
    reasoning = formats.reasoning_format(service.config, service.source, template_kwargs or {})
    return Demands(_after(reasoning, demands.constraint), _parsing(reasoning=reasoning), demands.names)


def _after(reasoning: str, constraint: Constraint | None) -> Constraint | None:
    """The constraint behind the reasoning, if any; the tokenizer sees whether the prompt opens it."""
    if constraint is None or not reasoning:
        return constraint
    return structs.replace(constraint, after=formats.REASONING_END, opening=formats.REASONING)


def _parsing(form: str = "", wanted: Wanted | None = None, reasoning: str = "") -> Parsing | None:
    if wanted is None:
        return Parsing(reasoning_format=reasoning) if reasoning else None
    return Parsing(form, wanted.names, reasoning, calls_only=wanted.must)


def _check_enforceable(form: str, wanted: Wanted) -> None:
    """Calls that the model is free to make are constrained from a mark of theirs on."""
    if form not in tool_tags.UNMARKED:
        return
    strict = [i for i, tool in enumerate(wanted.tools) if tool.function.strict]
    name = f"tools[{strict[0]}].function.strict" if strict else "parallel_tool_calls"
    raise BadRequest(
        f"{name} cannot be enforced with tool_choice auto: this model's calls ({form}) begin like other text;"
        " it can with tool_choice required, or a function by its name",
        param=name,
    )


def _check_beside_tools(document: Constraint | None, wanted: Wanted) -> None:
    if document is None:
        return
    if wanted.must:
        raise BadRequest(
            f"{document.field} cannot be had together with a tool_choice that makes the output a call",
            param=document.field,
        )
    if document.kind != "json_schema":
        raise BadRequest(
            f"{document.field} cannot be had together with tools: only a JSON schema can",
            param=document.field,
        )
