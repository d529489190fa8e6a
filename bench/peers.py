"""Hugging Face transformers on the very weights that Sapwood loads: the reference of the benchmarks."""

from __future__ import annotations

from typing import Any

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
    weights = open_weights(source)
    tensors = {name: weights.vector(name).float() for name in tensor_shapes(spec)}
    if spec.tied:
        tensors[HEAD] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def chat_ids(source: ModelSource, messages: list[dict[str, str]]) -> list[int]:
    """The prompt of a chat, rendered and encoded by transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=source.tokenizer_file, chat_template=source.chat_template, **source.template_vars
    )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
