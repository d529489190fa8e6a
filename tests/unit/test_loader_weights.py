"""Weights: the values of each format, and a named refusal of every checkpoint that is not whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood.srt.errors import ModelError
from sapwood.srt.loader import packing
from sapwood.srt.loader.gguf_parts import GgufFile
from sapwood.srt.loader.gguf_weights import GgufReader
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.spec import EMBEDDING, HEAD
from tests.gguf_files import KINDS, tiny_gguf
from tests.models import CONFIG, default_source, random_tensors, save_weights, source_of, tiny_llama

LAYER = "model.layers.1.mlp.up_proj.weight"


def opened(path: Path, **config: Any) -> Any:
    return open_weights(source_of(path, skip_tokenizer_init=True, **config))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    weights = opened(path)
    return {name: weights.vector(name) for name in weights.names()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_give_every_tensor_in_float32(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    tiny_llama(tmp_path, shards=shards, dtype=dtype, tie_word_embeddings=False)
    expected = random_tensors(CONFIG | {"tie_word_embeddings": False}, 0, dtype)
    found = loaded(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, expected[name].float()), name


def test_joint_matrices_are_the_rows_one_after_another(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    weights = opened(tmp_path)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    rows = torch.cat([weights.vector(name) for name in names])
    assert torch.equal(weights.linear(names, "float32").unpack(), rows)
    assert torch.equal(weights.linear(names, "float16").unpack(), rows.half().float())
    assert torch.equal(weights.linear([EMBEDDING], "float32").unpack(), weights.vector(EMBEDDING))


def test_dummy_weights_are_seeded_and_differ(tmp_path: Path) -> None:
    tiny_llama(tmp_path, weights=False)
    first, second = (opened(tmp_path, load_format="dummy") for _ in range(2))
    values = {name: first.vector(name) for name in first.names()}
    assert all(torch.equal(v, second.vector(n)) for n, v in values.items())
    matrices = [v for v in values.values() if v.dim() == 2]
    assert len({float(v.sum()) for v in matrices}) == len(matrices)
    assert all(0.5 < float(v.std()) * v.shape[1] ** 0.5 < 2 for v in matrices)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first.linear([q], "float32").unpack(), values[q])


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_gguf_matrices_are_dequantised_and_put_in_order(tmp_path: Path, kind: str) -> None:
    put = tiny_gguf(tmp_path / "m.gguf", kind=kind, tie_word_embeddings=False, attention_bias=True)
    found = loaded(tmp_path / "m.gguf")
    assert found.keys() == put.keys()
    stored = KINDS[kind]
    for name, tensor in found.items():
        expected = put[name].numpy()
        if expected.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, stored), stored)
        assert np.array_equal(tensor.numpy(), expected), name


@pytest.mark.parametrize("inner", [96, 104 * 32])
def test_gguf_packs_rows_of_one_kind_or_of_several(
    tmp_path: Path, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PIECE", 48 * 64)
    kinds = {"blk.1.attn_v": "q8_0", "blk.0.ffn_gate": "q5_1", "blk.1.ffn_gate": "bf16"}
    tiny_gguf(tmp_path / "m.gguf", kind="q4_0", kinds=kinds, intermediate_size=inner)
    weights = opened(tmp_path / "m.gguf")
    formats = {(0, "attn"): "q4", (1, "attn"): "q8w", (0, "mlp"): "q8w", (1, "mlp"): "float32"}
    for index, part in formats:
        names = [f"model.layers.{index}.self_attn.{x}_proj.weight" for x in "qkv"]
        if part == "mlp":
            names = [f"model.layers.{index}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        rows = torch.cat([weights.vector(name) for name in names])
        stored = weights.linear(names, "stored")
        assert stored.format == formats[index, part]
        assert torch.equal(stored.unpack(), rows)
        assert torch.equal(weights.linear(names, "float32").unpack(), rows)
        assert torch.equal(weights.linear(names, "float16").unpack(), rows.half().float())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("q4_k q4_k q4_k", "q4w"), ("q4_k q4_1 q4_0", "q4w"), ("q4_k q4_k q6_k", "q8w"),
        ("q5_0 q8_0 iq4_nl", "q8"), ("q5_0 q4_k q8_0", "q8w"), ("q2_k q3_k q5_k", "q8w"),
        ("f16 f16 f16", "float16"), ("q3_k f16 bf16", "float32"),
    ],
)  # fmt: skip
def test_joint_matrices_have_the_nearest_format_that_holds_all(
    tmp_path: Path, kinds: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PIECE", 48 * 256)
    own = dict(zip(("attn_q", "attn_k", "attn_v"), kinds.split(), strict=True))
    sizes = {"hidden_size": 256, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}
    tiny_gguf(tmp_path / "m.gguf", kinds=own, **sizes)
    weights = opened(tmp_path / "m.gguf")
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    packed = weights.linear(names, "stored")
    assert (packed.format, packed.n, packed.k) == (expected, 56, 256)
    assert torch.equal(packed.unpack(), torch.cat([weights.vector(name) for name in names]))
    assert weights.formats == {expected}
    assert weights.summary().startswith(f"{expected} 0 MiB ({min(kinds.upper().split())}")


def test_a_safetensors_type_has_its_format(tmp_path: Path) -> None:
    formats = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "float32"}
    for dtype, format in formats.items():
        weights = opened(tiny_llama(tmp_path / format / str(dtype), dtype=dtype))
        packed = weights.linear([EMBEDDING], "stored")
        assert packed.format == format
        assert torch.equal(packed.unpack(), weights.vector(EMBEDDING))
        assert ("float16 would cut its range" in weights.summary()) is (dtype is torch.bfloat16)
        asked = opened(tmp_path / format / str(dtype))
        asked.linear([EMBEDDING], "float16")
        kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
        assert asked.summary() == f"float16 0 MiB ({kind})"


def test_the_packaged_model_equals_the_gguf_librarys_own_dequantiser() -> None:
    path = default_source().path
    reader, theirs = GgufReader(path), {t.name: t for t in gguf.GGUFReader(path).tensors}
    for own, name in [
        ("token_embd.weight", EMBEDDING),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]:
        tensor = theirs[own]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(reader.read(name).numpy(), expected), name


def test_a_gguf_without_a_tensor_names_it(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=rf"m\.gguf: has no tensor {LAYER}"):
        opened(tmp_path / "m.gguf")


def test_a_gguf_without_a_head_is_tied(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", tie_word_embeddings=False, drop=("output.weight",))
    assert HEAD not in opened(tmp_path / "m.gguf").names()
    assert "output.weight" not in GgufFile(tmp_path / "m.gguf").tensors


@pytest.mark.parametrize("name", [HEAD, LAYER, "model.norm.weight", EMBEDDING])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, shards: int) -> None:
    tiny_llama(tmp_path, weights=False, tie_word_embeddings=False)
    tensors = random_tensors(CONFIG | {"tie_word_embeddings": False}, 0, torch.float32)
    del tensors[name]
    save_weights(tmp_path, tensors, shards)
    with pytest.raises(ModelError, match=f"has no tensor {name}"):
        opened(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    homes = json.loads(index.read_text())["weight_map"]
    home = homes[LAYER]
    homes[LAYER] = next(h for h in homes.values() if h != home)
    index.write_text(json.dumps({"weight_map": homes}))
    with pytest.raises(ModelError, match=rf"{homes[LAYER]}: has no tensor {LAYER}, which"):
        opened(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    tiny_llama(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors: is no whole safetensors file"):
        opened(tmp_path)


def test_an_unknown_tensor_is_logged_and_otherwise_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        "model.extra.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "sapwood"):
        weights = opened(tmp_path)
    assert set(weights.names()) == tensors.keys()
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}: 1 tensors are not used by this model: model.extra.weight"
    ]


def test_another_shape_is_named_with_both(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {LAYER: torch.ones(96, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {LAYER} has the shape \[96, 32\], .* asks for \[96, 64\]"):
        opened(tmp_path)


def test_another_type_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {LAYER: torch.ones((96, 64), dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {LAYER} has the type I8; supported: F32, F16, BF16"):
        opened(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path, weights=False)
    tensors = random_tensors(CONFIG, 0, torch.float32)
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({LAYER: tensors[LAYER]}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=rf"b\.safetensors: holds the tensor {LAYER}, which another"):
        opened(tmp_path)


def test_one_tensor_in_two_shards_is_refused_though_the_index_names_one(tmp_path: Path) -> None:
    tiny_llama(tmp_path, shards=3)
    homes = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for other in sorted(set(homes.values()) - {homes[LAYER]}):
        shard = load_file(tmp_path / other)
        save_file(shard | {LAYER: torch.zeros(96, 64)}, tmp_path / other)
        with pytest.raises(ModelError, match=rf"{other}: holds the tensor {LAYER}, which .*{homes[LAYER]}"):
            opened(tmp_path)
        save_file(shard, tmp_path / other)
    assert LAYER in opened(tmp_path).names()


def test_a_tensor_that_the_index_does_not_name_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_llama(tmp_path, shards=3)
    path = tmp_path / "model-00002-of-00003.safetensors"
    save_file(load_file(path) | {"model.extra.weight": torch.ones(3)}, path)
    with caplog.at_level(logging.WARNING, "sapwood"):
        opened(tmp_path)
    assert "1 tensors are not used by this model: model.extra.weight" in caplog.text


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers: a copy is the tied head, another matrix is a head of its own."""
    tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors[EMBEDDING].clone() if same else tensors[EMBEDDING] * 2
    save_file(tensors | {HEAD: head}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "sapwood"):
        weights = opened(tmp_path)
    assert (HEAD in weights.names()) is not same
    assert ("lm_head.weight differs" in caplog.text) is not same
