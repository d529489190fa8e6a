"""Split GGUF models: any part stands for the whole, and what does not fit together is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_parts import GgufFile, part_names
from sapwood.srt.loader.weights import open_weights
from tests.gguf_files import tiny_gguf
from tests.models import source_of

NAMES = [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    tiny_gguf(tmp_path / "m", kind="q8_0", parts=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == NAMES
    return tmp_path


@pytest.mark.parametrize("given", NAMES)
def test_any_part_is_the_model(split: Path, tmp_path_factory: pytest.TempPathFactory, given: str) -> None:
    single = tmp_path_factory.mktemp("single") / "m.gguf"
    tiny_gguf(single, kind="q8_0")
    source = source_of(split / given, skip_tokenizer_init=True)
    assert source.files == [str(split / name) for name in NAMES]
    assert source.path == source.files[0]
    whole = source_of(single, skip_tokenizer_init=True)
    assert source.config == whole.config
    ours, theirs = open_weights(source), open_weights(whole)
    assert ours.names() == theirs.names()
    for name in ours.names():
        assert torch.equal(ours.vector(name), theirs.vector(name)), name


def test_the_tokenizer_is_the_first_parts(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_CACHE", str(split / "cache"))
    files = {source_of(split / name).tokenizer_file for name in NAMES}
    assert len(files) == 1
    assert None not in files


@pytest.mark.parametrize("gone", NAMES[1:])
def test_a_missing_part_is_named(split: Path, gone: str) -> None:
    (split / gone).unlink()
    with pytest.raises(ModelError, match=f"of its 3 parts these are missing: {gone}"):
        GgufFile(split / NAMES[0])


def test_a_part_with_another_name_is_refused(split: Path) -> None:
    (split / NAMES[0]).rename(split / "first.gguf")
    with pytest.raises(ModelError, match=r"first\.gguf: is one of 3 parts.* end in -00001-of-00003\.gguf"):
        GgufFile(split / "first.gguf")


def test_parts_in_each_others_place_are_refused(split: Path) -> None:
    shutil.copy(split / NAMES[1], split / NAMES[2])
    with pytest.raises(ModelError, match=r"is named part 3 of 3, but says split.count 3 and split.no 1"):
        GgufFile(split / NAMES[0])


def test_a_tensor_in_two_parts_is_refused(split: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    # Without its first tensor every later one moves to the part before.
    tiny_gguf(other / "m", kind="q8_0", parts=3, drop=("token_embd.weight",))
    shutil.copy(other / NAMES[1], split / NAMES[1])
    with pytest.raises(ModelError, match=r"holds the tensor blk\.\S+, which m-0000\d-of-00003\.gguf"):
        GgufFile(split / NAMES[0])


def test_a_tensor_that_no_part_holds_is_missed(split: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    tiny_gguf(other / "m", kind="q8_0", parts=3, drop=("output_norm.weight",))
    shutil.copy(other / NAMES[0], split / NAMES[0])
    with pytest.raises(ModelError, match=r"00001-of-00003\.gguf"):
        GgufFile(split / NAMES[0])


def test_part_names() -> None:
    assert part_names(NAMES[2]) == NAMES
    assert part_names("m.gguf") == ["m.gguf"]
    assert part_names("m-1-of-3.gguf") == ["m-1-of-3.gguf"]
    assert part_names("sub/m-00001-of-00002.gguf") == [f"sub/m-0000{i}-of-00002.gguf" for i in (1, 2)]
