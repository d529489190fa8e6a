"""Weights that are rounded at load: how far off they are, what is refused, and how little memory it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader import packing, quantise
from sapwood.srt.loader.packing import Matrix, pack_matrices
from sapwood.srt.loader.quantise import quantise4, quantise8
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING
from sapwood.srt.models.weights import Storage
from tests.decoding import Sequence
from tests.gguf_files import tiny_gguf
from tests.models import default_source, source_of, tiny_llama


def matrix_of(values: np.ndarray, name: str = "m") -> Matrix:
    tensor = torch.from_numpy(values)
    return Matrix(name, *values.shape, "F32", "float32", lambda begin, end: tensor[begin:end].clone())


def random(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(5).standard_t(5, (n, k)).astype(np.float32) * np.float32(0.05)


def grouped(values: np.ndarray) -> np.ndarray:
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 32)), mode="edge")
    return padded.reshape(len(values), -1, 32)


@pytest.mark.parametrize("k", [96, 70, 5])
def test_w8_is_off_by_half_a_scale_at_most(k: int) -> None:
    values = random(83, k)
    codes = quantise8(values)
    scales = codes.scales
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
    assert np.allclose(scales, np.abs(grouped(values)).max(2) / 127, rtol=2**-11)
    assert np.all(np.abs(grouped(codes.values() - values)) <= 0.5001 * scales[:, :, None])
    packed = pack_matrices([matrix_of(values)], "w8")
    assert packed.format == "q8"
    assert np.array_equal(packed.unpack().numpy(), codes.values())


@pytest.mark.parametrize("k", [96, 70, 5])
def test_w4_is_no_worse_than_from_least_to_largest(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random(83, k)
    codes = quantise4(values)
    monkeypatch.setattr(quantise, "REFINEMENTS", 0)
    plain = quantise4(values)
    groups = grouped(values)
    step = (groups.max(2) - groups.min(2)) / 15
    slack = np.abs(groups).max(2) * 2**-9  # for the ends, rounded to float16
    assert np.all(np.abs(grouped(plain.values() - values)).max(2) <= step / 2 + slack)
    ours, theirs = (np.square(grouped(c.values() - values)).sum(2) for c in (codes, plain))
    assert np.all(ours <= theirs * (1 + 1e-5))
    assert ours.sum() < 0.97 * theirs.sum()
    monkeypatch.undo()
    packed = pack_matrices([matrix_of(values)], "w4")
    assert packed.format == "q4"
    assert np.array_equal(packed.unpack().numpy(), codes.values())


@pytest.mark.parametrize("rounded", [quantise8, quantise4])
def test_odd_groups_are_rounded_too(rounded: type) -> None:
    values = np.zeros((5, 64), np.float32)
    values[1], values[2, 40], values[3], values[4, :32] = 0.25, -3, 1e-12, 60000
    off = np.abs(rounded(values).values() - values)
    assert np.all(off[0] == 0)
    assert np.all(grouped(off) <= np.abs(grouped(values)).max(2, keepdims=True) * 0.001 + 1e-12)


@pytest.mark.parametrize("storage", ["w8", "w4", "float16"])
@pytest.mark.parametrize("wrong", [1e9, float("inf"), float("nan")])
def test_values_that_a_storage_cannot_hold_are_refused(storage: Storage, wrong: float) -> None:
    values = random(40, 64)
    values[33, 7] = wrong
    with pytest.raises(ModelError, match=r"layers\.3\.mlp"):
        pack_matrices([matrix_of(random(8, 64)), matrix_of(values, "layers.3.mlp")], storage)


@pytest.mark.parametrize("storage", ["w8", "w4"])
def test_what_is_quantised_already_is_refused(tmp_path: Path, storage: Storage) -> None:
    tiny_gguf(tmp_path / "q.gguf", kind="q4_1")
    weights = open_weights(source_of(tmp_path / "q.gguf", skip_tokenizer_init=True))
    told = f"--quantization {storage} .*{EMBEDDING} is Q4_1 already"
    with pytest.raises(ConfigError, match=told) as raised:
        weights.linear([EMBEDDING], storage)
    assert raised.value.param == "quantization"
    tiny_gguf(tmp_path / "f.gguf", kind="f16")
    weights = open_weights(source_of(tmp_path / "f.gguf", skip_tokenizer_init=True))
    assert weights.linear([EMBEDDING], storage).format == {"w8": "q8", "w4": "q4"}[storage]


def test_quantization_gguf_asks_for_a_gguf(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "q.gguf", kind="q4_1")
    assert source_of(tmp_path / "q.gguf", skip_tokenizer_init=True, quantization="gguf").format == "gguf"
    with pytest.raises(ConfigError, match=r"--quantization gguf needs a \.gguf file"):
        source_of(tiny_llama(tmp_path / "hf"), quantization="gguf")


def test_dummy_weights_have_every_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_weights(source_of(tiny_llama(tmp_path, weights=False), load_format="dummy"))
    exact = weights.vector(EMBEDDING)
    monkeypatch.setattr(packing, "PIECE", 80 * exact.shape[1])  # ends amid what is drawn together
    storages: dict[Storage, tuple[str, float]] = {
        "stored": ("float32", 0), "float32": ("float32", 0), "float16": ("float16", 1e-3),
        "w8": ("q8", 1e-2), "w4": ("q4", 0.1),
    }  # fmt: skip
    for storage, (format, bound) in storages.items():
        packed = weights.linear([EMBEDDING], storage)
        assert packed.format == format
        error = (packed.unpack() - exact).norm() / exact.norm()
        assert error == 0 if not bound else 0 < error < bound, storage


def test_packing_takes_little_memory_beside_the_result() -> None:
    n, k = 32768, 1024
    row = random(1, k)

    def rows(begin: int, end: int) -> torch.Tensor:
        return torch.from_numpy(np.repeat(row, end - begin, axis=0))

    def status(key: str) -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key))
        return int(line.split()[1]) * 1024

    pack_matrices([Matrix("m", 4096, k, "F32", "float32", rows)], "w4")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    packed = pack_matrices([Matrix("m", n, k, "F32", "float32", rows)], "w4")
    assert status("VmHWM") - before < packed.nbytes + 64 * 2**20 < n * k * 4


@torch.inference_mode()
def test_the_packaged_model_is_computed_on_as_it_is_stored() -> None:
    source = default_source()
    weights = open_weights(source)
    stored = Decoder(spec_of(source.config), weights, CpuOps("stored"), 512)
    assert weights.formats == {"q4", "q8"}
    assert weights.summary() == "q4 63 MiB (Q4_1), q8 29 MiB (Q8_0)"
    floats = Decoder(spec_of(source.config), weights, CpuOps("float32"), 512)
    for name in (EMBEDDING, "model.layers.5.self_attn.q_proj.weight", "model.layers.9.mlp.down_proj.weight"):
        assert torch.equal(weights.linear([name], "stored").unpack(), weights.vector(name)), name
    ids = torch.randint(0, 49152, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    ours, theirs = (Sequence(decoder, 64).extend(ids) for decoder in (stored, floats))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-3
    assert torch.equal(ours.argmax(1), theirs.argmax(1))
