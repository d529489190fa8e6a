"""How a model writes calls and reasoning is known from its chat template, unless a flag says so."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt.config import make
from sapwood.srt.errors import BadRequest
from sapwood.srt.server import formats
from tests.api.scripted import source

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (f"{TOOLS}<tool_call>", "hermes"),
        ("{{ messages }}", "hermes"),
        ("{{ xml_tools }}<tool_call><function=x>", "hermes"),
        (f"{TOOLS}[TOOL_CALLS]", "mistral"),
        (f"{TOOLS}[TOOL_CALLS]f[ARGS]", "mistral_args"),
        (f"{TOOLS}<|python_tag|>", "llama3_json"),
        (f"{TOOLS}Environment: ipython", "llama3_json"),
        (f"{TOOLS}<|python_start|>", "pythonic"),
    ],
)
def test_calls(template: str, form: str) -> None:
    assert formats.tool_format(make(), source(chat_template=template)) == form


@pytest.mark.parametrize(
    "mark", ["", "<tool_call><function=", "<tool_call><arg_key>", "<tool_calls><tool_call>"]
)
def test_a_form_that_is_not_read_is_none(mark: str) -> None:
    model = source(chat_template=TOOLS + mark)
    with pytest.raises(BadRequest, match="no form that is known"):
        formats.tool_format(make(), model)
    assert formats.tool_format(make(tool_call_parser="hermes"), model) == "hermes"


def test_the_flag_goes_before_the_template() -> None:
    model = source(chat_template=f"{TOOLS}<tool_call>")
    for chosen in ("llama3_json", "pythonic", "mistral"):
        assert formats.tool_format(make(tool_call_parser=chosen), model) == chosen
    with pytest.raises(BadRequest, match="--tool-call-parser none"):
        formats.tool_format(make(tool_call_parser="none"), model)


@pytest.mark.parametrize(
    ("template", "flag", "kwargs", "form"),
    [
        ("{{ c.split('</think>') }}", "auto", {}, "think"),
        ("plain", "auto", {}, ""),
        ("plain", "think", {}, "think"),
        ("<think></think>", "none", {}, ""),
        ("<think></think>", "auto", {"enable_thinking": False}, ""),
        ("<think></think>", "auto", {"thinking": False}, ""),
        ("<think></think>", "auto", {"enable_thinking": True}, "think"),
    ],
)
def test_reasoning(template: str, flag: Any, kwargs: dict[str, Any], form: str) -> None:
    config, model = make(reasoning_parser=flag), source(chat_template=template)
    assert formats.reasoning_format(config, model, kwargs) == form
