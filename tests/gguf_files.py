"""GGUF files written with the gguf library, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from sapwood.srt.loader.gguf_model import hf_name
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import tensor_shapes
from tests.models import CONFIG, random_tensors, tiny_tokenizer

KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of q and k rows: the two halves of a head become neighbouring pairs."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def own_names(config: dict[str, Any]) -> dict[str, str]:
    """Hugging Face name → GGUF name of every tensor of the config."""
    outside = ["token_embd.weight", "output_norm.weight", "output.weight"]
    stems = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ]
    inside = [
        f"blk.{i}.{s}.{kind}"
        for i in range(config["num_hidden_layers"])
        for s in stems
        for kind in ("weight", "bias")
    ]
    return {hf_name(name): name for name in outside + inside}


def tiny_gguf(
    path: Path,
    *,
    kind: str = "f32",
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Write the tiny Llama of tests.models as a GGUF file and return the tensors that went in.

    Matrices are stored as `kind`, those whose GGUF name contains a key of `kinds` as its value; `metadata`
    replaces entries (None removes one); tensors whose GGUF name is in `drop` are left out.
    """
    config = {k: v for k, v in {**CONFIG, **overrides}.items() if v is not None}
    tensors = random_tensors(config, 0, torch.float32)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**_metadata(config), **(metadata or {})}.items():
        if value is not None:
            _add(writer, key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = own_names(config)
    for name in tensor_shapes(spec_of(config)):
        own, values = names[name], tensors[name].numpy()
        if own in drop:
            continue
        stem = own.split(".")[-2]
        if stem in heads:
            values = interleave(values, heads[stem])
        stored = next((k for part, k in (kinds or {}).items() if part in own), kind)
        if values.ndim == 1:
            stored = "f32"
        writer.add_tensor(own, gguf.quants.quantize(values, KINDS[stored]), raw_dtype=KINDS[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for _, i in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
