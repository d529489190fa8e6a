"""Random schemas: a Document allows just what jsonschema finds valid, or the schema is refused."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.compile import compile_constraint
from sapwood.srt.grammar.keywords import KEYWORDS
from sapwood.srt.grammar.schema import read
from sapwood.srt.params import Constraint
from tests import random_schemas
from tests.documents import allows
from tests.grammars import engine

ROUNDS = 8
SCHEMAS = 60
VALUES = 40


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_documents_allow_what_is_valid_and_nothing_else(seed: int) -> None:
    r = random.Random(seed)
    read_ones = valid_ones = 0
    for _ in range(SCHEMAS):
        schema = random_schemas.schema(r)
        values = [random_schemas.value(r) for _ in range(VALUES)]
        validator = jsonschema.Draft202012Validator(schema)
        try:
            document = read(json.dumps(schema), "schema")
        except BadRequest as error:
            if "admits no value" in error.message:
                assert not any(validator.is_valid(value) for value in values), schema
            continue
        read_ones += 1
        for value in values:
            valid = validator.is_valid(value)
            valid_ones += valid
            assert allows(document, value) == valid, (schema, value)
    assert read_ones > SCHEMAS // 2
    assert valid_ones > VALUES * read_ones // 10


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sent_is_read_or_refused(seed: int) -> None:
    r = random.Random(seed)
    answers = set()
    for i in range(400):
        schema = random_schemas.junk(r) if i % 2 else random_schemas.schema(r)
        if isinstance(schema, dict):
            schema[r.choice([*KEYWORDS])] = random_schemas.junk(r)
        try:
            read(json.dumps(schema), "schema")
            answers.add("read")
        except BadRequest as error:
            answers.add(f"refused {error.param}" if len(error.message) < 1000 else error.message)
    assert answers == {"read", "refused schema"}


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_with_one_thing_wrong_is_compiled_or_refused(seed: int) -> None:
    r = random.Random(seed)
    answers = set()
    for _ in range(150):
        schema = random_schemas.mutated(r, random_schemas.schema(r))
        schema |= {"x-lenient": True} if r.random() < 0.3 else {}
        try:
            compile_constraint(Constraint("json_schema", json.dumps(schema), "schema"), engine())
            answers.add("compiled")
        except BadRequest as error:
            answers.add(f"refused {error.param}")
    assert answers == {"compiled", "refused schema"}
