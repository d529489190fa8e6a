"""The models that can be served: one row each. Imports no torch, so that the launcher can read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.srt.errors import ModelError
from sapwood.srt.models.spec import MAX_LAYERS, DecoderSpec, integer, number, rope_of


@dataclass(frozen=True, slots=True)
class Row:
    """How one architecture differs from a plain Llama. A switch is fixed, or the config key that holds it."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False


ROWS: dict[str, Row] = {
    "LlamaForCausalLM": Row(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
}


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
    raise ModelError(f"the architecture {', '.join(names)} is not supported; supported: {known}")


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a Hugging Face config describes; ModelError names the key that cannot be served."""
    return spec_from_row(config, ROWS[architecture_of(config)])


def spec_from_row(config: Mapping[str, Any], row: Row) -> DecoderSpec:
    """The decoder of `row` with the sizes of `config`."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ModelError(f"the model's config has hidden_act {act!r}; only 'silu' is supported")
    hidden, q_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ModelError(
            f"the model's config has num_attention_heads {q_heads}, not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = integer(config, "head_dim", hidden // q_heads)
    if head_dim % 2:
        raise ModelError(f"the model's config has head_dim {head_dim}; rotary encoding needs an even one")
    return DecoderSpec(
        hidden=hidden,
        layers=integer(config, "num_hidden_layers", high=MAX_LAYERS),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=integer(config, "intermediate_size"),
        vocab=integer(config, "vocab_size"),
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope_of(config, head_dim),
        tied=_switch(config, "tie_word_embeddings"),
        qkv_bias=_switch(config, row.qkv_bias),
        out_bias=_switch(config, row.out_bias),
        mlp_bias=_switch(config, row.mlp_bias),
        qk_norm=row.qk_norm,
    )


def _switch(config: Mapping[str, Any], value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    given = config.get(value)
    if given is None:
        return False
    if not isinstance(given, bool):
        raise ModelError(f"the model's config has {value} = {given!r}; it must be true or false")
    return given
