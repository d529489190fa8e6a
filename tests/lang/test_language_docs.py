"""Every public name of the language has an example in its docstring that is true."""

from __future__ import annotations

import doctest
import importlib

import pytest

import sapwood

NAMES = sorted(name for name, module in sapwood._PUBLIC.items() if module.startswith("sapwood.lang"))


@pytest.mark.parametrize("name", NAMES)
def test_its_example_is_true(name: str) -> None:
    value = getattr(sapwood, name)
    module = importlib.import_module(sapwood._PUBLIC[name])
    # A value has no docstring of its own: its module's tells of it.
    text = (value.__doc__ if callable(value) and hasattr(value, "__qualname__") else module.__doc__) or ""
    test = doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, module.__file__, 0)
    assert any(name in example.source for example in test.examples), f"{name} has no example"
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)
