"""The GGUF reader: right on whole files, a ModelError and nothing worse on damaged ones."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_model import config_of
from sapwood.srt.loader.gguf_parts import GgufFile
from tests.gguf_files import KINDS, tiny_gguf
from tests.models import CONFIG, default_source


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf(path, kind="q4_1")
    return path


def test_agrees_with_the_gguf_library_on_every_key_and_tensor(whole: Path) -> None:
    ours, theirs = GgufFile(whole), gguf.GGUFReader(whole)
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert KINDS[own.kind] == tensor.tensor_type
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()
    assert len(ours.tensors) == len(theirs.tensors)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert _plain(ours.metadata[key]) == field.contents(), key


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_reads_the_packaged_model_with_its_types() -> None:
    file = GgufFile(default_source().path)
    kinds = [t.kind for t in file.tensors.values()]
    assert {k: kinds.count(k) for k in set(kinds)} == {"q4_1": 210, "q8_0": 1, "f32": 61}
    assert file.tensors["token_embd.weight"].shape == (49152, 576)


def test_config_has_the_keys_of_hugging_face(whole: Path) -> None:
    config = config_of(GgufFile(whole))
    for key in CONFIG:
        if key in config and key != "rms_norm_eps":
            assert config[key] == CONFIG[key], key
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.05, 0.3, 0.5, 0.9, 0.9999])
def test_a_file_cut_short_is_named(whole: Path, tmp_path: Path, share: float) -> None:
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        GgufFile(cut)


def test_a_cut_in_the_data_names_the_last_tensor(whole: Path, tmp_path: Path) -> None:
    last = max(GgufFile(whole).tensors.values(), key=lambda t: t.offset)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: last.offset + last.size - 1])
    with pytest.raises(ModelError, match=f"tensor {last.name} "):
        GgufFile(cut)


def test_random_damage_never_gives_anything_but_a_model_error(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    header = min(t.offset for t in GgufFile(whole).tensors.values())
    draw = random.Random(7)
    refused = 0
    path = tmp_path / "damaged.gguf"
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(header)] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        path.write_bytes(damaged)
        try:
            file = GgufFile(path)
            for name in file.tensors:
                assert file.raw(name).nbytes == file.tensors[name].size
            config_of(file)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGUX", "not a GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 2**62), "cut short or damaged"),
        (16, struct.pack("<Q", 2**62), "damaged|twice|unknown"),
    ],
)
def test_header_lies_are_refused(whole: Path, tmp_path: Path, at: int, value: bytes, message: str) -> None:
    data = bytearray(whole.read_bytes())
    data[at : at + len(value)] = value
    path = tmp_path / "lie.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GgufFile(path)


def test_a_huge_array_length_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = b"a.key"
    for kind in (8, 4):
        array = struct.pack("<IIQ", 9, kind, 2**60)
        path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + array + bytes(64))
        with pytest.raises(ModelError, match=r"a\.key"):
            GgufFile(path)


def test_an_unsupported_type_names_tensor_and_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf(path, kind="q8_0", kinds={"blk.1.ffn_up": "mxfp4"})
    with pytest.raises(
        ModelError, match=r"blk\.1\.ffn_up\.weight has the type MXFP4, .*supported: F32, .*Q2_K.* BF16"
    ):
        GgufFile(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "su"}, "rope scaling 'su'.*supported: none, linear, yarn, longrope"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is None"),
        ({"llama.rope.dimension_count": 8}, "rotary length 8"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is None"),
        ({"llama.attention.head_count_kv": [2, 4]}, "one number for all layers"),
        ({"split.count": 2}, r"one of 2 parts of a split GGUF.*-00001-of-00002\.gguf"),
        ({"general.alignment": "x"}, "general.alignment"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, metadata: dict[str, object], message: str) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf(path, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        config_of(GgufFile(path))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: cannot be read: No such file"):
        GgufFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match=r"empty\.gguf: is empty"):
        GgufFile(tmp_path / "empty.gguf")
