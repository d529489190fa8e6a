"""Packed weights kept on disk: the next start maps the same ones, and anything odd is made again."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.kernels.ops.gemm import PackedWeight
from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader import kept_weights, sources
from sapwood.srt.loader.kept import put
from sapwood.srt.loader.kept_weights import KeptWeights
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.spec import EMBEDDING
from sapwood.srt.models.weights import Storage
from sapwood.srt.worker import kv_pool
from sapwood.srt.worker.cpu import make_runner
from tests.gguf_files import tiny_gguf
from tests.models import source_of, tiny_llama

MIXED = {"attn_v": "q8_0", "ffn_down": "q5_1", "attn_output": "f16"}
NAMES = [
    [EMBEDDING],
    [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"],
    ["model.layers.0.self_attn.o_proj.weight"],
    ["model.layers.1.mlp.down_proj.weight"],
]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    tiny_gguf(tmp_path / "m.gguf", kind="q4_1", kinds=MIXED)
    return source_of(tmp_path / "m.gguf", skip_tokenizer_init=True)


@pytest.fixture(autouse=True)
def _keep_small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "_SMALLEST", 1)


def start(
    folder: Path, source: ModelSource, storage: Storage = "stored"
) -> tuple[KeptWeights, list[PackedWeight]]:
    """What a start of the worker does with the weights."""
    kept = KeptWeights(folder, source.files, storage)
    weights = open_weights(source, kept)
    packed = [weights.linear(names, storage) for names in NAMES]
    kept.save()
    return kept, packed


def equal(some: list[PackedWeight], others: list[PackedWeight]) -> bool:
    return all(
        a.format == b.format and (a.n, a.k) == (b.n, b.k) and torch.equal(a.data, b.data)
        for a, b in zip(some, others, strict=True)
    )


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    from sapwood.srt.loader import weights

    real = weights.pack_matrices

    def only_floats(matrices: list[weights.Matrix], storage: Storage) -> PackedWeight:
        packed = real(matrices, storage)
        assert packed.format == "float16", "a quantised weight was packed again"
        return packed

    monkeypatch.setattr(weights, "pack_matrices", only_floats)


def test_the_second_start_maps_what_the_first_packed(
    tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, packed = start(tmp_path / "c", source)
    assert not first.is_found
    assert first.nbytes == 0
    (file,) = (tmp_path / "c").iterdir()
    assert file == first.path
    written = file.read_bytes()
    assert [w.format for w in packed] == ["q4", "q8w", "float16", "q8w"]
    forbid_packing(monkeypatch)
    second, again = start(tmp_path / "c", source)
    assert second.is_found
    assert second.nbytes == sum(w.nbytes for w in packed if w.format != "float16")
    assert equal(packed, again)
    assert all(w.data.data_ptr() % 64 == 0 for w in again)
    assert file.read_bytes() == written
    mapped = Path("/proc/self/maps").read_text()
    assert str(file) in mapped


def test_a_mapped_weight_outlives_its_file(tmp_path: Path, source: ModelSource) -> None:
    _, packed = start(tmp_path / "c", source)
    kept, again = start(tmp_path / "c", source)
    kept.path.unlink()
    del kept
    assert equal(packed, again)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def rewrite(file: Path, change: Callable[[Any], object]) -> None:
    """Give the file another header, whole and with the right sum."""
    data = file.read_bytes()
    magic, length, _crc = kept_weights._HEAD.unpack_from(data)
    size = kept_weights._HEAD.size
    header = json.loads(data[size : size + length])
    text = json.dumps(change(header)).encode()
    head = kept_weights._HEAD.pack(magic, len(text), zlib.crc32(text)) + text
    begin = kept_weights._aligned(size + length)
    file.write_bytes(head + bytes(-len(head) % 64) + data[begin:])


SPOILT: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "a few bytes": lambda file: file.write_bytes(file.read_bytes()[:10]),
    "half a header": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-64]),
    "too long": lambda file: file.write_bytes(file.read_bytes() + bytes(64)),
    "another magic": lambda file: flip(file, 0),
    "another length": lambda file: flip(file, 8),
    "another sum": lambda file: flip(file, 12),
    "another header": lambda file: flip(file, 60),
    "zeros": lambda file: file.write_bytes(bytes(len(file.read_bytes()))),
    "no label": lambda file: rewrite(file, lambda h: {k: h[k] for k in h if k != "label"}),
    "no weights": lambda file: rewrite(file, lambda h: {k: h[k] for k in h if k != "weights"}),
    "a list": lambda file: rewrite(file, lambda h: list(h.values())),
    "a number": lambda file: rewrite(file, lambda h: 7),
    "weights in a list": lambda file: rewrite(file, lambda h: h | {"weights": list(h["weights"])}),
    "a weight of one number": lambda file: rewrite(file, lambda h: h | {"weights": {"x": 1}}),
    "a weight of texts": lambda file: rewrite(file, lambda h: h | {"weights": {"x": ["q4", *"abcd"]}}),
    "files that are none": lambda file: rewrite(file, lambda h: h | {"label": 0, "files": 7}),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_file_is_made_again(
    tmp_path: Path, source: ModelSource, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept, packed = start(tmp_path / "c", source)
    written = kept.path.read_bytes()
    SPOILT[how](kept.path)
    assert kept.path.read_bytes() != written
    with caplog.at_level(logging.DEBUG, "sapwood"):
        again, remade = start(tmp_path / "c", source)
    assert not again.is_found
    assert "is made again" in caplog.text
    assert equal(packed, remade)
    assert kept.path.read_bytes() == written
    SPOILT[how](kept.path)
    kept_weights._sweep(tmp_path / "c" / "other.weights")
    assert kept.path.exists()


def test_another_file_layout_or_version_is_not_mistaken_for_it(
    tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = start(tmp_path / "c", source)
    model = Path(source.path)
    os.utime(model, ns=(0, model.stat().st_mtime_ns + 1))
    assert not KeptWeights(tmp_path / "c", source.files, "stored").is_found
    tiny_gguf(model, kind="q4_0", kinds=MIXED)
    replaced, packed = start(tmp_path / "c", source_of(model, skip_tokenizer_init=True))
    assert replaced.path == kept.path, "a model that changed replaces what was kept of it"
    assert equal(packed, start(tmp_path / "c", source)[1])
    assert len(list((tmp_path / "c").iterdir())) == 1
    for name in ("VERSION", "_layout"):
        with monkeypatch.context() as patch:
            patch.setattr(kept_weights, name, 2 if name == "VERSION" else lambda: 7)
            assert not KeptWeights(tmp_path / "c", source.files, "stored").is_found
    assert KeptWeights(tmp_path / "c", source.files, "stored").is_found


def test_each_storage_has_its_own_file(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path / "hf", shards=3))
    made = {s: start(tmp_path / "c", source, s) for s in ("w8", "w4", "stored", "float16")}
    assert len({kept.path for kept, _ in made.values()}) == 4
    assert sum(kept.path.is_file() for kept, _ in made.values()) == 2, "floats are not kept"
    for storage in ("w8", "w4"):
        again, packed = start(tmp_path / "c", source, storage)
        assert again.is_found
        assert equal(packed, made[storage][1])


def test_a_file_that_lacks_a_weight_is_completed(tmp_path: Path, source: ModelSource) -> None:
    kept = KeptWeights(tmp_path / "c", source.files, "stored")
    open_weights(source, kept).linear(NAMES[0], "stored")
    kept.save()
    before = kept.path.stat().st_size
    _, packed = start(tmp_path / "c", source)
    assert kept.path.stat().st_size > before
    assert equal(packed, start(tmp_path / "c", source)[1])


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, source: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.DEBUG, "sapwood"):
        kept, packed = start(tmp_path / "file" / "c", source)
    assert not kept.is_found
    assert {r.levelname for r in caplog.records} == {"DEBUG"}
    assert "packed weights are not kept" in caplog.text
    assert equal(packed, start(tmp_path / "c", source)[1])


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    start(tmp_path / "c", source)
    assert list((tmp_path / "c").iterdir()) == []


def test_what_a_killed_process_left_is_swept(tmp_path: Path, source: ModelSource) -> None:
    kept = KeptWeights(tmp_path / "c", source.files, "stored")
    (tmp_path / "c").mkdir()
    stems = f"{kept.path.stem}.a", f"{kept.path.stem}.b", "x"
    old, new, other = (tmp_path / "c" / f"{stem}.tmp" for stem in stems)
    for left in (old, new, other):
        left.write_bytes(b"x")
    for left in (old, other):
        os.utime(left, (0, time.time() - 4000))
    start(tmp_path / "c", source)
    assert not old.exists()
    assert new.exists()
    assert other.exists()


SCRIPT = """
import sys
from pathlib import Path
from sapwood.kernels import native
from sapwood.srt.loader import kept_weights
from tests.models import source_of
from tests.unit.test_loader_kept_weights import start
native.load("portable", 1)
kept_weights._SMALLEST = 1
source = source_of(Path(sys.argv[1]), skip_tokenizer_init=True)
for _ in range(20):
    kept, packed = start(Path(sys.argv[2]), source)
    kept.path.unlink(missing_ok=True)
kept, packed = start(Path(sys.argv[2]), source)
print(*(int(w.data.int().sum()) for w in packed))
"""


def test_two_processes_at_once_agree(tmp_path: Path, source: ModelSource) -> None:
    arguments = [sys.executable, "-c", SCRIPT, source.path, str(tmp_path / "c")]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    _, packed = start(tmp_path / "c", source)
    expected = " ".join(str(int(w.data.int().sum())) for w in packed)
    assert [text.strip() for text in told] == [expected, expected]
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_what_was_kept_of_a_model_that_is_gone_is_swept(tmp_path: Path, source: ModelSource) -> None:
    tiny_gguf(tmp_path / "gone.gguf", kind="q4_1")
    gone, _ = start(tmp_path / "c", source_of(tmp_path / "gone.gguf", skip_tokenizer_init=True))
    (tmp_path / "gone.gguf").unlink()
    (tmp_path / "c" / "odd.weights").write_text("of nobody")
    kept, _ = start(tmp_path / "c", source)
    assert not gone.path.exists()
    assert {file.name for file in (tmp_path / "c").iterdir()} == {kept.path.name, "odd.weights"}


def test_small_weights_are_not_kept(
    tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_weights, "_SMALLEST", 2**20)
    start(tmp_path / "c", source)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("options", "fact", "kv", "kept"),
    [
        ({}, "float32 0 MiB (F32), as stored", "float32", False),
        ({"dtype": "float16"}, "float16 0 MiB (F32), --dtype float16", "float16", False),
        ({"quantization": "w8"}, "q8 0 MiB (F32), --quantization w8", "float16", True),
        (
            {"quantization": "w4", "kv_cache_dtype": "float32"},
            "q4 0 MiB (F32), --quantization w4",
            "float32",
            True,
        ),
        (
            {"quantization": "w4", "weight_cache": False},
            "q4 0 MiB (F32), --quantization w4",
            "float16",
            False,
        ),
    ],
)
def test_the_worker_says_how_weights_are_stored_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fact: str, kv: str, kept: bool
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    config = make(model_path=str(tiny_llama(tmp_path / "hf")), max_total_tokens=64, num_threads=1, **options)
    source = sources.resolve(config)
    for again in ("", ", mapped from the cache" if kept else ""):
        _runner, _pool, facts = make_runner(config, source)
        assert facts["weights"] == fact + again
        assert f"({kv})" in facts["kv pool"]
    assert (tmp_path / "cache" / "weights").exists() is kept


def test_mapped_weights_are_no_free_memory_for_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kv_pool, "free_memory", lambda: 2**20)
    config = make(
        model_path=str(tiny_llama(tmp_path / "hf")), quantization="w8", mem_fraction_static=0.5, num_threads=1
    )
    source = sources.resolve(config)
    slots = [make_runner(config, source)[1].num_slots for _ in range(2)]
    mapped = KeptWeights(tmp_path / "cache" / "weights", source.files, "w8").nbytes
    assert mapped > 50_000
    each = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, head_dim, float16
    assert slots == [2**20 // 2 // each, (2**20 - mapped) // 2 // each]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_what_is_kept_is_readable_by_whom_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        put(tmp_path / "kept", lambda file: file.write(b"x"))
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == mode
