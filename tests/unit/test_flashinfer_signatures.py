"""FlashInfer is called as it wants to be: what is recorded of it is what the installed package has."""

from __future__ import annotations

import importlib.util
from inspect import Parameter, Signature
from typing import Any

import pytest

from tests.gpu.signatures import RECORDED, bind, installed

PLAN, KEYWORDS = (f"BatchDecodeWithPagedKVCacheWrapper.{name}" for name in ("plan", "_plan_impl"))


def test_a_call_is_bound_as_python_would() -> None:
    given = bind("BatchPrefillWithPagedKVCacheWrapper.plan", 1, 2, 3, 4, 8, 2, 64, 1, causal=True)
    assert (given["num_qo_heads"], given["causal"], given["window_left"]) == (8, True, -1)


@pytest.mark.parametrize(
    ("arguments", "keywords"), [((1, 2), {}), ((1,) * 8, {"causl": True}), ((1,) * 99, {})]
)
def test_a_call_that_flashinfer_would_not_take_fails(arguments: Any, keywords: Any) -> None:
    with pytest.raises(TypeError):
        bind("BatchPrefillWithPagedKVCacheWrapper.plan", *arguments, **keywords)


def test_decode_takes_options_by_keyword_only() -> None:
    kinds = {parameter.kind for parameter in list(RECORDED[KEYWORDS].parameters.values())[8:]}
    assert kinds == {Parameter.KEYWORD_ONLY}


@pytest.fixture(scope="module")
def flashinfer() -> Any:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    return importlib.import_module("flashinfer")


def names(signature: Signature) -> list[str]:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


@pytest.mark.parametrize("method", RECORDED)
def test_the_installed_package_has_every_recorded_argument(flashinfer: Any, method: str) -> None:
    """In its place, with its default; a later release may have more of them."""
    found, recorded = installed(flashinfer, method), RECORDED[method]
    places = names(recorded)
    assert names(found)[: len(places)] == places
    for name, parameter in recorded.parameters.items():
        assert found.parameters[name].default == parameter.default, name
