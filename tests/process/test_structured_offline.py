"""Constraints through `LLM` and `Engine`: the same fields, without HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sapwood import LLM, Engine, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from sapwood.srt import offline_requests
from sapwood.srt.errors import BadRequest
from tests.models import CHATML, tiny_llama

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 30, "minimum": 0}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "A cat, please."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offline")


@pytest.fixture(scope="module")
def template(folder: Path) -> str:
    path = folder / "thinking.jinja"
    path.write_text(CHATML + "{% if think %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: Path, template: str) -> Iterator[LLM]:
    tiny_llama(folder / "model")
    options = {"max_total_tokens": 4096, "log_level": "warning"}
    with LLM(str(folder / "model"), chat_template=template, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(folder: Path, template: str, llm: LLM) -> Iterator[Engine]:
    options = {"max_total_tokens": 4096, "log_level": "warning"}
    with Engine(str(folder / "model"), chat_template=template, **options) as engine:
        yield engine


def test_each_prompt_has_its_own(llm: LLM) -> None:
    regex, schema = StructuredOutputsParams(regex="[ab]{3}"), StructuredOutputsParams(json=SCHEMA)
    each = [
        SamplingParams(max_tokens=60, structured_outputs=regex),
        SamplingParams(max_tokens=60, structured_outputs=schema, n=2),
        SamplingParams(max_tokens=60, guided_decoding=GuidedDecodingParams(choice=["yes", "no"])),
    ]
    first, second, third = (output.outputs for output in llm.generate(["x", "y", "z"], each))
    assert set(first[0].text) <= {"a", "b"}
    for choice in second:
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert third[0].text in ("yes", "no")


def test_what_is_not_enforced_and_where_it_was_cut_are_told(llm: LLM) -> None:
    odd = StructuredOutputsParams(json={**SCHEMA, "zzz": 1})
    (output,) = llm.generate("x", SamplingParams(max_tokens=3, structured_outputs=odd))
    assert output.warnings == ["structured_outputs.json at /zzz: it is no keyword; not enforced"]
    cut = output.outputs[0]
    assert cut.finish_reason == "length"
    assert cut.incomplete is not None
    assert (cut.incomplete.pointer, cut.incomplete.inside) in (
        ("/kind", "string"),
        ("", "key"),
        ("", "object"),
    )
    whole = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    for (output,) in (llm.generate("x", whole), llm.chat(ASK, whole)):
        assert output.warnings == []
        assert [one.incomplete for one in output.outputs] == [None]


def test_what_cannot_be_enforced_is_refused(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "wat"}))
    with pytest.raises(BadRequest, match="/type"):
        llm.generate("x", bad)
    with pytest.raises(BadRequest, match="max_tokens"):
        llm.generate("x", SamplingParams(max_tokens=0, structured_outputs={"regex": "a"}))


def test_a_chats_constraint_comes_after_its_reasoning(llm: LLM, engine: Engine) -> None:
    # Reasoning that has begun goes on: its EOS is ignored, and no seed of these draws "</think>".
    params = SamplingParams(max_tokens=20, structured_outputs={"regex": "[ab]{3}"}, ignore_eos=True, seed=1)
    over = llm.chat(ASK, params)[0].outputs[0]
    assert set(over.text) <= {"a", "b"}
    assert over.reasoning_content is None
    begun = llm.chat(ASK, params, chat_template_kwargs={"think": 1})[0].outputs[0]
    assert begun.text == ""
    assert begun.reasoning_content
    assert begun.finish_reason == "length"
    native = {"regex": "[ab]{3}", "max_new_tokens": 20, "ignore_eos": True, "seed": 1}
    assert set(engine.chat(ASK, native)["text"]) <= {"a", "b"}
    answer = engine.chat(ASK, native, chat_template_kwargs={"think": 1})
    assert answer["text"] == ""
    assert answer["meta_info"]["reasoning_content"]


def test_the_engines_names_are_the_routes(engine: Engine) -> None:
    for fields in ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}):
        answer = engine.generate("x", {**fields, "max_new_tokens": 60})
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)
    cut = engine.generate("x", {"json_schema": SCHEMA, "max_new_tokens": 3})
    assert set(cut["meta_info"]["incomplete"]) == {"pointer", "inside"}
    with pytest.raises(BadRequest, match="two constraints"):
        engine.generate("x", {"regex": "a", "choices": ["a"]})


def test_streams_are_constrained_too(engine: Engine) -> None:
    params = {"choices": ["yes", "no"], "max_new_tokens": 20}
    *_, last = engine.generate("x", params, stream=True)
    assert last["text"] in ("yes", "no")


def test_tools_reach_the_template(engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "adopt_a_cat"}}
    with_tool = engine.chat(ASK, {"max_new_tokens": 1}, tools=[tool])
    without = engine.chat(ASK, {"max_new_tokens": 1})
    assert with_tool["meta_info"]["prompt_tokens"] > without["meta_info"]["prompt_tokens"] + 50


def test_a_strict_tool_is_refused_where_calls_are_text(llm: LLM, engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "adopt_a_cat", "strict": True}}
    for chat in (
        lambda: llm.chat(ASK, SamplingParams(max_tokens=1), tools=[tool]),
        lambda: engine.chat(ASK, {"max_new_tokens": 1}, tools=[tool]),
    ):
        with pytest.raises(BadRequest, match="strict") as caught:
            chat()
        assert caught.value.param == "tools[0].function.strict"


def test_what_prompts_share_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[SamplingParams] = []
    plain = offline_requests.constraint

    def counted(service: Any, given: SamplingParams) -> Any:
        read.append(given)
        return plain(service, given)

    monkeypatch.setattr(offline_requests, "constraint", counted)
    params = SamplingParams(max_tokens=10, structured_outputs={"regex": "[ab]{3}"})
    for output in llm.generate(["x", "y", "z"], params):
        assert set(output.outputs[0].text) <= {"a", "b"}
    assert read == [params]
