"""Compiles a chat template in a sandbox, out of which it can reach nothing.

What it may use of time and memory is bounded by the process that it renders in (render_child.py). The names
that templates rely on are those of transformers (`raise_exception`, `strftime_now`, a `tojson` that leaves
characters alone, `{% generation %}`, `{% break %}`).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 8 * 2**20
"""What a template may write."""

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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.tree = environment.parse(source)
        self._environment = environment
        code = environment.compile(self.tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def has(self, name: str) -> bool:
        """Whether a name means something to every template, as a function of the sandbox does."""
        return name in self._environment.globals or name.startswith("_")

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises one of FAILURES, also if it is longer than MAX_CHARS."""
        parts, chars = [], 0
        for part in self._template.generate(variables):
            parts.append(part)
            chars += len(part)
            if chars > MAX_CHARS:
                raise jinja2.TemplateRuntimeError(f"it wrote more than {MAX_CHARS} characters")
        return "".join(parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 (the name and kind are jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
