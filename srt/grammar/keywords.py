"""The keywords of JSON Schema, and what is done with each: read by the front pass, and told to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["full", "limited", "annotation", "refused"]
Value = Literal["any", "schema", "schemas", "list", "names", "number", "count", "flag", "text"]


@dataclass(frozen=True, slots=True)
class Keyword:
    """How a keyword is handled.

    `status`: enforced fully, enforced where `note` says and refused elsewhere, without any effect by its
    nature, or refused. `value`: what its value must be for the schema to be one. `drafts` names those that
    have it, where that is not all from 4 to 2020-12; in a schema that declares an older one it has no effect,
    and a warning says so. `unenforced`: what comes of it in a lenient schema, if that is not just wider.
    """

    name: str
    status: Status
    value: Value
    note: str = ""
    drafts: str = ""
    unenforced: str = ""


KEYWORDS: dict[str, Keyword] = {
    keyword.name: keyword
    for keyword in (
        Keyword(
            "$schema", "full", "text", "the draft by which the schema is read; unknown ones count as 2020-12"
        ),
        Keyword("$id", "full", "text", "names places within the document"),
        Keyword("id", "full", "any", "as $id, in draft 4", "4"),
        Keyword("$anchor", "full", "text", "", "2019-09, 2020-12"),
        Keyword("$defs", "full", "schemas", "", "2019-09, 2020-12"),
        Keyword("definitions", "full", "schemas", "", "4 to 7"),
        Keyword("$ref", "limited", "text", "to places in the same document, recursive ones included"),
        Keyword("$dynamicRef", "refused", "text", "", "2020-12"),
        Keyword("$dynamicAnchor", "full", "text", "as $anchor", "2020-12"),
        Keyword("$recursiveRef", "refused", "text", "", "2019-09"),
        Keyword("$recursiveAnchor", "annotation", "flag", "without $recursiveRef", "2019-09"),
        Keyword("$vocabulary", "annotation", "any", "", "2019-09, 2020-12"),
        Keyword("$comment", "annotation", "text"),
        Keyword("type", "full", "any"),
        Keyword("enum", "full", "list", "at most 4,096 values in all"),
        Keyword("const", "full", "any", "", "6 to 2020-12"),
        Keyword("multipleOf", "limited", "number", "of steps that can be told by digits; not under a `not`"),
        Keyword("minimum", "full", "number"),
        Keyword("maximum", "full", "number"),
        Keyword("exclusiveMinimum", "full", "any", "a number, or as in draft 4 a flag"),
        Keyword("exclusiveMaximum", "full", "any", "a number, or as in draft 4 a flag"),
        Keyword("minLength", "full", "count"),
        Keyword("maxLength", "full", "count"),
        Keyword("pattern", "limited", "text", "without lookaround, backreferences and word boundaries"),
        Keyword("format", "limited", "text", "those listed are enforced; a warning names another"),
        Keyword("prefixItems", "full", "list", "", "2020-12"),
        Keyword("items", "full", "any", "a schema, or as in older drafts a list of them"),
        Keyword("additionalItems", "full", "schema", "beside a list of items", "4 to 2019-09"),
        Keyword("minItems", "full", "count"),
        Keyword("maxItems", "full", "count"),
        Keyword("uniqueItems", "limited", "flag", "one item at most, or items of at most 32 fixed values"),
        Keyword(
            "contains",
            "limited",
            "schema",
            "in arrays of at most 16 items, or where every item is so",
            "6 to 2020-12",
        ),
        Keyword("minContains", "limited", "count", "0 and 1", "2019-09, 2020-12"),
        Keyword("maxContains", "refused", "count", "", "2019-09, 2020-12"),
        Keyword("properties", "full", "schemas", "written in this order, others after them"),
        Keyword("required", "full", "names"),
        Keyword("additionalProperties", "full", "schema"),
        Keyword("patternProperties", "limited", "schemas", "with patterns as under pattern"),
        Keyword("propertyNames", "full", "schema", "", "6 to 2020-12"),
        Keyword(
            "minProperties", "limited", "count", "up to one more than the required ones, or declared ones"
        ),
        Keyword("maxProperties", "full", "count"),
        Keyword("dependentRequired", "full", "any", "", "2019-09, 2020-12"),
        Keyword("dependentSchemas", "full", "schemas", "", "2019-09, 2020-12"),
        Keyword("dependencies", "full", "any", "", "4 to 7"),
        Keyword("unevaluatedProperties", "limited", "schema", "where no choice decides", "2019-09, 2020-12"),
        Keyword("unevaluatedItems", "limited", "schema", "where no choice decides", "2019-09, 2020-12"),
        Keyword("allOf", "full", "list"),
        Keyword("anyOf", "full", "list"),
        Keyword("oneOf", "limited", "list", "where the difference of its members can be told"),
        Keyword("not", "limited", "schema", "where the opposite can be told"),
        Keyword("if", "limited", "schema", "where its opposite can be told", "7 to 2020-12"),
        Keyword("then", "full", "schema", "", "7 to 2020-12"),
        Keyword("else", "full", "schema", "", "7 to 2020-12"),
        Keyword("title", "annotation", "any"),
        Keyword("description", "annotation", "any"),
        Keyword("default", "annotation", "any"),
        Keyword("examples", "annotation", "any"),
        Keyword("deprecated", "annotation", "any"),
        Keyword("readOnly", "annotation", "any"),
        Keyword("writeOnly", "annotation", "any"),
        Keyword("contentEncoding", "annotation", "any"),
        Keyword("contentMediaType", "annotation", "any"),
        Keyword("contentSchema", "annotation", "any"),
        Keyword(
            "nullable",
            "refused",
            "flag",
            "true, which is OpenAPI's: write a list of types",
            "none",
            "null is not admitted by it",
        ),
    )
}

DRAFTS = ("4", "6", "7", "2019-09", "2020-12")


def is_known(keyword: Keyword, draft: str) -> bool:
    """Whether the draft, or one before it, has the keyword."""
    first = keyword.drafts.replace(",", " ").split(" ")[0]
    return first not in DRAFTS or DRAFTS.index(first) <= DRAFTS.index(draft)


LENIENT = "x-lenient"
"""At a schema's top: what cannot be enforced is a warning and not an error."""


def support() -> dict[str, object]:
    """What is supported of JSON Schema, keyword by keyword, with the limits: the body of a route."""
    from sapwood.srt.grammar import lark, limits, members
    from sapwood.srt.grammar.formats import FORMATS

    return {
        "draft": "2020-12, and what drafts 4 to 2019-09 have instead",
        "keywords": {
            keyword.name: {
                "status": keyword.status,
                **({"note": keyword.note} if keyword.note else {}),
                **({"drafts": keyword.drafts} if keyword.drafts else {}),
            }
            for keyword in KEYWORDS.values()
        },
        "formats": sorted(FORMATS),
        "limits": {
            "bytes": limits.MAX_TEXT,
            "depth": limits.MAX_DEPTH,
            "enum_values": limits.MAX_ENUM,
            "items": limits.MAX_ITEMS,
            "characters": limits.MAX_ITEMS,
            "unique_items": limits.MAX_UNIQUE,
            "prefix_items": lark.MAX_PREFIX,
            "optional_properties": members.MAX_OPTIONAL,
            "number_digits": limits.MAX_DIGITS,
            "alternatives": limits.MAX_ALTERNATIVES,
            "rules": limits.MAX_RULES,
            "steps": limits.MAX_STEPS,
        },
        "lenient": LENIENT,
    }
