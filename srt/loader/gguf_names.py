"""The GGUF families: the Hugging Face architecture of each, and how its tensors are called and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_parts import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
"""Tensors that are part of the position encoding, not weights."""

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How the files of one `general.architecture` differ from the Hugging Face checkpoints they come from.

    `names` replace entries of the common table of a layer's tensors. `paired`: the rows of q and k are kept
    as interleaved rotary pairs, not as two halves. `norm_offset`: norms are kept with 1 added.
    `partial_rotary`: only a head's first channels may turn.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norm_offset: bool = False
    partial_rotary: bool = False
    act: str = "silu"

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a GGUF tensor; the name itself if it has none."""
        block, _, rest = name.removeprefix("blk.").partition(".")
        stem, _, kind = rest.rpartition(".")
        own = self.names.get(stem) or _IN_LAYER.get(stem)
        if name.startswith("blk.") and own:
            return f"model.layers.{block}.{own}.{kind}"
        return _OUTSIDE.get(name, name)

    def is_paired(self, name: str) -> bool:
        """Whether the file keeps the rows of this Hugging Face tensor as interleaved rotary pairs."""
        return self.paired and (".q_proj." in name or ".k_proj." in name)

    def is_raised(self, name: str) -> bool:
        """Whether the file keeps this Hugging Face tensor with 1 added."""
        return self.norm_offset and name.endswith("norm.weight")


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", paired=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=True,
        act="gelu_pytorch_tanh",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial_rotary=True,
    ),
}
"""By `general.architecture`."""

_MISTRAL = Family("MistralForCausalLM", "mistral", paired=True)


def family_of(gguf: GgufFile) -> Family:
    """The family of a file; ModelError, with the list of what there is, for an architecture without one.

    Mistral's files are `llama` ones; only a sliding window tells them apart.
    """
    arch = gguf.scalar("general.architecture")
    if arch not in FAMILIES:
        raise ModelError(
            f"{gguf.path}: the GGUF architecture {arch!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if arch == "llama" and gguf.scalar("llama.attention.sliding_window"):
        return _MISTRAL
    return FAMILIES[arch]
