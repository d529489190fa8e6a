"""What a CUDA toolkit lacks to compile FlashInfer's kernels is found elsewhere, or told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sapwood.kernels import toolkit

VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CXX")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit that is whole, and nothing elsewhere."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # what is set here is not what stays
        monkeypatch.delenv(name)
    folder = tmp_path / "cuda"
    for header in toolkit.HEADERS:
        touch(folder / "include" / header)
    touch(folder / "lib64/libcudart.so")
    touch(folder / "lib64/stubs/libcuda.so")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(toolkit, "_packaged", lambda *parts: [])
    monkeypatch.setattr(toolkit, "_driver", list)
    monkeypatch.setattr(toolkit, "_USUAL", tmp_path / "none")
    return folder


def touch(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def changed() -> set[str]:
    return {name for name in VARIABLES[1:] if name in os.environ}


def test_of_a_whole_toolkit_nothing_is_changed() -> None:
    assert toolkit.complete() == []
    assert not changed()


def test_what_is_nowhere_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(home)
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    lacking = ["no-such-compiler", *toolkit.HEADERS, "libcudart.so", "libcuda.so"]
    assert toolkit.complete() == lacking
    assert not changed() - {"CXX"}


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_headers_of_packages_come_after_the_toolkits_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "include/curand.h").unlink()
    touch(home / "include/cuda_runtime.h", "int toolkits;")
    package = touch(tmp_path / "nvidia/cu13/include/curand.h", '#include "cuda_runtime.h"').parent
    touch(package / "cuda_runtime.h", "int packages;")
    monkeypatch.setattr(toolkit, "_packaged", lambda *parts: [package] if parts == ("include",) else [])
    for _ in range(2):
        assert toolkit.complete() == []
        assert os.environ["CPLUS_INCLUDE_PATH"] == str(package)
    source = touch(tmp_path / "a.cpp", "#include <cuda_runtime.h>\n#include <curand.h>\n")
    command = ["c++", "-E", "-isystem", str(home / "include"), str(source)]
    assert "int toolkits;" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_drivers_library_is_linked_by_the_name_that_a_linker_wants(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "lib64/stubs/libcuda.so").unlink()
    empty = touch(tmp_path / "a.cpp", "int f() { return 1; }")
    driver = tmp_path / "libcuda.so.580.1"
    subprocess.run(["c++", "-shared", "-fPIC", str(empty), "-o", str(driver)], check=True)
    monkeypatch.setattr(toolkit, "_driver", lambda: [driver])
    assert toolkit.complete() == []
    first = os.environ["LIBRARY_PATH"]
    assert toolkit.complete() == []
    assert os.environ["LIBRARY_PATH"] == first, "it is there now"
    command = ["c++", "-shared", "-fPIC", str(empty), "-lcuda", "-o", str(tmp_path / "kernel.so")]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_script_that_calls_nvcc_is_not_where_the_toolkit_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(toolkit, "_USUAL", home)
    script = touch(tmp_path / "local/bin/nvcc", "#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    assert toolkit.complete() == []
    assert os.environ["CUDA_HOME"] == str(home)


def test_packages_are_looked_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    wanted = touch(tmp_path / "nvidia/curand/include/curand.h").parent
    monkeypatch.syspath_prepend(str(tmp_path))
    assert wanted in toolkit._packaged("include")
