"""From the keywords of SGLang and vLLM to the fields of our configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from sapwood.srt import config
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags.entry import ANY, FALSE, TRUE, Entry, text_of
from sapwood.srt.flags.table import by_name, suggestions

logger = logging.getLogger("sapwood.flags")


class Setting(NamedTuple):
    """One field's value and how it was asked for. With `but` the field may have any value but that one."""

    field: str
    value: Any
    written: str
    but: bool = False


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of our Config that the keywords `values` ask for, ours and foreign (`tp_size`, ...) alike.

    What asks for what happens anyway, or is None, is left out. Raises ConfigError naming the keyword for what
    is refused, for two keywords that contradict each other, and for a name that nobody knows.
    """
    settings: list[Setting] = []
    for name, value in values.items():
        entry = by_name().get(name)
        if entry is not None:
            if value is None:
                continue
            if found := settings_of(entry, name, value):
                settings += found
            else:
                logger.debug("%s: %s", entry.shown(name, value), entry.reason)
        elif name in config.Config.__struct_fields__:
            settings.append(Setting(name, value, f"{name} {value}"))
        else:
            close = [
                flag.lstrip("-").replace("-", "_") for flag in suggestions("--" + name.replace("_", "-"))
            ]
            hint = f"; did you mean {' or '.join(close)}?" if close else "; see sapwood serve --help"
            raise ConfigError(f"unknown option {name!r}{hint}", param=name)
    return {name: setting.value for name, setting in merge(settings).items()}


def settings_of(entry: Entry, written: str, value: Any) -> list[Setting]:
    """What `entry` with `value` sets; nothing if it asks for what happens anyway. Raises ConfigError."""
    setting = _setting_of(entry, written, value)
    if setting is None:
        return []
    second = entry.also.get(text_of(value))
    return [setting] if second is None else [setting, Setting(*second, setting.written)]


def _setting_of(entry: Entry, written: str, value: Any) -> Setting | None:
    text = text_of(value)
    if entry.switch and text not in (TRUE, FALSE):
        raise ConfigError(f"{written} is on or off (true or false), got {value!r}", param=entry.name)
    if not entry.target:
        if not entry.accepted(value):
            raise ConfigError(entry.refusal(written, value), param=entry.name)
        return None
    if text in entry.wrong or (ANY in entry.wrong and text not in entry.becomes):
        raise ConfigError(entry.refusal(written, value), param=entry.name)
    shown = entry.shown(written, value)
    if text in entry.elsewhere:
        return Setting(*entry.elsewhere[text], shown)
    if text not in entry.becomes:
        return Setting(entry.target, _only_one(entry, written, value), shown)
    if entry.becomes[text] is None:
        (contrary,) = (other for other in entry.becomes.values() if other is not None)
        return Setting(entry.target, contrary, shown, but=True)
    return Setting(entry.target, entry.becomes[text], shown)


def _only_one(entry: Entry, written: str, value: Any) -> Any:
    """A list of one name or key counts as that one; several keys are separated by commas."""
    if not isinstance(value, (list, tuple)):
        return value
    if entry.target.endswith("api_key"):
        return ",".join(str(key) for key in value)
    if len(value) == 1:
        return value[0]
    raise ConfigError(f"{written} takes one value, got {len(value)}", param=entry.name)


def merge(settings: list[Setting]) -> dict[str, Setting]:
    """One setting for each field. Raises ConfigError if two contradict each other."""
    merged: dict[str, Setting] = {}
    for setting in sorted(settings, key=lambda s: s.but):
        before = merged.get(setting.field)
        if setting.but:
            if before is not None and before.value == setting.value:
                raise _contradiction(before, setting, setting.field)
            # Set even to what it is anyway: an environment variable may say otherwise.
            merged[setting.field] = before or setting._replace(value=config.default(setting.field))
            continue
        if before is not None and before.value != setting.value:
            raise _contradiction(before, setting, setting.field)
        merged[setting.field] = setting
    return merged


def _contradiction(one: Setting, other: Setting, field: str) -> ConfigError:
    names = [one.written, other.written]
    ours = config.option(field)
    why = "" if names[0].split()[0] == names[1].split()[0] else f": both are {ours} here"
    return ConfigError(f"{names[0]} and {names[1]} contradict each other{why}", param=field)
