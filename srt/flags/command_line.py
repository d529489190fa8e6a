"""From a command line, with our flags and those of SGLang and vLLM, to the fields of our configuration."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sapwood.srt import config
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags.entry import ANY, Entry
from sapwood.srt.flags.keywords import Setting, merge, settings_of
from sapwood.srt.flags.table import by_name
from sapwood.srt.flags.values import parse

_SWITCHED = {"true": True, "false": False}


class Read(NamedTuple):
    """What a command line says: the fields that it sets, the arguments that are the command's own, and for
    each flag that was accepted without setting anything why that is so anyway."""

    values: dict[str, Any]
    rest: list[str]
    notes: list[str]


def add_flags(parser: argparse._ActionsContainer, but: Collection[str] = ()) -> None:
    """Give `parser` one flag for each field, for its help: `read` reads them. Those in `but` are
    the command's own."""
    for name, kind, flag in config.fields():
        if config.option(name) in but:
            continue
        help_text = (
            flag.help
            if config.default(name) in (None, False)
            else f"{flag.help} (default: {config.default(name)})"
        )
        if kind is bool:
            parser.add_argument(
                config.option(name), dest=name, action=argparse.BooleanOptionalAction, help=help_text
            )
        else:
            parser.add_argument(
                config.option(name),
                dest=name,
                choices=config.choices(kind) or None,
                help=help_text,
                metavar=None if config.choices(kind) else name.rpartition("_")[2].upper(),
            )


def read(arguments: Sequence[str], own: Collection[str] = ()) -> Read:
    """Take the flags of the configuration out of `arguments`, but those in `own`, which the command defines.

    Raises ConfigError naming the flag for a wrong value, for what is refused, and for two flags that
    contradict each other. Flags that nobody knows stay in `rest`.
    """
    settings: list[Setting] = []
    rest: list[str] = []
    notes: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += [word, *left]
            break
        flag = _flag(word)
        if flag is None or flag.written in own:
            rest.append(word)
            continue
        value = flag.value if flag.value is not None else _value(flag, left)
        if isinstance(value, list) and flag.field and not _placed(rest, settings):
            # Guessing could make a key of a model's name, or print a key as one.
            raise ConfigError(
                f"{flag.written} is followed by {len(value)} words: if not all are its own, put the others "
                f"before it or write {flag.written}=VALUE; if they are, put the model before it",
                param=flag.field,
            )
        if found := _settings(flag, value):
            settings += found
        elif flag.entry is not None:
            notes.append(
                f"{flag.entry.shown(flag.written, value)}: {flag.entry.reason or 'asks for nothing'}"
            )
    return Read({name: setting.value for name, setting in merge(settings).items()}, rest, notes)


class _Flag(NamedTuple):
    """A flag that is known: `entry` if SGLang or vLLM have it, `field` if it is ours alone."""

    written: str
    entry: Entry | None
    field: str
    switch: bool
    value: Any


def _flag(word: str) -> _Flag | None:
    if not word.startswith("-") or word == "-":
        return None
    written, equals, text = word.partition("=")
    base, dot, _key = written.partition(".")
    name = base[2:].replace("-", "_") if base.startswith("--") else base
    value: Any = text if equals else None
    found = _named(written, name, value)
    if found is None and name.startswith("no_") and not equals:
        found = _named(written, name[3:], False)
        return found if found is not None and found.switch else None
    # `--compilation-config.mode 3` sets one key of what is a JSON object elsewhere.
    return None if dot and (found is None or found.entry is None) else found


def _named(written: str, name: str, value: Any) -> _Flag | None:
    entry = by_name().get(name)
    if entry is not None:
        return _Flag(written, entry, entry.target, entry.switch, value)
    for field, kind, _help in config.fields():
        if field == name:
            return _Flag(written, None, field, kind is bool, value)
    return None


def _value(flag: _Flag, left: list[str]) -> Any:
    """The value in the arguments that follow, taken out of them."""
    if flag.switch:
        return _SWITCHED[left.pop(0).lower()] if left and left[0].lower() in _SWITCHED else True
    listed = flag.entry is not None and flag.entry.listed
    if listed and not flag.field:
        return _words(left)
    if not left or left[0].startswith("--"):
        if flag.entry is not None and flag.entry.action == "refused" and ANY not in flag.entry.accepts:
            return ""
        raise ConfigError(f"{flag.written} needs a value", param=flag.field or None)
    words = [left.pop(0), *(_words(left) if listed else ())]
    return words if len(words) > 1 else words[0]


def _placed(rest: list[str], settings: list[Setting]) -> bool:
    """Whether the model, or what else a command takes without a flag, has been given."""
    return any(not word.startswith("-") for word in rest) or any(s.field == "model_path" for s in settings)


def _words(left: list[str]) -> list[str]:
    """The arguments up to the next flag, taken out of those that follow."""
    words = []
    while left and not left[0].startswith("-"):
        words.append(left.pop(0))
    return words


def _settings(flag: _Flag, value: Any) -> list[Setting]:
    """What the flag sets. Nothing: it asks for what happens anyway, or, with the text None, for nothing."""
    written = flag.written
    if value == "None" and flag.entry is not None:
        return []
    if flag.switch:
        value = _SWITCHED.get(value.lower(), value) if isinstance(value, str) else value
        written = "--" + written.removeprefix("--no-") if value is False else written
    if flag.entry is not None:
        found = settings_of(flag.entry, written, value)
    else:
        found = [Setting(flag.field, value, flag.written if flag.switch else f"{written} {value}")]
    return [
        setting._replace(value=parse(setting.field, setting.value, written))
        if isinstance(setting.value, str)
        else setting
        for setting in found
    ]
