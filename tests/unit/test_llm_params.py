"""vLLM's parameters of constraints, as SamplingParams take them, come to what the routes take."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from sapwood.srt.errors import BadRequest

SCHEMA = {"type": "object"}


class Model:
    """What pydantic's classes have."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (StructuredOutputsParams(json=SCHEMA), {"json": SCHEMA}),
        (StructuredOutputsParams(json=Model), {"json": SCHEMA}),
        (StructuredOutputsParams(regex="a+"), {"regex": "a+"}),
        (StructuredOutputsParams(choice=["a", "b"]), {"choice": ["a", "b"]}),
        (StructuredOutputsParams(json_object=True), {"json_object": True}),
        (GuidedDecodingParams(grammar="root ::= 'a'", backend="xgrammar"), {"grammar": "root ::= 'a'"}),
        ({"structural_tag": "{}", "backend": None}, {"structural_tag": "{}"}),
        (StructuredOutputsParams(disable_any_whitespace=True, json="{}"),
         {"disable_any_whitespace": True, "json": "{}"}),
    ],
)  # fmt: skip
def test_each_is_a_field_of_the_request(given: Any, fields: dict[str, Any]) -> None:
    for name in ("structured_outputs", "guided_decoding"):
        params = SamplingParams(**{name: given})
        assert params.constraint == {"structured_outputs": fields}
        assert params.native()["structured_outputs"] == fields
        assert params.checked(100).max_tokens == 16


def test_nothing_is_no_constraint() -> None:
    assert SamplingParams().constraint == {}
    assert "structured_outputs" not in SamplingParams().native()


def test_two_names_at_once_are_refused() -> None:
    both = SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})
    with pytest.raises(BadRequest, match="two names"):
        _ = both.constraint


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_what_is_no_constraint_is_refused_at_once(name: str) -> None:
    with pytest.raises(BadRequest, match="must be StructuredOutputsParams") as caught:
        SamplingParams(**{name: "x"})  # type: ignore[arg-type]
    assert caught.value.param == name
    params = SamplingParams()
    setattr(params, name, 5)
    with pytest.raises(BadRequest):
        _ = params.constraint
