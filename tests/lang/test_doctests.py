"""Every public name of the language has an example in its docstring, and all examples are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import sapwood
import sapwood.lang
from sapwood.lang.defaults import set_default_backend

NAMES = sorted(name for name, module in sapwood._PUBLIC.items() if module.startswith("sapwood.lang."))
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(sapwood.lang.__path__, "sapwood.lang.")
]


def examples(module: ModuleType) -> list[doctest.DocTest]:
    """The examples of a module, each docstring's as one."""
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


TESTS = [test for module in MODULES for test in examples(module)]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_the_examples_are_true(test: doctest.DocTest) -> None:
    set_default_backend(None)
    told: list[str] = []
    results = doctest.DocTestRunner().run(test, out=told.append)
    assert results.failed == 0, "".join(told)
    assert results.attempted == len(test.examples)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_uses_it(name: str) -> None:
    """In its own docstring; a name of a value, which has none, in that of its module."""
    module = sapwood._PUBLIC[name]
    own = isinstance(getattr(sapwood, name), type) or hasattr(getattr(sapwood, name), "__code__")
    where = f"{module}.{name}" if own else module
    sources = [example.source for test in TESTS if test.name == where for example in test.examples]
    assert any(name in source for source in sources), f"{where} has no example with {name}"
