"""Chat messages to text, by the model's own template, as transformers' `apply_chat_template` does it."""

from __future__ import annotations

import re
from typing import Any, Literal

import jinja2
from jinja2 import nodes

from sapwood.srt.errors import BadRequest, ModelError
from sapwood.srt.tokenizer.sandbox import FAILURES, CompiledTemplate, Raised

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put after the final message to find its end in the text; what follows it is cut off. Its space tells
whether the template trims contents. (transformers' way, and its tag.)"""

MAX_REASON_CHARS = 500
"""Of what a template says when it refuses: that may quote all of a message."""

DAILY = re.compile(r"(?:[^%]|%-?[aAbBCdDeFGhjmuUVwWxyY%])*")
"""Forms of a time that are the same all day."""

Changes = Literal["never", "daily", "always"]
"""How long a template makes the same text of the same messages."""

RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))


class ChatTemplate:
    """A compiled chat template. Raises ModelError if it is not one.

    `variables` are the strings that a template may use (`bos_token`, ...), `wants_parts` is for `prepare`.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        try:
            self._compiled = CompiledTemplate(source)
        except (jinja2.TemplateError, RecursionError) as e:
            raise ModelError(f"the model's chat template cannot be used: {e}") from None
        self._variables = variables
        self.wants_parts = _wants_parts(self._compiled.tree)
        self.changes = _changes(self._compiled.tree)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The text of prepared messages; BadRequest, in the template's own words, if it refuses them.

        `kwargs` are the client's: they can set what the template asks for, but nothing that is there already.
        """
        kwargs = kwargs or {}
        if add_generation_prompt and continue_final:
            raise BadRequest(
                "add_generation_prompt and continue_final_message exclude each other: a message cannot be"
                " continued after a new one was begun",
                param="continue_final_message",
            )
        for name in kwargs:
            if name in RESERVED or name in self._variables or self._compiled.has(name):
                raise BadRequest(
                    f"chat_template_kwargs cannot set {name[:100]!r}", param="chat_template_kwargs"
                )
        if continue_final:
            messages = [*messages[:-1], _tagged(messages[-1])]
        variables = {"documents": None} | self._variables | kwargs
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._compiled.render(variables)
        except Raised as e:
            raise BadRequest(_shown(str(e)), param="messages") from None
        except FAILURES as e:
            reason = _shown(str(e)) or type(e).__name__
            raise BadRequest(
                f"the chat template fails on these messages: {reason}", param="messages"
            ) from None
        return _cut_at_tag(text) if continue_final else text


def prepare(messages: list[dict[str, Any]], *, wants_parts: bool) -> list[dict[str, Any]]:
    """The messages in the shape that a template expects; raises BadRequest naming the place.

    Contents become strings (text parts are joined by newlines, null is ""), or lists of text parts for a
    template that knows only those. Keys without a value are dropped.
    """
    if not messages:
        raise BadRequest("messages is empty; at least one message is needed", param="messages")
    prepared = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}].role must be a string", param="messages")
        content: Any = _text(message.get("content"), f"messages[{i}].content")
        if wants_parts:
            content = [{"type": "text", "text": content}]
        prepared.append({k: v for k, v in message.items() if v is not None} | {"content": content})
    return prepared


def _shown(reason: str) -> str:
    """A template's words, for an error message: not too many, and no control characters among them."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in reason[: MAX_REASON_CHARS + 1]
    )
    return shown if len(shown) <= MAX_REASON_CHARS else shown[: MAX_REASON_CHARS - 1] + "…"


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be a string, null or a list of parts", param="messages")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(
                f"{place}[{i}] is not a text part (its type is {kind!r}); this model takes text only",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + CONTINUE_TAG}
    return message | {"content": [{"type": "text", "text": content[0]["text"] + CONTINUE_TAG}]}


def _cut_at_tag(text: str) -> str:
    end = text.rfind(CONTINUE_TAG.rstrip())
    if end < 0:
        raise BadRequest(
            "the final message cannot be continued: the chat template does not show it as it is",
            param="continue_final_message",
        )
    trims = not text.startswith(CONTINUE_TAG, end)
    return text[:end].rstrip() if trims else text[:end]


def _wants_parts(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content and never asks if that is a string."""
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset()):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _changes(tree: nodes.Template) -> Changes:
    """What of the time the template asks for: the forms are read, where it names them outright."""
    names = [name for name in tree.find_all(nodes.Name) if name.name == "strftime_now"]
    calls = [call.args for call in tree.find_all(nodes.Call) if call.node in names]
    asked = [test for test in tree.find_all(nodes.Test) if test.name == "defined" and test.node in names]
    if len(calls) + len(asked) < len(names) or not all(map(_is_daily, calls)):
        return "always"
    return "daily" if calls else "never"


def _is_daily(args: list[nodes.Expr]) -> bool:
    form = args[0].value if len(args) == 1 and isinstance(args[0], nodes.Const) else None
    return isinstance(form, str) and DAILY.fullmatch(form) is not None


def _is_content(node: nodes.Node | None, names: frozenset[str] | set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
