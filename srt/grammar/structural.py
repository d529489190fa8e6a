"""Structural tags: free text, and in it tags whose contents are constrained; SGLang's form and xgrammar's.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}

Text of any kind ends at the first of the strings that may follow it. Where two parts may begin alike the
longest match decides, as in all grammars here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sapwood.srt.grammar import ebnf
from sapwood.srt.grammar.limits import MAX_DEPTH
from sapwood.srt.grammar.parts import Parts
from sapwood.srt.grammar.rules import repeated

MAX_REPEATS = 10_000

_KEYS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "const_string": {"value": str},
    "json_schema": {"json_schema": (dict, bool), "style": str},
    "regex": {"pattern": str},
    "grammar": {"grammar": str, "syntax": str},
    "any_text": {"excludes": list},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "tag": {"begin": str, "content": dict, "end": (str, list)},
    "triggered_tags": {
        "triggers": list,
        "tags": list,
        "at_least_one": bool,
        "stop_after_first": bool,
        "excludes": list,
    },
    "tags_with_separator": {"tags": list, "separator": str, "at_least_one": bool, "stop_after_first": bool},
    "optional": {"content": dict},
    "star": {"content": dict},
    "plus": {"content": dict},
    "repeat": {"content": dict, "min": int, "max": int},
}
_TEXTS = ("any_text", "regex", "triggered_tags")
"""Kinds that end where what follows begins."""
_OPTIONAL = ("style", "syntax", "excludes", "at_least_one", "stop_after_first")


def written(text: str, parts: Parts) -> str:
    """The expression of a structural tag. Raises BadRequest naming the place in it that is wrong."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise parts.refusal(f"is not valid JSON: {error}") from None
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise parts.refusal('must be an object whose type is "structural_tag"')
    if "format" in tag:
        return _Writer(parts).format(tag["format"], "/format", [], 0)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise parts.refusal("needs a format, or structures and triggers")
    tags = []
    for index, one in enumerate(structures):
        if not isinstance(one, dict) or not set(one) <= {"begin", "schema", "end"}:
            raise parts.refusal(f"/structures/{index} must be an object of begin, schema and end")
        schema = one.get("schema", {})
        if isinstance(schema, str):
            schema = _decoded(schema, parts, f"/structures/{index}/schema")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return _Writer(parts).format({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "", [], 0)


def _decoded(text: str, parts: Parts, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise parts.refusal(f"{where} is not valid JSON: {error}") from None


class _Writer:
    """Writes formats; each with what may end it (none of the `ends`: the end of the output, or anything)."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._kinds: dict[str, Callable[[dict[str, Any], str, list[str], int], str]] = {
            "any_text": self._any_text,
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
        }

    def format(self, form: Any, where: str, ends: list[str], depth: int) -> str:
        """A format and one of its ends."""
        kind = self._checked(form, where, depth)
        if kind in self._kinds:
            return self._kinds[kind](form, where, ends, depth + 1)
        return f"{self._plain(kind, form, where, depth + 1)} {self._either(ends)}"

    def _checked(self, form: Any, where: str, depth: int) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if depth > MAX_DEPTH:
            raise self.parts.refusal(f"{where} is nested more than {MAX_DEPTH} deep")
        if not isinstance(kind, str) or kind not in _KEYS:
            raise self.parts.refusal(
                f"{where}: the type {kind!r:.60} is not supported; supported are {', '.join(_KEYS)}"
            )
        keys = _KEYS[kind]
        for name in form:
            if name != "type" and name not in keys:
                raise self.parts.refusal(f"{where}/{name} is not supported in {kind}")
        for name, types in keys.items():
            value = form.get(name)
            if name not in form and name in _OPTIONAL:
                continue
            if not isinstance(value, types) or (types is int and isinstance(value, bool)):
                raise self.parts.refusal(f"{where}/{name} is not what {kind} needs: {value!r:.60}")
            listed = name in ("excludes", "triggers") or (name == "end" and isinstance(value, list))
            strings: Any = value if listed else []
            if not all(isinstance(one, str) and (one or name == "end") for one in strings):
                raise self.parts.refusal(f"{where}/{name} must be a list of strings that are not empty")
        return kind

    def _plain(self, kind: str, form: dict[str, Any], where: str, depth: int) -> str:
        if kind == "const_string":
            return self.parts.literal(form["value"])
        if kind == "json_schema":
            if form.get("style", "json") != "json":
                raise self.parts.refusal(f"{where}/style: only json is supported, got {form['style']!r:.60}")
            return self.parts.schema(json.dumps(form["json_schema"]), f"{where}/json_schema")
        if kind == "grammar":
            if form.get("syntax", "ebnf") != "ebnf":
                raise self.parts.refusal(
                    f"{where}/syntax: only ebnf is supported, got {form['syntax']!r:.60}"
                )
            return ebnf.rules(form["grammar"], self.parts, f"{where}/grammar")
        if kind == "tags_with_separator":
            return self._separated(form, where, depth)
        low, high = {"optional": (0, 1), "star": (0, -1), "plus": (1, -1)}.get(kind) or (
            form["min"],
            form["max"],
        )
        if not 0 <= low <= MAX_REPEATS or not -1 <= high <= MAX_REPEATS or 0 <= high < low:
            raise self.parts.refusal(
                f"{where}: min and max must be from 0 to {MAX_REPEATS}, in order (max -1: any)"
            )
        content = self.format(form["content"], f"{where}/content", [], depth)
        return repeated(self.parts.rules.rule(content), low, None if high < 0 else high) or '""'

    def _either(self, texts: list[str]) -> str:
        options = [self.parts.literal(text) for text in texts]
        return "" if not options else options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _any_text(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        return self._text(form.get("excludes", []), ends)

    def _text(self, without: list[str], ends: list[str]) -> str:
        if not ends or "" in ends:
            return self.parts.free(without)
        return f"({' | '.join(self.parts.until(end, without) for end in ends)})"

    def _regex(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        pattern = self.parts.pattern(form["pattern"], f"{where}/pattern")
        if not ends or "" in ends:
            return pattern
        return f"({' | '.join(self.parts.until(end, before=pattern) for end in ends)})"

    def _sequence(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        elements, found, index = list(form["elements"]), [], 0
        while index < len(elements):
            place, following = f"{where}/elements/{index}", index + 1
            kind = self._checked(elements[index], place, depth)
            last = following == len(elements)
            if kind in _TEXTS and not last:
                begin = self._beginning(elements[following], f"{where}/elements/{following}", depth)
                found.append(self.format(elements[index], place, [begin], depth))
                elements[following] = _without_beginning(elements[following])
            else:
                found.append(self.format(elements[index], place, ends if last else [], depth))
            index = following
        return " ".join(found) or self._either(ends) or '""'

    def _beginning(self, form: Any, where: str, depth: int) -> str:
        kind = self._checked(form, where, depth)
        begin: str = form.get("begin" if kind == "tag" else "value", "")
        if not begin:
            raise self.parts.refusal(f"{where}: text must be followed by a tag or a const_string")
        return begin

    def _or(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        if not form["elements"]:
            raise self.parts.refusal(f"{where}/elements must not be empty")
        options = [
            self.format(element, f"{where}/elements/{index}", ends, depth)
            for index, element in enumerate(form["elements"])
        ]
        return self.parts.rules.rule(" | ".join(options))

    def _tag(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        return f"{self.parts.literal(form['begin'])} {self._inside(form, where, ends, depth)}"

    def _inside(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        """A tag from behind its beginning, and one of the ends."""
        closing = [form["end"]] if isinstance(form["end"], str) else form["end"]
        if closing in ([], [""]):
            return self.format(form["content"], f"{where}/content", ends, depth)
        return f"{self.format(form['content'], f'{where}/content', closing, depth)} {self._either(ends)}"

    def _tags(self, form: dict[str, Any], where: str, depth: int) -> list[dict[str, Any]]:
        tags: list[dict[str, Any]] = form["tags"]
        for index, tag in enumerate(tags):
            if self._checked(tag, f"{where}/tags/{index}", depth) != "tag":
                raise self.parts.refusal(f"{where}/tags/{index} must be a tag")
        if not tags:
            raise self.parts.refusal(f"{where}/tags must not be empty")
        return tags

    def _triggered(self, form: dict[str, Any], where: str, ends: list[str], depth: int) -> str:
        tags, without = self._tags(form, where, depth), form.get("excludes", [])
        behind: dict[str, list[str]] = {trigger: [] for trigger in form["triggers"]}
        for index, tag in enumerate(tags):
            place = f"{where}/tags/{index}"
            triggers = [trigger for trigger in behind if tag["begin"].startswith(trigger)]
            if len(triggers) != 1:
                raise self.parts.refusal(
                    f"{place}/begin must begin with one trigger, and has {len(triggers)}"
                )
            rest = {**tag, "begin": tag["begin"][len(triggers[0]) :]}
            behind[triggers[0]].append(self._tag(rest, place, [], depth))
        calls = [
            f"{self.parts.until(trigger, without)} {self.parts.rules.rule(' | '.join(rests))}"
            for trigger, rests in behind.items()
            if rests
        ]
        call = self.parts.rules.rule(" | ".join(calls))
        text = self._text([*without, *behind], ends)
        once = form.get("stop_after_first", False)
        if not form.get("at_least_one", False):
            return f"({call} {self._either(ends)} | {text})" if once else f"{call}* {text}"
        options = [self._tag(tag, f"{where}/tags/{index}", [], depth) for index, tag in enumerate(tags)]
        first = self.parts.rules.rule(" | ".join(options))
        return f"{first} {self._either(ends)}" if once else f"{first} {call}* {text}"

    def _separated(self, form: dict[str, Any], where: str, depth: int) -> str:
        options = [
            self._tag(tag, f"{where}/tags/{index}", [], depth)
            for index, tag in enumerate(self._tags(form, where, depth))
        ]
        tag = self.parts.rules.rule(" | ".join(options))
        several = tag
        if not form.get("stop_after_first", False):
            several = f"{tag} ({self.parts.literal(form['separator'])} {tag})*"
        return several if form.get("at_least_one", False) else f"({several})?"


def _without_beginning(form: dict[str, Any]) -> dict[str, Any]:
    return {**form, ("begin" if form["type"] == "tag" else "value"): ""}
