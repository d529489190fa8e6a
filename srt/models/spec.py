"""What a dense decoder is made of: sizes and switches, read from a Hugging Face config without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sapwood.srt.errors import ModelError

MAX_LAYERS = 1024
MAX_SIZE = 2**24
MAX_LENGTH = 2**31 - 1

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
"""After attention and after the MLP, where a model has `post_norms`."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position encoding: halves of a head's first `rotary` channels are rotated against each other.

    `kind`: "default"; "linear" (positions divided by `factor`); "llama3" (wavelengths long against
    `original_length` stretched); "yarn" (frequencies that turn less than `beta_slow` times in
    `original_length` divided by `factor`, those above `beta_fast` kept); "dynamic" (a larger base, see
    `models.rope`); "longrope" (each frequency divided by its own number, of `factors` or beyond
    `original_length` of `long_factors`); "factors" (of `factors`, as a GGUF file stores them).
    Cosines and sines are multiplied by `scaling`.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One pre-norm decoder with a gated MLP: every size and switch that tells one such model from another.

    `kv_heads` divides `q_heads` (grouped-query attention). `rotary`: the channels of a head that turn.
    `windows`: how many positions each layer's queries see, 0 for all; empty: all layers see all.
    `local_rope`: of the layers with a window, where it is not `rope`. `tied`: the head is the embedding.
    `qk_norm`: an RMS norm over each head of q and k before the rotation. `post_norms`: one more norm after
    attention and one after the MLP, before each is added. `norm_offset`: norm weights are stored less one.
    `fused`: q, k, v are one stored matrix, and gate and up another. `query_scalar`: attention scores are
    divided by its root; 0: by that of `head_dim`. `embed_scale`: what embeddings are multiplied by.
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
    rotary: int
    tied: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: bool = False
    fused: bool = False
    query_scalar: float = 0.0
    embed_scale: float = 1.0
    windows: tuple[int, ...] = ()
    local_rope: Rope | None = None

    @property
    def qkv_width(self) -> int:
        """Columns of the joint projection: q heads, then k heads, then v heads."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return 1.0 / math.sqrt(self.query_scalar or self.head_dim)

    def window(self, index: int) -> int:
        """Positions that a query of this layer sees, its own included; 0: all."""
        return self.windows[index] if self.windows else 0

    @property
    def mlp_norm(self) -> str:
        """The name of the norm before the MLP; with `post_norms` its older name is that of the one before."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"


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
        "self_attn.o_proj.weight": (hidden, q),
        f"{spec.mlp_norm}.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
    }
    joint = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gated = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    if spec.fused:
        joint, gated = {"self_attn.qkv_proj": q + 2 * kv}, {"mlp.gate_up_proj": 2 * inner}
    shapes |= {f"{name}.weight": (rows, hidden) for name, rows in (joint | gated).items()}
    biased = (joint if spec.qkv_bias else {}) | ({"self_attn.o_proj": hidden} if spec.out_bias else {})
    biased |= gated | {"mlp.down_proj": hidden} if spec.mlp_bias else {}
    shapes |= {f"{name}.bias": (rows,) for name, rows in biased.items()}
    if spec.post_norms:
        shapes |= {f"{name}.weight": (hidden,) for name in POST_NORMS}
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
