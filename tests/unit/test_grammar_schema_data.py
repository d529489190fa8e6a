"""Verdicts of the front pass on schemas of others: no wrong ones, and what is refused is known by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.schema import read
from tests.documents import allows

DATA = Path(__file__).parent.parent / "data"
SUITE = sorted((DATA / "json_schema_test_suite").glob("*.json"))
REFUSED = {
    "defs: validate definition against metaschema",
    "multipleOf: float division = inf",
    "not: collect annotations inside a 'not', even if collection is disabled",
    "ref: remote ref, containing refs itself",
    "uniqueItems: uniqueItems validation",
    "uniqueItems: uniqueItems with an array of items",
    "Handwritten---oneofpr2",
    "JsonSchemaStore---esmrc",
}


def wrong(name: str, schema: Any, tests: list[dict[str, Any]]) -> list[str]:
    """The instances about which the schema's Document is wrong, each with its verdict."""
    try:
        document = read(json.dumps(schema), "schema")
    except BadRequest as error:
        if "admits no value" in error.message:
            return [f"{name}: not empty" for test in tests if test["valid"]]
        return [] if name in REFUSED else [f"{name}: {error.message}"]
    assert name not in REFUSED
    verdicts = [(test, allows(document, test["data"])) for test in tests]
    return [f"{name}: {test['data']}: {got}" for test, got in verdicts if got != test["valid"]]


@pytest.mark.parametrize("path", SUITE, ids=[path.stem for path in SUITE])
def test_the_test_suite(path: Path) -> None:
    groups = json.loads(path.read_text())
    found = [
        line
        for group in groups
        for line in wrong(f"{path.stem}: {group['description']}", group["schema"], group["tests"])
    ]
    if path.stem == "format":
        # There it is an annotation; here what is not of a format that can be enforced is not written.
        assert all(line.endswith(": False") for line in found)
        assert len(found) < len(groups)
    else:
        assert found == []


def test_the_suite_is_all_there() -> None:
    assert sum(len(group["tests"]) for path in SUITE for group in json.loads(path.read_text())) == 910


def test_schemas_from_the_wild() -> None:
    lines = (DATA / "jsonschemabench" / "schemas.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert len(entries) > 150
    assert [line for one in entries for line in wrong(one["id"], one["schema"], one["tests"])] == []
