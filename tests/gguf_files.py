"""GGUF files written with the gguf library, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import tensor_shapes
from tests.models import CONFIG, FAMILIES, random_tensors, tiny_tokenizer

KINDS = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")
}
"""What the gguf library can write; of the others, `random_blocks` makes files."""

_HALVES = {
    "q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_0": (0,), "q5_0": (0,), "q8_0": (0,),
    "iq4_nl": (0,),
}  # fmt: skip
"""Where a block has numbers in half precision, if not in its first four bytes."""

ARCHITECTURES = {family: family for family in FAMILIES} | {"mistral": "llama"}
"""Family → `general.architecture`."""

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """uint8 [rows, bytes]: every bit pattern of codes and scales, but all that is half precision below 1."""
    draw = np.random.default_rng(3)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][1]
    given = draw.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    if kind in ("f32", "f16", "bf16"):
        given[:, -1] &= 0x3F
    else:
        for at in _HALVES.get(kind, (0, 2)):
            given[:, at + 1] &= 0xBB
    return given.reshape(rows, -1)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of q and k rows: the two halves of a head become neighbouring pairs."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def own_name(name: str, family: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _model, _layers, index, *middle, kind = name.split(".")
    stems = _IN_LAYER | (_GEMMA_NORMS if family == "gemma3" else {})
    return f"blk.{index}.{stems['.'.join(middle)]}.{kind}"


def family_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The Hugging Face config of a tiny model; None removes a key."""
    return {k: v for k, v in {**CONFIG, **FAMILIES[family], **overrides}.items() if v is not None}


def tiny_gguf(
    path: Path,
    *,
    family: str = "llama",
    kind: str = "f32",
    kinds: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    parts: int = 1,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Write a tiny model of tests.models as a GGUF file and return the tensors that went in.

    Matrices are stored as `kind`, those whose GGUF name contains a key of `kinds` as its value (one that is
    not in `KINDS` gets random blocks); `metadata` replaces entries (None removes one); tensors whose GGUF
    name is in `drop` are left out, those of `extra` added. With several `parts`, `path` is the stem of their
    names. `overrides` change the config.
    """
    config = family_config(family, **overrides)
    tensors = random_tensors(config, 0, torch.float32)
    stored: dict[str, tuple[np.ndarray, str]] = {}
    for name in tensor_shapes(spec_of(config)):
        own = own_name(name, family)
        values = as_stored(tensors[name].numpy(), own, family, config)
        chosen = next((k for part, k in (kinds or {}).items() if part in own), kind)
        stored[own] = values, ("f32" if values.ndim == 1 else chosen)
    stored = {name: entry for name, entry in stored.items() if name not in drop}
    stored |= {name: (values, "f32") for name, values in (extra or {}).items()}
    everything = {**gguf_metadata(config, ARCHITECTURES[family]), **(metadata or {})}
    write_gguf(path, ARCHITECTURES[family], everything, stored, parts)
    return tensors


def as_stored(values: np.ndarray, own: str, family: str, config: dict[str, Any]) -> np.ndarray:
    """A Hugging Face tensor's values as the converter keeps them."""
    stem = own.split(".")[-2]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if ARCHITECTURES[family] == "llama" and stem in heads:
        return interleave(values, heads[stem])
    if family == "gemma3" and stem.endswith("norm"):
        return values + np.float32(1)
    return values


def write_gguf(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, str]],
    parts: int = 1,
) -> None:
    """One file or, with several `parts`, files `<path>-0000i-of-0000n.gguf` that share the tensors."""
    for index in range(parts):
        file = path if parts == 1 else path.with_name(f"{path.name}-{index + 1:05}-of-{parts:05}.gguf")
        writer = gguf.GGUFWriter(file, metadata.get("general.architecture", arch))
        for key, value in (metadata if index == 0 else {}).items():
            if value is not None and key != "general.architecture":
                _add(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", index)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
        for name, (values, kind) in list(tensors.items())[index::parts]:
            number = gguf.GGMLQuantizationType[kind.upper()]
            if kind in KINDS:
                stored = gguf.quants.quantize(values, number)
            else:
                per_row = values.shape[1] // gguf.GGML_QUANT_SIZES[number][0]
                stored = random_blocks(kind, values.shape[0], per_row)
            writer.add_tensor(name, stored, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def gguf_metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """What the converter writes of a config and of the tiny tokenizer."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": config["rope_theta"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if arch in ("llama", "phi3"):
        own["rope.dimension_count"] = int(head_dim * config.get("partial_rotary_factor", 1.0))
    if config["architectures"][0].startswith(("Gemma3", "Mistral", "Phi3")):
        own["attention.sliding_window"] = config.get("sliding_window", 0)
    return {f"{arch}.{key}": value for key, value in own.items()} | _tokenizer(config)


def _tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
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


def spm_metadata(pieces: dict[str, float], **more: Any) -> dict[str, Any]:
    """The metadata of a small SentencePiece vocabulary: three control tokens, 256 bytes, then `pieces` with
    their scores. `more` are further keys of `tokenizer.ggml`."""
    control, byte = ["<unk>", "<s>", "</s>"], [f"<0x{b:02X}>" for b in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*control, *byte, *pieces],
        "tokenizer.ggml.scores": [*[0.0] * 259, *pieces.values()],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
