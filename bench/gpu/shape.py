"""The model that is measured, how much of it, and what a step of it must read and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sapwood.srt.models.spec import DecoderSpec

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
"""Llama 3.1 8B's own config."""
TINY = LLAMA_8B | {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 64, "intermediate_size": 512, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; lengths in tokens. `pair`: the batches of what is switched on and off.
    `compared`: those of plain torch. `alone_among`: the batch of the batch-invariant mode."""

    config: dict[str, Any]
    context: int
    batches: tuple[int, ...]
    pair: tuple[int, ...]
    compared: tuple[int, ...]
    prefills: tuple[int, ...]
    prefix: int
    suffix: int
    sharing: int
    shared: int
    alone_among: int
    steps: int
    repeats: int
    slots: int
    context_length: int
    copy_bytes: int
    matmul: int

    @property
    def captured(self) -> list[int]:
        """The numbers of rows for which a graph is made."""
        return sorted({*self.batches, *self.pair, *self.compared, self.sharing})


FULL = Sizes(
    config=LLAMA_8B, context=1024, batches=(1, 8, 32, 128, 256), pair=(1, 32), compared=(8, 64),
    prefills=(512, 8192), prefix=4096, suffix=128, sharing=64, shared=8192, alone_among=32, steps=24,
    repeats=8, slots=285_000, context_length=16384, copy_bytes=2 << 30, matmul=8192,
)  # fmt: skip
DRY = Sizes(
    config=TINY, context=40, batches=(1, 2, 4), pair=(1, 2), compared=(2, 4), prefills=(16, 64), prefix=64,
    suffix=8, sharing=4, shared=128, alone_among=4, steps=6, repeats=3, slots=700, context_length=256,
    copy_bytes=1 << 20, matmul=64,
)  # fmt: skip


def layer_params(spec: DecoderSpec) -> int:
    """Of the matrices of all layers."""
    q = spec.q_heads * spec.head_dim
    attention = spec.hidden * (spec.qkv_width + q)
    return spec.layers * (attention + 3 * spec.hidden * spec.intermediate)


def weight_bytes(spec: DecoderSpec, each: int) -> int:
    """What every step reads: the layers' matrices of `each` bytes a weight, and the head of 2. Of the
    embedding it reads a row a token, which is left out."""
    return layer_params(spec) * each + spec.vocab * spec.hidden * 2


def prefill_flops(spec: DecoderSpec, tokens: int) -> float:
    """Of a prompt: two for each weight of the layers and token, the head for one token, and causal attention
    over the half that is seen."""
    seen = tokens * (tokens + 1) / 2
    attention = 4.0 * spec.layers * spec.q_heads * spec.head_dim * seen
    return 2.0 * tokens * layer_params(spec) + 2.0 * spec.vocab * spec.hidden + attention
