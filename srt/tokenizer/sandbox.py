"""Compiles a chat template in a sandbox with a budget, so that it cannot reach, stall or flood the process.

The names that templates rely on are those of transformers (`raise_exception`, `strftime_now`, a `tojson`
that leaves characters alone, `{% generation %}`, `{% break %}`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 8 * 2**20
MAX_STEPS = 200_000
"""Turns of loops and calls of macros: about a second at worst."""
MAX_REPEAT = 1_000_000
_TICK = "_tick"

FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What a template can raise by itself, given values it does not expect."""


class Raised(jinja2.TemplateError):
    """The template has refused the messages, in its own words."""


class CompiledTemplate:
    """A template ready to render, by any thread. Raises jinja2.TemplateSyntaxError if it is none."""

    def __init__(self, source: str) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.tree = environment.parse(source)
        _count_steps(self.tree, environment)
        code = environment.compile(self.tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises one of FAILURES, also when the budget of steps or characters is spent."""
        parts, chars = [], 0
        for part in self._template.generate({**variables, _TICK: _budget()}):
            parts.append(part)
            chars += len(part)
            if chars > MAX_CHARS:
                raise jinja2.TemplateRuntimeError(f"it wrote more than {MAX_CHARS} characters")
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox (which bounds `range`), with bounds on the operators that make much out of little."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        for repeated, times in ((left, right), (right, left)):
            if hasattr(repeated, "__len__") and isinstance(times, int) and len(repeated) * times > MAX_REPEAT:
                raise SecurityError(f"a repetition is longer than {MAX_REPEAT}")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 (the name and kind are jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _count_steps(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Put a call of the budget at the start of every loop and macro body."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        step = nodes.ExprStmt(call, lineno=node.lineno).set_environment(environment)
        node.body.insert(0, step.set_lineno(node.lineno))  # type: ignore[attr-defined]


def _budget() -> Callable[[], None]:
    left = MAX_STEPS

    def tick() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise jinja2.TemplateRuntimeError(f"it took more than {MAX_STEPS} steps")

    return tick


def _raise(message: str) -> None:
    raise Raised(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
