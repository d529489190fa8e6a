"""Hugging Face transformers on the very weights that Sapwood loads: the reference of the benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from sapwood.srt.config import ModelSource
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import HEAD, tensor_shapes


def transformers_model(source: ModelSource) -> Any:
    """A float32 LlamaForCausalLM with the dequantised tensors of `source`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = spec_of(source.config)
    rope = {"rope_type": "default", "rope_theta": spec.rope.theta}
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.q_heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_eps,
        tie_word_embeddings=spec.tied,
        max_position_embeddings=source.context_length,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config)
    reader = open_weights(source).reader
    tensors = {name: reader.read(name).float() for name in tensor_shapes(spec)}
    if spec.tied:
        tensors[HEAD] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model.eval()
