"""What a model on disk says of itself, before the command line has its say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from sapwood.srt.errors import ModelError
from sapwood.srt.params import MIN_REPETITION_PENALTY


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its files describe it; the fields are those of ModelSource. `group`: so many inputs of the
    attention's output projection are quantised together."""

    name: str
    format: Literal["safetensors", "gguf", "dummy"]
    path: Path
    files: list[Path]
    config: dict[str, Any]
    eos_ids: list[int]
    tokenizer_file: Path | None
    chat_template: str | None
    template_vars: dict[str, str]
    sampling_defaults: dict[str, float]
    group: int = 1


SAMPLING_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**62),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 100.0),
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file; ModelError if it is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ModelError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def token_ids(*places: Any) -> list[int]:
    """The union of EOS entries: each place holds None, one id, or a list of ids; order is kept."""
    found: list[int] = []
    for place in places:
        for value in place if isinstance(place, list) else [place]:
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0 and value not in found:
                found.append(value)
    return found


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """What a generation_config.json recommends for sampling; values out of range are left out.

    Nothing if it says `do_sample: false`. `top_k` 0 and -1 both mean off, as in a request.
    """
    if generation.get("do_sample") is False:
        return {}
    chosen: dict[str, float] = {}
    for name, (low, high) in SAMPLING_RANGES.items():
        value = generation.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not low <= value <= high or (name == "top_p" and value == low):
            continue
        if name != "top_k":
            chosen[name] = float(value)
        elif value == int(value):
            chosen[name] = int(value)
    return chosen


def first(values: Iterable[Any]) -> Any:
    """The first value that is not None, else None."""
    return next((v for v in values if v is not None), None)
