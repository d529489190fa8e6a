"""32 models' chat templates render five conversations to the byte as transformers renders them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.templates import ChatTemplate, prepare

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
CONVERSATIONS: dict[str, Any] = json.loads((FOLDER / "conversations.json").read_text())
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (FOLDER / "expected_renderings.jsonl").read_text().splitlines()
]
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(template, conversation): why ours differs. None does."""


@cache
def template(name: str) -> ChatTemplate:
    source = (FOLDER / "templates" / f"{name}.jinja").read_text()
    return ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"})


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "add_generation_prompt": case["add_generation_prompt"],
        "continue_final": case["continue_final_message"],
        "tools": CONVERSATIONS[case["conversation"]].get("tools"),
    }


def named(case: dict[str, Any]) -> str:
    return f"{case['template']}-{case['conversation']}"


def test_there_are_160_cases() -> None:
    assert len(CASES) == len({named(case) for case in CASES}) == 160
    assert sum(case["rendered"] is not None for case in CASES) == 133
    assert sum(case["raises"] is not None for case in CASES) == 8
    assert len(list((FOLDER / "templates").iterdir())) == 32


@pytest.mark.parametrize("case", CASES, ids=named)
def test_renders_as_the_reference(case: dict[str, Any]) -> None:
    if why := EXCEPTIONS.get((case["template"], case["conversation"])):
        pytest.skip(why)
    ours = template(case["template"])
    conversation = CONVERSATIONS[case["conversation"]]["messages"]
    messages = prepare(conversation, wants_parts=ours.wants_parts)
    if case["raises"] is not None:
        with pytest.raises(BadRequest) as caught:
            ours.render(messages, **arguments(case))
        assert caught.value.status == 400
        assert caught.value.message
        return
    text = ours.render(messages, **arguments(case))
    assert text
    if case["date_dependent"]:
        assert case["rendered"] is None
    else:
        assert text == case["rendered"]


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Kimi-K2-Instruct", "HuggingFaceTB-SmolLM3-3B"])
def test_in_a_process_of_its_own_it_renders_the_same(name: str) -> None:
    source = (FOLDER / "templates" / f"{name}.jinja").read_text()
    isolated = IsolatedTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"})
    for case in (case for case in CASES if case["template"] == name):
        messages = isolated.prepare(CONVERSATIONS[case["conversation"]]["messages"])
        if case["raises"] is not None:
            with pytest.raises(BadRequest):
                isolated.render(messages, **arguments(case))
        else:
            assert isolated.render(messages, **arguments(case)) == case["rendered"]
    isolated.close()
