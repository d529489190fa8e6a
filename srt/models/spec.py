"""What a dense decoder is made of: sizes and switches, read from a Hugging Face config without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.srt.errors import ModelError

MAX_LAYERS = 1024
MAX_SIZE = 2**24

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position encoding of whole heads, halves rotated against each other.

    `kind`: "default", "linear" (positions divided by `factor`), "llama3" (long wavelengths stretched), or
    "factors" (each frequency divided by its own entry of `factors`, as a GGUF file stores it).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One pre-norm decoder with SwiGLU: every size and switch that tells one such model from another.

    `kv_heads` divides `q_heads` (grouped-query attention). `tied`: the output head is the embedding.
    `qk_norm`: an RMS norm over each head of q and k before the rotation.
    """

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_width(self) -> int:
        """Columns of the joint projection: q heads, then k heads, then v heads."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return 1.0 / math.sqrt(self.head_dim)


def layer(index: int, name: str) -> str:
    """The full name of a tensor of one layer."""
    return f"model.layers.{index}.{name}"


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this spec must have, by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab, spec.hidden)}
    for index in range(spec.layers):
        shapes |= {layer(index, name): shape for name, shape in _layer_shapes(spec).items()}
    shapes[FINAL_NORM] = (spec.hidden,)
    if not spec.tied:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    return shapes


def _layer_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    q, kv = spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden, spec.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    if spec.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if spec.mlp_bias:
        shapes |= {
            "mlp.gate_proj.bias": (inner,),
            "mlp.up_proj.bias": (inner,),
            "mlp.down_proj.bias": (hidden,),
        }
    if spec.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (spec.head_dim,),
            "self_attn.k_norm.weight": (spec.head_dim,),
        }
    return shapes


def integer(config: Mapping[str, Any], key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
    """A positive integer of the config; ModelError names the key, the value and the limit."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ModelError(
            f"the model's config has {key} = {value!r}; it must be a whole number from 1 to {high}"
        )
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number of the config; ModelError names the key and the value."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"the model's config has {key} = {value!r}; it must be a positive number")
    return float(value)


def rope_of(config: Mapping[str, Any], head_dim: int) -> Rope:
    """The position encoding that a config asks for, in the old spelling (`rope_theta`, `rope_scaling`) or the
    new one (`rope_parameters`); ModelError names a kind that is not supported."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"the model's config has rope_parameters = {given!r}; it must be an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = number(given if given.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"the model's config has partial_rotary_factor = {partial!r}; only 1.0 is supported")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope("linear", theta, factor=number(given, "factor"))
    if kind == "llama3":
        low, high = number(given, "low_freq_factor"), number(given, "high_freq_factor")
        if high <= low:
            raise ModelError(
                f"the model's config has high_freq_factor {high}, not above low_freq_factor {low}"
            )
        length = given.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        length = integer({"original_max_position_embeddings": length}, "original_max_position_embeddings")
        return Rope("llama3", theta, number(given, "factor"), low, high, length)
    if kind == "factors":
        factors = tuple(float(f) for f in given["factors"])
        if len(factors) != head_dim // 2 or not all(0 < f < math.inf for f in factors):
            raise ModelError(
                f"rope factors must be {head_dim // 2} positive numbers, got {len(factors)}: {factors}"
            )
        return Rope("factors", theta, factors=factors)
    raise ModelError(f"the model's config has rope_type {kind!r}; supported: default, linear, llama3")
