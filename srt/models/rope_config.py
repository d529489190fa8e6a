"""The position encoding that a Hugging Face config asks for. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sapwood.srt.errors import ModelError
from sapwood.srt.models.spec import MAX_LENGTH, Rope, integer, number

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
FULL, SLIDING = "full_attention", "sliding_attention"
"""The layer types under which a config may give a position encoding of each."""


def rope_of(config: Mapping[str, Any], rotary: int) -> Rope:
    """The encoding of the layers that see all, in the old spelling (`rope_theta`, `rope_scaling`) or the new
    one (`rope_parameters`, for each layer type or for all); `rotary` channels of a head turn.

    Raises ModelError naming the kind or the key that is not supported.
    """
    given = parameters(config)
    if FULL in given or SLIDING in given:
        given = given.get(FULL) or {}
    return _rope(given, config, rotary)


def local_rope_of(config: Mapping[str, Any], rotary: int) -> Rope:
    """The encoding of the layers with a window: their own, else plain with `rope_local_base_freq`."""
    given = parameters(config).get(SLIDING) or {}
    theta = number(config, "rope_local_base_freq", 10000.0)
    return _rope({"rope_theta": theta, **given}, config, rotary)


def parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says of its position encoding beside `rope_theta`; ModelError if it is no object."""
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if given is not None and not isinstance(given, Mapping):
            raise ModelError(f"the model's config has {key} = {given!r}; it must be an object")
        if given:
            return given
    return {}


def kind_of(given: Mapping[str, Any]) -> str:
    """The kind of encoding that `rope_scaling` or `rope_parameters` names, by its present name."""
    kind = given.get("rope_type") or given.get("type") or "default"
    # Phi-3's first configs say "su" or "yarn" for what is "longrope" now.
    if kind == "su" or (kind == "yarn" and given.get("short_factor")):
        return "longrope"
    return str(kind)


def rotary_of(config: Mapping[str, Any], head_dim: int) -> int:
    """How many channels of a head turn: all, or the share that `partial_rotary_factor` says."""
    given = parameters(config).get("partial_rotary_factor")
    share = given if given is not None else config.get("partial_rotary_factor")
    share = number({"partial_rotary_factor": share}, "partial_rotary_factor", 1.0)
    # As Hugging Face cuts it, but a share that is a quotient (30 / 88) gives its channels back.
    rotary = int(round(head_dim * share, 6))
    if share > 1 or rotary < 2 or rotary % 2:
        raise ModelError(
            f"the model's config has partial_rotary_factor = {share}, which turns {rotary} of {head_dim} "
            f"channels; it must be an even number from 2 to {head_dim}"
        )
    return rotary


def _rope(given: Mapping[str, Any], config: Mapping[str, Any], rotary: int) -> Rope:
    kind = kind_of(given)
    theta = number(given if given.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope("linear", theta, factor=number(given, "factor"))
    if kind == "dynamic":
        length = integer(config, "max_position_embeddings", high=MAX_LENGTH)
        if rotary <= 2:
            raise ModelError("the model's config has rope_type 'dynamic', which needs 4 or more channels")
        return Rope("dynamic", theta, factor=_factor(given), original_length=length)
    if kind == "llama3":
        low, high = number(given, "low_freq_factor"), number(given, "high_freq_factor")
        if high <= low:
            raise ModelError(
                f"the model's config has high_freq_factor {high}, not above low_freq_factor {low}"
            )
        return Rope("llama3", theta, number(given, "factor"), low, high, _original_length(given, config))
    if kind == "yarn":
        return _yarn(given, config, theta)
    if kind == "longrope":
        return _longrope(given, config, theta, rotary)
    if kind == "factors":
        return Rope("factors", theta, factors=_factors(given, "factors", rotary))
    raise ModelError(f"the model's config has rope_type {kind!r}; supported: {', '.join(KINDS)}")


def _yarn(given: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> Rope:
    """YaRN (Peng et al. 2023), with the attention factor as Hugging Face finds it."""
    length = _original_length(given, config)
    factor = number(given, "factor", _stretch(config, length))
    scaling = given.get("attention_factor")
    if scaling is None:
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        if mscale and all_dim:
            scaling = _mscale(factor, number(given, "mscale")) / _mscale(
                factor, number(given, "mscale_all_dim")
            )
        else:
            scaling = _mscale(factor, 1.0)
    if theta <= 1:
        raise ModelError(f"the model's config has rope_theta = {theta}; 'yarn' needs it above 1")
    truncate = given.get("truncate")
    return Rope(
        "yarn",
        theta,
        factor=factor,
        original_length=length,
        beta_fast=number({"beta_fast": given.get("beta_fast") or 32}, "beta_fast"),
        beta_slow=number({"beta_slow": given.get("beta_slow") or 1}, "beta_slow"),
        truncate=True if truncate is None else bool(truncate),
        scaling=number({"attention_factor": scaling}, "attention_factor"),
    )


def _longrope(given: Mapping[str, Any], config: Mapping[str, Any], theta: float, rotary: int) -> Rope:
    """LongRoPE (Ding et al. 2024), as Phi-3 uses it."""
    length = _original_length(given, config)
    factor = number(given, "factor", _stretch(config, length))
    scaling = given.get("attention_factor")
    if scaling is None:
        if length < 2:
            raise ModelError(
                f"the model's config has original_max_position_embeddings = {length}; it must be 2 or more"
            )
        scaling = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return Rope(
        "longrope",
        theta,
        original_length=length,
        factors=_factors(given, "short_factor", rotary),
        long_factors=_factors(given, "long_factor", rotary),
        scaling=number({"attention_factor": scaling}, "attention_factor"),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factor(given: Mapping[str, Any]) -> float:
    factor = number(given, "factor")
    if factor < 1:
        raise ModelError(
            f"the model's config has factor = {factor} for its rotary encoding; it must be 1 or more"
        )
    return factor


def _original_length(given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Hugging Face's order: the config itself, its rotary parameters, then the longest context."""
    key = "original_max_position_embeddings"
    found = (config.get(key), given.get(key), config.get("max_position_embeddings"))
    return integer({key: next((v for v in found if v is not None), None)}, key, high=MAX_LENGTH)


def _stretch(config: Mapping[str, Any], original: int) -> float:
    return integer(config, "max_position_embeddings", original, high=MAX_LENGTH) / original


def _factors(given: Mapping[str, Any], key: str, rotary: int) -> tuple[float, ...]:
    values = given.get(key)
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else []
    numbers = [v for v in listed if isinstance(v, (int, float)) and not isinstance(v, bool)]
    count = rotary // 2
    if len(numbers) != count or not all(0 < f < math.inf for f in numbers):
        raise ModelError(
            f"rope factors must be {count} positive numbers, got {len(numbers)}: {key} = {values!r}"
        )
    return tuple(float(f) for f in numbers)
