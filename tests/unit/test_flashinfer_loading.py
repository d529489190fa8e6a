"""FlashInfer that is missing or does not fit is refused with the versions found and the install line; what it
compiles is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sapwood.kernels import flashinfer as loading
from sapwood.kernels.flashinfer import INSTALL, Versions, jit_progress, load_flashinfer, versions_found

FITS = Versions("0.7.4", "2.13.0", "12.8", "570.86.10", "12.8", "12.8")


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH of one folder, which has what FlashInfer runs to compile."""
    folder = tmp_path / "tools"
    for name in ("ninja", "c++"):
        program(folder / name)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(loading.toolkit, "complete", list)
    return folder


def package(version: str | None) -> ModuleType:
    module = ModuleType("flashinfer")
    if version is not None:
        module.__version__ = version  # type: ignore[attr-defined]
    return module


def installed(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def refusal(found: Versions) -> str:
    with pytest.raises(RuntimeError) as error:
        load_flashinfer(found)
    assert str(found) in str(error.value)
    assert str(error.value).endswith(INSTALL)
    return str(error.value)


def test_what_fits_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = package("0.7.4")
    installed(monkeypatch, module)
    assert load_flashinfer(FITS) is module


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flashinfer": None}, "FlashInfer is not installed"),
        ({"flashinfer": "0.6.9"}, "FlashInfer must be 0.7.4 or newer"),
        ({"flashinfer": "0.7.3"}, "FlashInfer must be 0.7.4 or newer"),
        ({"flashinfer": "0.8.0"}, "older than 0.8"),
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, "this torch has no CUDA"),
        ({"driver": None, "driver_cuda": None}, "there is no NVIDIA driver"),
        ({"torch_cuda": "13.0"}, "the driver is too old for CUDA 13.0, which torch was built for"),
        ({"nvcc": "13.1"}, "nvcc 13.1 does not fit a torch built for CUDA 12.8"),
        ({"nvcc": "13.1", "driver_cuda": "13.1"}, "nvcc 13.1 does not fit a torch built for CUDA 12.8"),
        ({"torch_cuda": "13.0", "driver_cuda": "13.0"}, "nvcc 12.8 does not fit a torch built for CUDA 13.0"),
        (
            {"torch_cuda": "13.0", "driver_cuda": "13.0", "nvcc": None},
            "install the CUDA toolkit 13.0 or a newer 13.x, CUDA_HOME names it where there are several",
        ),
        (
            {"driver_cuda": "12.3"},
            "the driver is too old for what FlashInfer compiles: it must run CUDA 12.4",
        ),
        ({"nvcc": None}, "FlashInfer compiles its kernels with nvcc"),
        ({"nvcc": None, "jit_cache": "0.7.3"}, "flashinfer-jit-cache of FlashInfer's own version"),
        ({"nvcc": None, "jit_cache": "0.7.40+cu128"}, "flashinfer-jit-cache of FlashInfer's own version"),
        (
            {"nvcc": "12.6"},
            "nvcc 12.6 is too old. FlashInfer compiles its kernels with nvcc: install the CUDA toolkit 12.8",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    installed(monkeypatch, package("0.7.4"))
    assert reason in refusal(replace(FITS, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"torch_cuda": "12.9"},
        {"driver_cuda": "13.0"},
        {"nvcc": None, "jit_cache": "0.7.4"},
        {"nvcc": None, "jit_cache": "0.7.4+cu128"},
        {"nvcc": "11.5", "jit_cache": "0.7.4"},
        {"nvcc": "13.1", "jit_cache": "0.7.4"},
        {"nvcc": "12.8"},
        {"driver_cuda": "12.4"},
        {"nvcc": None, "jit_cache": "0.7.4", "driver_cuda": "12.3"},
        {"torch_cuda": "13.0", "driver_cuda": "13.0", "nvcc": "13.1"},
        {"driver": None},
        {"flashinfer": "0.7.10.post1"},
    ],
    ids=[
        "a minor version ahead",
        "a newer driver",
        "compiled kernels",
        "compiled kernels for a CUDA",
        "an old compiler that is not needed",
        "a new one",
        "the oldest compiler",
        "the oldest driver that unpacks what is compiled here",
        "an older one where nothing is compiled here",
        "another major version of all",
        "WSL",
        "a later patch",
    ],
)
def test_what_works_together_is_not_refused(change: dict[str, Any]) -> None:
    assert replace(FITS, **change).problem() is None


def test_every_version_found_is_named() -> None:
    text = str(FITS)
    for part in ("FlashInfer 0.7.4", "torch 2.13.0 built for CUDA 12.8", "driver 570.86.10", "nvcc 12.8"):
        assert part in text
    nothing = str(Versions(None, "2.13.0+cpu", None, None, None, None))
    assert str(replace(FITS, jit_cache="0.7.3")).endswith("compiled kernels 0.7.3")
    assert nothing == "FlashInfer none, torch 2.13.0+cpu built without CUDA, no driver, nvcc none"


def test_a_package_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert "FlashInfer cannot be imported: " in refusal(FITS)


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.12: cannot open shared object file"),
        AttributeError("module 'torch' has no attribute 'float4_e2m1fn_x2'"),
        RuntimeError("flashinfer-cubin version (0.7.3) does not match flashinfer version (0.7.4)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_import_that_fails_otherwise_is_told_with_the_versions(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_name: str) -> Any:
        raise error

    monkeypatch.setattr(loading.importlib, "import_module", fail)
    assert f"FlashInfer cannot be imported: {type(error).__name__}: {error}" in refusal(FITS)


def test_kernels_of_another_version_may_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(FITS, nvcc=None, jit_cache="0.7.3")
    assert found.problem() is not None
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert found.problem() is None


def test_metadata_is_believed_more_than_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, package("0.7.0"))
    assert load_flashinfer(FITS) is sys.modules["flashinfer"]
    module = package("0.0.0+unknown")
    installed(monkeypatch, module)
    assert load_flashinfer(FITS) is module
    assert load_flashinfer(replace(FITS, flashinfer=loading._UNKNOWN)) is module


def test_compiled_kernels_are_compared_when_the_version_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, package("0.7.5"))
    found = replace(FITS, flashinfer=loading._UNKNOWN, nvcc=None, jit_cache="0.7.4")
    with pytest.raises(RuntimeError, match=r"FlashInfer's own version.*FlashInfer 0\.7\.5"):
        load_flashinfer(found)
    assert load_flashinfer(replace(found, jit_cache="0.7.5+cu128")) is sys.modules["flashinfer"]


def test_packages_are_found_by_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"flashinfer-python": "0.7.4", "flashinfer-jit-cache": "0.7.3+cu128"}
    monkeypatch.setattr(loading.importlib.metadata, "version", there.__getitem__)
    found = versions_found(torch_like("12.8", 12080))
    assert (found.flashinfer, found.jit_cache, found.compiled) == ("0.7.4", "0.7.3+cu128", False)


def test_a_copy_without_metadata_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, package("0.6.1"))
    with pytest.raises(RuntimeError, match=r"must be 0\.7\.4 or newer.*FlashInfer 0\.6\.1"):
        load_flashinfer(replace(FITS, flashinfer=loading._UNKNOWN))
    installed(monkeypatch, package("0.7.4"))
    assert load_flashinfer(replace(FITS, flashinfer=loading._UNKNOWN)) is sys.modules["flashinfer"]


@pytest.mark.parametrize("told_by", ["the package", "the interpreter"])
def test_ninja_is_found_in_an_environment_that_is_not_activated(
    monkeypatch: pytest.MonkeyPatch, tools: Path, tmp_path: Path, told_by: str
) -> None:
    installed(monkeypatch, package("0.7.4"))
    (tools / "ninja").unlink()
    ninja = program(tmp_path / "venv" / "bin" / "ninja")
    scripts = ModuleType("ninja")
    if told_by == "the package":
        scripts.BIN_DIR = str(ninja.parent)  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(sys, "executable", str(ninja.parent / "python"))
    monkeypatch.setitem(sys.modules, "ninja", scripts)
    load_flashinfer(FITS)
    assert shutil.which("ninja") == str(ninja)
    assert shutil.which("c++") == str(tools / "c++"), "what was there before is there still"
    load_flashinfer(FITS)
    assert os.environ["PATH"] == f"{ninja.parent}{os.pathsep}{tools}", "once is enough"


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("ninja", "FlashInfer compiles its kernels with ninja: pip install ninja"),
        (
            "c++",
            r"with a C++ compiler, and there is no c++: install one (apt install g++), or name it in CXX",
        ),
    ],
)
def test_without_what_compiles_is_told(
    monkeypatch: pytest.MonkeyPatch, tools: Path, tmp_path: Path, lacks: str, reason: str
) -> None:
    installed(monkeypatch, package("0.7.4"))
    (tools / lacks).unlink()
    monkeypatch.setattr(loading, "_script_folders", lambda: [str(tmp_path / "none")])
    assert reason in refusal(FITS)
    load_flashinfer(replace(FITS, jit_cache="0.7.4"))


def test_another_compiler_may_be_named(monkeypatch: pytest.MonkeyPatch, tools: Path) -> None:
    installed(monkeypatch, package("0.7.4"))
    (tools / "c++").unlink()
    program(tools / "clang++")
    monkeypatch.setenv("CXX", "clang++ -stdlib=libstdc++")
    load_flashinfer(FITS)
    monkeypatch.setenv("CXX", "g++-99")
    assert "there is no g++-99" in refusal(FITS)


def torch_like(cuda: str | None, runs: int) -> Any:
    native = SimpleNamespace(_cuda_getDriverVersion=lambda: runs) if cuda else SimpleNamespace()
    return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda), _C=native)


def test_versions_are_read_from_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    nvcc.chmod(0o755)
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed Jan 8 2025\nGCC 12.3.0\n"
    )
    monkeypatch.setenv("FLASHINFER_NVCC", str(nvcc))
    monkeypatch.setattr(loading, "_DRIVER", driver)
    found = versions_found(torch_like("12.8", 12090))
    assert (found.torch_cuda, found.driver_cuda, found.driver, found.nvcc) == (
        "12.8", "12.9", "570.86.10", "12.9",
    )  # fmt: skip
    monkeypatch.setenv("FLASHINFER_NVCC", str(tmp_path / "none"))
    monkeypatch.setattr(loading, "_DRIVER", tmp_path / "none")
    found = versions_found(torch_like(None, 0))
    assert (found.torch_cuda, found.driver_cuda, found.driver, found.nvcc) == (None, None, None, None)


def test_importing_this_imports_neither_torch_nor_flashinfer() -> None:
    code = "import sys, sapwood.kernels.flashinfer; print({'torch', 'flashinfer'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "set()"


class Spec:
    """A kernel as flashinfer.jit.core has them."""

    name = "batch_decode"

    def __init__(self, compiled: bool, work: Any = lambda: None) -> None:
        self.is_compiled, self._work = compiled, work

    def build_and_load(self) -> str:
        self._work()
        return "loaded"


def compiling() -> tuple[Any, type[Spec]]:
    """A FlashInfer whose kernels are of this type."""

    class Own(Spec):
        build_and_load = Spec.build_and_load

    return SimpleNamespace(jit=SimpleNamespace(core=SimpleNamespace(JitSpec=Own))), Own


def test_a_kernel_that_is_compiled_is_told_before_meanwhile_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = iter([3.0])
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: next(begun, 10.0)))
    flashinfer, spec = compiling()
    told: list[str] = []
    twice = threading.Event()

    def log(line: str) -> None:
        told.append(line)
        if len(told) >= 3:
            twice.set()

    with jit_progress(flashinfer, log, every=0.01):
        assert spec(False, lambda: twice.wait(10)).build_and_load() == "loaded"
    assert told[0].startswith("compiling batch_decode")
    assert told[1].startswith("still compiling batch_decode, 7 s")
    assert told[-1].startswith("compiled batch_decode in 7 s")
    before = list(told)
    spec(False).build_and_load()
    assert told == before, "outside nothing is told"


def test_nothing_is_said_of_a_kernel_that_is_there() -> None:
    flashinfer, spec = compiling()
    told: list[str] = []
    with jit_progress(flashinfer, told.append):
        assert spec(True).build_and_load() == "loaded"
    assert told == []


def test_a_failure_is_the_compilers_own_and_ends_what_is_told() -> None:
    flashinfer, spec = compiling()
    told: list[str] = []

    def fail() -> None:
        raise RuntimeError("Ninja build failed.")

    with jit_progress(flashinfer, told.append, every=60), pytest.raises(RuntimeError, match="Ninja"):
        spec(False, fail).build_and_load()
    assert len(told) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "jit progress"]


def test_a_flashinfer_that_compiles_otherwise_is_left_alone() -> None:
    for module in (
        SimpleNamespace(),
        SimpleNamespace(jit=SimpleNamespace(core=SimpleNamespace(JitSpec=int))),
    ):
        with jit_progress(module, print):
            pass
