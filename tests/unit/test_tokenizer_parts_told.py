"""What the tokenizer process tells of a prompt in parts: to the scheduler, the server, who asks for ids."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from sapwood.srt.messages import (
    Admitted,
    Answer,
    Ask,
    Ended,
    Generate,
    IdsPart,
    PartsPrompt,
    Spoken,
    Started,
    Submit,
    TextPart,
    Verdict,
    pack,
    unpack,
)
from sapwood.srt.params import SamplingParams
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from tests.tokenizer_kinds import byte_level
from tests.unit.test_tokenizer_questions import ENDLESS, Bench, closed as closed

FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)


def said(role: str, text: str) -> Spoken:
    return Spoken(role, [TextPart(text)])


TALK = PartsPrompt([said("user", "the dog"), said("assistant", "sleeps"), said("user", "on")])


def test_what_is_rewritten_is_told_when_the_request_starts() -> None:
    bench = Bench(byte_level(), FORGETFUL)
    submit = bench.until(bench.scheduler, Submit, Generate("r", TALK, SamplingParams()))
    started = bench.until(bench.server, Started, Admitted(submit.key, Verdict(0, "cold"), 0.0))
    assert started.rewritten == [2]
    assert started.prompt_ids == submit.ids
    text = byte_level().decode(unpack(submit.ids).tolist(), skip_special_tokens=False)
    assert text == "<|start|>user\nthe dog<|end|>\n<|start|>user\non<|end|>\n"


def test_nothing_is_told_of_what_was_kept() -> None:
    bench = Bench(byte_level())
    prompt = PartsPrompt([TextPart("the dog"), IdsPart(pack([5, 6]))])
    bench.step(Generate("r", prompt, SamplingParams()))
    (submit,) = bench.scheduler.take()
    assert unpack(submit.ids).tolist() == [*byte_level().encode("the dog").ids, 5, 6]
    (started,) = bench.step(Admitted(submit.key, Verdict(0, "cold"), 0.0))
    assert started.rewritten == []


@pytest.mark.parametrize("prompt", [PartsPrompt([TextPart("")]), PartsPrompt([IdsPart(pack([600]))])])
def test_what_cannot_be_encoded_ends_the_request(prompt: PartsPrompt) -> None:
    bench = Bench(byte_level())
    ended = bench.until(bench.server, Ended, Generate("r", prompt, SamplingParams()))
    assert (ended.error.status, ended.error.param) == (400, "input")


def test_a_question_tells_each_parts_tokens() -> None:
    bench = Bench(byte_level(), FORGETFUL)
    parts: list[Any] = [IdsPart(pack([5])), TextPart("the dog"), TextPart(" sleeps")]
    told = bench.ask("tokenize", PartsPrompt(parts), texts=False).data
    one, two = (byte_level().encode(text).ids for text in ("the dog", " sleeps"))
    assert told["tokens"] == [5, *one, *two]
    assert told["parts"] == [1, len(one), len(two)]
    assert told["rewritten"] == []
    told = bench.ask("tokenize", TALK, texts=False).data
    assert told["parts"] == [0, 0, len(told["tokens"])]
    assert told["rewritten"] == [2]


def allowed(bench: Bench, seconds: float) -> IsolatedTemplate:
    """The template, whose next renderings may compute for so long."""
    template = bench.encoder._template
    assert isinstance(template, IsolatedTemplate)
    template._setup = msgspec.structs.replace(template._setup, cpu_seconds=seconds)
    template._idle.pop().kill()
    return template


def test_a_cancelled_ones_rendering_is_broken_off() -> None:
    bench = Bench(byte_level(), "{% if messages[0].content != 'Hi' %}" + ENDLESS + "{% endif %}ok")
    assert bench.ask("tokenize", PartsPrompt([said("user", "Hi")])).data["tokens"]
    template = allowed(bench, 60.0)  # so much that none ends by itself
    begin = time.monotonic()
    bench.step(Ask(1, "tokenize", 0, PartsPrompt([said("user", "bad")])))
    while not template._busy:
        time.sleep(0.001)
    bench.step(Ask(1, "cancel"))
    while template._busy:
        time.sleep(0.001)
    assert time.monotonic() - begin < 20, "and not by its limit of 60 s"


def test_a_template_that_never_ends_is_refused() -> None:
    bench = Bench(byte_level(), "{% if messages[0].content != 'Hi' %}" + ENDLESS + "{% endif %}ok")
    allowed(bench, 0.2)
    answer = bench.ask("tokenize", PartsPrompt([said("user", "bad")]))
    assert isinstance(answer, Answer)
    assert answer.error is not None
    assert "of computing" in answer.error.message
    assert answer.error.param == "input"
