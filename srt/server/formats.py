"""How a model writes its reasoning and its calls of tools: as its chat template shows, or a flag says.

Needs no web framework.
"""

from __future__ import annotations

import re
from typing import Any

from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import BadRequest

REASONING, REASONING_END = "<think>", "</think>"

_TOOLS = re.compile(r"\btools\b")
_OTHERS = ("<function=", "<arg_key>", "<tool_calls>", "<|tool_calls_section_begin|>")
"""Marks of forms that are not read here, though some of what is in them looks like one that is."""
_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the switch of the reasoning."""


def knows_tools(source: ModelSource) -> bool:
    """Whether the chat template tells the model of tools. Without a template there is nothing to say."""
    return source.chat_template is None or bool(_TOOLS.search(source.chat_template))


def tool_format(config: Config, source: ModelSource) -> str:
    """How the model writes calls: a format of the tokenizer's parsers.

    A model whose template says nothing of tools is told to write them as Hermes does. Raises BadRequest if
    calls are not parsed here, or in no form that is known.
    """
    chosen, template = config.tool_call_parser, source.chat_template or ""
    if chosen == "none":
        raise BadRequest("tools: this server parses no calls (--tool-call-parser none)", param="tools")
    if chosen == "mistral" or (chosen == "auto" and "[TOOL_CALLS]" in template):
        return "mistral_args" if "[ARGS]" in template else "mistral"
    if chosen != "auto":
        return chosen
    if not knows_tools(source):
        return "hermes"
    if not any(mark in template for mark in _OTHERS):
        if "<tool_call>" in template:
            return "hermes"
        if "<|python_start|>" in template:
            return "pythonic"
        if "<|python_tag|>" in template or "ipython" in template:
            return "llama3_json"
    raise BadRequest(
        f"tools: the chat template of {source.name} writes calls in no form that is known here;"
        " --tool-call-parser sets one",
        param="tools",
    )


def known(config: Config, source: ModelSource) -> tuple[str | None, str | None]:
    """The formats of calls and of the reasoning; None: they are not told apart."""
    try:
        calls: str | None = tool_format(config, source)
    except BadRequest:
        calls = None
    return calls, reasoning_format(config, source, {}) or None


def facts(config: Config, source: ModelSource) -> dict[str, str]:
    """What the start-up message says of chats, if there is a template for them."""
    if source.chat_template is None or config.skip_tokenizer_init:
        return {}
    calls, reasoning = known(config, source)
    told = "" if calls is None or knows_tools(source) else ", which the prompt explains"
    return {"chats": f"calls of tools as {calls}{told}" if calls else "no calls of tools"} | {
        "reasoning": f"told apart as {reasoning}" if reasoning else "none that is told apart"
    }


def reasoning_format(config: Config, source: ModelSource, template_kwargs: dict[str, Any]) -> str:
    """How the model writes its reasoning; empty if it has none, or if the request has switched it off."""
    if any(template_kwargs.get(name) is False for name in _SWITCHES):
        return ""
    if config.reasoning_parser == "auto":
        return "think" if REASONING_END in (source.chat_template or "") else ""
    return "" if config.reasoning_parser == "none" else config.reasoning_parser
