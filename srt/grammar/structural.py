"""Structural tags: free text, and in it tags whose contents are constrained; SGLang's form and xgrammar's.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}

Text of any kind ends at the first of the strings that may follow it, so these must be known. Where two parts
may begin alike the longest match decides, as in all grammars here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sapwood.srt.grammar import ebnf
from sapwood.srt.grammar.automaton import ends_itself
from sapwood.srt.grammar.limits import MAX_DEPTH, MAX_REPEAT, Budget, TooMuch
from sapwood.srt.grammar.parts import Parts
from sapwood.srt.grammar.rules import repeated

Ends = tuple[str, ...] | None
"""The strings of which one follows; an empty tuple: the end of the output; None: something else."""
Write = Callable[[dict[str, Any], str, Ends, int], str]

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
_COUNTS = {"optional": (0, 1), "star": (0, -1), "plus": (1, -1)}
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
        return _Writer(parts).format(tag["format"], "/format", (), 0)
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
    return _Writer(parts).format({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "", (), 0)


def _decoded(text: str, parts: Parts, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise parts.refusal(f"{where} is not valid JSON: {error}") from None


class _Writer:
    """Writes formats, each with one of its `Ends`. Text whose ends are not known is refused."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._closed: dict[tuple[str, str], bool] = {}
        self._kinds: dict[str, Write] = {
            "any_text": self._any_text,
            "regex": self._regex,
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "repeat": self._repeated,
        }

    def format(self, form: Any, where: str, ends: Ends, depth: int) -> str:
        """A format and one of its ends."""
        kind = self._checked(form, where, depth)
        if kind in self._kinds:
            return self._kinds[kind](form, where, ends, depth + 1)
        return f"{self._plain(kind, form, where, ends, depth + 1)} {self._either(ends)}"

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

    def _open(self, form: Any, where: str, depth: int) -> bool:
        """Whether a format may end in text that could go on: what follows must be known then."""
        kind = self._checked(form, where, depth)
        if kind in ("regex", "grammar"):
            return not self._ends_itself(kind, form, where)
        if kind == "sequence":
            last = len(form["elements"]) - 1
            return last >= 0 and self._open(form["elements"][last], f"{where}/elements/{last}", depth + 1)
        if kind == "or":
            places = [(element, f"{where}/elements/{i}") for i, element in enumerate(form["elements"])]
            return any(self._open(element, place, depth + 1) for element, place in places)
        if kind == "tag":
            return not all(_closing(form)) and self._open(form["content"], f"{where}/content", depth + 1)
        if kind == "triggered_tags":
            return not (form.get("at_least_one", False) and form.get("stop_after_first", False))
        if kind in ("optional", "repeat") and form.get("max", 1) == 1:
            return self._open(form["content"], f"{where}/content", depth + 1)
        return kind == "any_text"

    def _ends_itself(self, kind: str, form: dict[str, Any], where: str) -> bool:
        key = kind, form[kind if kind == "grammar" else "pattern"]
        if key not in self._closed:
            if kind == "grammar":
                node = ebnf.pattern(key[1], self.parts, f"{where}/grammar")
            else:
                node = self.parts.tree(key[1], f"{where}/pattern")
            try:
                self._closed[key] = node is not None and ends_itself(node, Budget())
            except TooMuch:
                self._closed[key] = False
        return self._closed[key]

    def _known(self, ends: Ends, where: str) -> tuple[str, ...]:
        """The ends of text. Raises BadRequest if they are not known."""
        if ends is None:
            raise self.parts.refusal(
                f"{where}: text must be followed by a tag or a const_string, or by nothing"
            )
        return ends

    def _plain(self, kind: str, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        if kind == "const_string":
            return self.parts.literal(form["value"])
        if kind == "json_schema":
            if form.get("style", "json") != "json":
                raise self.parts.refusal(f"{where}/style: only json is supported, got {form['style']!r:.60}")
            return self.parts.schema(json.dumps(form["json_schema"]), f"{where}/json_schema")
        return self._separated(form, where, ends, depth)

    def _either(self, texts: Ends) -> str:
        options = [self.parts.literal(text) for text in texts or ()]
        return "" if not options else options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _any_text(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        return self.parts.text(self._known(ends, where), form.get("excludes", []))

    def _regex(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        pattern = self.parts.pattern(form["pattern"], f"{where}/pattern")
        if ends is None and self._ends_itself("regex", form, where):
            return pattern
        return self.parts.text(self._known(ends, where), before=pattern)

    def _grammar(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        if form.get("syntax", "ebnf") != "ebnf":
            raise self.parts.refusal(f"{where}/syntax: only ebnf is supported, got {form['syntax']!r:.60}")
        if ends is None and self._ends_itself("grammar", form, where):
            ends = ()
        return ebnf.rules(form["grammar"], self.parts, f"{where}/grammar", self._known(ends, where))

    def _repeated(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        low, high = _COUNTS.get(form["type"]) or (form["min"], form["max"])
        if not 0 <= low <= MAX_REPEAT or not -1 <= high <= MAX_REPEAT or 0 <= high < low:
            raise self.parts.refusal(
                f"{where}: min and max must be from 0 to {MAX_REPEAT}, in order (max -1: any)"
            )
        # More than one of them are followed by each other too.
        content = self.format(form["content"], f"{where}/content", ends if high == 1 else None, depth)
        behind = self._either(ends)
        if high == 1:
            return content if low else f"({content} | {behind})" if behind else f"({content})?"
        several = repeated(self.parts.rules.rule(content), low, None if high < 0 else high)
        return f"{several} {behind}" if several else behind or '""'

    def _sequence(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        elements, found = list(form["elements"]), []
        for index, element in enumerate(elements):
            place, following = f"{where}/elements/{index}", index + 1
            behind = ends
            if following < len(elements):
                behind = None
                if self._open(element, place, depth):
                    behind = (self._beginning(elements[following], f"{where}/elements/{following}", depth),)
                    elements[following] = _without_beginning(elements[following])
            found.append(self.format(element, place, behind, depth))
        return " ".join(found) or self._either(ends) or '""'

    def _beginning(self, form: Any, where: str, depth: int) -> str:
        kind = self._checked(form, where, depth)
        begin: str = form.get("begin" if kind == "tag" else "value", "")
        if not begin:
            raise self.parts.refusal(f"{where}: text must be followed by a tag or a const_string")
        return begin

    def _or(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        if not form["elements"]:
            raise self.parts.refusal(f"{where}/elements must not be empty")
        options = [
            self.format(element, f"{where}/elements/{index}", ends, depth)
            for index, element in enumerate(form["elements"])
        ]
        return self.parts.rules.rule(" | ".join(options))

    def _tag(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        """A tag from its beginning, and one of the ends."""
        begin, closing, place = self.parts.literal(form["begin"]), _closing(form), f"{where}/content"
        if closing == ("",):
            return f"{begin} {self.format(form['content'], place, ends, depth)}"
        if all(closing):
            content = self.format(form["content"], place, closing, depth)
        else:
            # An end that may be left out: text goes on to the end of the output.
            content = self.format(form["content"], place, () if ends == () else None, depth)
            content = f"{content} {self._either(closing)}"
        return f"{begin} {content} {self._either(ends)}"

    def _tags(self, form: dict[str, Any], where: str, depth: int) -> list[dict[str, Any]]:
        tags: list[dict[str, Any]] = form["tags"]
        for index, tag in enumerate(tags):
            if self._checked(tag, f"{where}/tags/{index}", depth) != "tag":
                raise self.parts.refusal(f"{where}/tags/{index} must be a tag")
        if not tags:
            raise self.parts.refusal(f"{where}/tags must not be empty")
        return tags

    def _triggered(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        tags, without = self._tags(form, where, depth), form.get("excludes", [])
        once, some = form.get("stop_after_first", False), form.get("at_least_one", False)
        behind_tag: Ends = () if once and ends == () else None
        behind: dict[str, list[str]] = {trigger: [] for trigger in form["triggers"]}
        for index, tag in enumerate(tags):
            place = f"{where}/tags/{index}"
            triggers = [trigger for trigger in behind if tag["begin"].startswith(trigger)]
            if len(triggers) != 1:
                raise self.parts.refusal(
                    f"{place}/begin must begin with one trigger, and has {len(triggers)}"
                )
            rest = {**tag, "begin": tag["begin"][len(triggers[0]) :]}
            behind[triggers[0]].append(self._tag(rest, place, behind_tag, depth))
        calls = []
        for trigger, rests in behind.items():
            if not rests:
                raise self.parts.refusal(f"{where}/triggers: no tag begins with {trigger!r:.60}")
            calls.append(f"{self.parts.until(trigger, without)} {self.parts.rules.rule(' | '.join(rests))}")
        call, first = self.parts.rules.rule(" | ".join(calls)), ""
        if some:
            whole = [self._tag(tag, f"{where}/tags/{i}", behind_tag, depth) for i, tag in enumerate(tags)]
            first = self.parts.rules.rule(" | ".join(whole))
            if once:
                return f"{first} {self._either(ends)}"
        text = self.parts.text(self._known(ends, where), [*without, *behind])
        return f"({call} {self._either(ends)} | {text})" if once else f"{first} {call}* {text}"

    def _separated(self, form: dict[str, Any], where: str, ends: Ends, depth: int) -> str:
        once = form.get("stop_after_first", False)
        options = [
            self._tag(tag, f"{where}/tags/{index}", () if once and ends == () else None, depth)
            for index, tag in enumerate(self._tags(form, where, depth))
        ]
        tag = self.parts.rules.rule(" | ".join(options))
        several = tag if once else f"{tag} ({self.parts.literal(form['separator'])} {tag})*"
        return several if form.get("at_least_one", False) else f"({several})?"


def _closing(tag: dict[str, Any]) -> tuple[str, ...]:
    """The ends of a tag; an empty one: it needs none."""
    ends = tag["end"]
    return (ends,) if isinstance(ends, str) else tuple(ends) or ("",)


def _without_beginning(form: dict[str, Any]) -> dict[str, Any]:
    return {**form, ("begin" if form["type"] == "tag" else "value"): ""}
