"""How far each layer sees, as Hugging Face reads it from a config. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sapwood.srt.errors import ModelError
from sapwood.srt.models.rope_config import FULL, SLIDING
from sapwood.srt.models.spec import MAX_LENGTH, integer

Rule = Literal["none", "all layers", "switched", "pattern"]
"""Which layers have the window `sliding_window`: none; all, unless it is null; if `use_sliding_window`, those
of `layer_types`, else those from `max_window_layers` on; those of `layer_types`, else all but every
`sliding_window_pattern`-th."""


def windows_of(config: Mapping[str, Any], rule: Rule, layers: int) -> tuple[int, ...]:
    """The window of each layer in positions, 0 for all; empty if no layer has one.

    Raises ModelError naming the key that says something else.
    """
    if rule == "none" or (rule == "all layers" and config.get("sliding_window") is None):
        return ()
    if rule == "switched" and (
        not switch(config, "use_sliding_window") or config.get("sliding_window") is None
    ):
        return ()
    local = [True] * layers if rule == "all layers" else _local_layers(config, rule, layers)
    if not any(local):
        return ()
    window = integer(config, "sliding_window", high=MAX_LENGTH)
    return tuple(window if one else 0 for one in local)


def switch(config: Mapping[str, Any], value: bool | str) -> bool:
    """A switch that is fixed, or the config key that holds it; ModelError names a key that is no boolean."""
    if isinstance(value, bool):
        return value
    given = config.get(value)
    if given is None:
        return False
    if not isinstance(given, bool):
        raise ModelError(f"the model's config has {value} = {given!r}; it must be true or false")
    return given


def _local_layers(config: Mapping[str, Any], rule: Rule, layers: int) -> list[bool]:
    types = config.get("layer_types")
    if types is not None:
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(t not in (FULL, SLIDING) for t in types)
        ):
            raise ModelError(
                f"the model's config has layer_types = {types!r}; it must be a list of {layers} of "
                f"{FULL!r} and {SLIDING!r}"
            )
        return [t == SLIDING for t in types]
    if rule == "switched":
        first = config.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ModelError(
                f"the model's config has max_window_layers = {first!r}; it must be a whole number from 0"
            )
        return [index >= first for index in range(layers)]
    pattern = integer(config, "sliding_window_pattern")
    return [(index + 1) % pattern != 0 for index in range(layers)]
