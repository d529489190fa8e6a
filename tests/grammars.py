"""One engine for tests of grammars, on the tiny tokenizer, and whether a grammar takes a text."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.compile import compile_constraint
from sapwood.srt.grammar.engine import Engine, Matcher
from sapwood.srt.params import Constraint
from tests.models import tiny_tokenizer

CALL = "<tool_call>"


@functools.cache
def engine() -> Engine:
    """Of the tiny byte-level tokenizer, with a special token more; the end is 1."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([CALL])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return Engine(str(path), tokenizer.get_vocab_size(), [1])


def compiled(kind: Any, text: Any, **more: Any) -> Matcher:
    """A matcher for a constraint whose text is given, or made of JSON."""
    text = text if isinstance(text, str) else json.dumps(text)
    return engine().compile(compile_constraint(Constraint(kind, text, "field", **more), engine()).text)


def takes(matcher: Matcher, text: str) -> bool:
    """Whether a whole output may be this text."""
    matcher, ids = matcher.copy(), engine().tokenize(text)
    return matcher.accept(ids) == len(ids) and matcher.complete


def refusal(kind: Any, text: Any, **more: Any) -> str:
    """The message that a constraint is refused with."""
    with pytest.raises(BadRequest) as refused:
        compiled(kind, text, **more)
    assert refused.value.status == 400
    assert refused.value.param == "field"
    return refused.value.message
