"""The models that can be served: one row each. Imports no torch, so that the launcher can read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sapwood.srt.errors import ModelError
from sapwood.srt.models import rope_config
from sapwood.srt.models.spec import MAX_LAYERS, MAX_LENGTH, DecoderSpec, Rope, integer, number
from sapwood.srt.models.windows import Rule, switch, windows_of


@dataclass(frozen=True, slots=True)
class Row:
    """How one architecture differs from a plain Llama. A switch is fixed, or the config key that holds it.

    `windows`: which config keys say how far a layer sees (see `models.windows`). `local_rope`: layers with a
    window have a position encoding of their own. `partial_rotary`: a head's last channels may stay unturned.
    `scaled_embedding`: embeddings are multiplied by the root of the hidden size. `query_scalar`: the config
    key whose root divides attention scores. `defaults`: Hugging Face's values for keys that may be left out.
    `refused`: keys that must be absent, null or false, since nothing here does what they ask for.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: bool = False
    fused: bool = False
    scaled_embedding: bool = False
    partial_rotary: bool = False
    local_rope: bool = False
    windows: Rule = "none"
    query_scalar: str | None = None
    activation: str = "hidden_act"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


_QWEN = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
}

ROWS: dict[str, Row] = {
    "LlamaForCausalLM": Row(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Row(
        windows="all layers", defaults={"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "Qwen2ForCausalLM": Row(qkv_bias=True, windows="switched", defaults=_QWEN),
    "Qwen3ForCausalLM": Row(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        windows="switched",
        defaults={**_QWEN, "head_dim": 128},
    ),
    "Phi3ForCausalLM": Row(
        fused=True, partial_rotary=True, windows="all layers", defaults={"rms_norm_eps": 1e-5}
    ),
    "Gemma3ForCausalLM": Row(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        post_norms=True,
        norm_offset=True,
        scaled_embedding=True,
        local_rope=True,
        windows="pattern",
        query_scalar="query_pre_attn_scalar",
        activation="hidden_activation",
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        refused=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    ),
}

_NEAR = {
    "Gemma3ForConditionalGeneration": "its image tower is not served; a text-only checkpoint of the same "
    "model (Gemma3ForCausalLM) is",
}
"""Why a near relative of a supported model is refused."""

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Hugging Face's name → ours."""


def supported() -> list[str]:
    """The names of all architectures that can be served."""
    return sorted(ROWS)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a config names; ModelError, with the list of what there is, for any other."""
    given = config.get("architectures")
    names = [n for n in given if isinstance(n, str)] if isinstance(given, list) else []
    for name in names:
        if name in ROWS:
            return name
    known = ", ".join(supported())
    if not names:
        raise ModelError(f"the model's config.json names no `architectures`; supported: {known}")
    why = "".join(f" ({_NEAR[name]})" for name in names if name in _NEAR)
    raise ModelError(f"the architecture {', '.join(names)} is not supported{why}; supported: {known}")


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a Hugging Face config describes; ModelError names the key that cannot be served."""
    return spec_from_row(config, ROWS[architecture_of(config)])


def longest_context(config: Mapping[str, Any]) -> int:
    """The longest context, in tokens, that a config can serve.

    That is `max_position_embeddings`, but a "dynamic" rotary encoding stretches to `factor` times it, and
    "yarn" to `factor` times its `original_max_position_embeddings`. Raises ModelError naming a wrong key.
    """
    length = integer(config, "max_position_embeddings", high=MAX_LENGTH)
    given = rope_config.parameters(config)
    given = given.get(rope_config.FULL) or given
    kind = rope_config.kind_of(given)
    if kind not in ("dynamic", "yarn") or given.get("factor") is None:
        return length
    original = length
    if kind == "yarn":
        original = integer(given, "original_max_position_embeddings", length, high=MAX_LENGTH)
    return min(MAX_LENGTH, max(length, int(number(given, "factor") * original)))


def spec_from_row(config: Mapping[str, Any], row: Row) -> DecoderSpec:
    """The decoder of `row` with the sizes of `config`."""
    config = {**row.defaults, **config}
    for key in row.refused:
        if config.get(key) not in (None, False):
            raise ModelError(f"the model's config has {key} = {config[key]!r}, which is not supported")
    hidden, q_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ModelError(
            f"the model's config has num_attention_heads {q_heads}, not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = integer(config, "head_dim", max(1, hidden // q_heads))
    if head_dim % 2:
        raise ModelError(f"the model's config has head_dim {head_dim}; rotary encoding needs an even one")
    layers = integer(config, "num_hidden_layers", high=MAX_LAYERS)
    rotary = _rotary(config, row, head_dim)
    rope, local_rope = _ropes(config, row, rotary)
    return DecoderSpec(
        hidden=hidden,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=integer(config, "intermediate_size"),
        vocab=integer(config, "vocab_size"),
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        rotary=rotary,
        tied=switch(config, "tie_word_embeddings"),
        activation=_activation(config, row.activation),
        qkv_bias=switch(config, row.qkv_bias),
        out_bias=switch(config, row.out_bias),
        mlp_bias=switch(config, row.mlp_bias),
        qk_norm=row.qk_norm,
        post_norms=row.post_norms,
        norm_offset=row.norm_offset,
        fused=row.fused,
        query_scalar=number(config, row.query_scalar) if row.query_scalar else 0.0,
        embed_scale=hidden**0.5 if row.scaled_embedding else 1.0,
        windows=windows_of(config, row.windows, layers),
        local_rope=local_rope,
    )


def _rotary(config: Mapping[str, Any], row: Row, head_dim: int) -> int:
    rotary = rope_config.rotary_of(config, head_dim)
    if rotary != head_dim and not row.partial_rotary:
        raise ModelError(
            f"the model's config has a partial_rotary_factor that turns {rotary} of {head_dim} channels; "
            "this architecture turns all"
        )
    return rotary


def _ropes(config: Mapping[str, Any], row: Row, rotary: int) -> tuple[Rope, Rope | None]:
    if row.local_rope:
        return rope_config.rope_of(config, rotary), rope_config.local_rope_of(config, rotary)
    given = rope_config.parameters(config)
    if rope_config.FULL in given or rope_config.SLIDING in given:
        raise ModelError(
            "the model's config has rope_parameters for each layer type; this architecture has one for all"
        )
    return rope_config.rope_of(config, rotary), None


def _activation(config: Mapping[str, Any], key: str) -> Literal["silu", "gelu_tanh"]:
    name = config.get(key, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"the model's config has {key} {name!r}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
