"""FlashInfer on first use: what is missing is told with the versions found, and so is what is compiled."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALL = "pip install 'sapwood[cuda]'"

_LEAST, _BEYOND = (0, 7), (0, 8)
"""The versions whose functions are called here as they are; a next one may name its arguments otherwise."""

_UNKNOWN = "of unknown version"
_DRIVER = Path("/proc/driver/nvidia/version")
_TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class Versions:
    """What was found, None for what there is not.

    `torch_cuda`: what torch was built for; `driver_cuda`: the highest that the driver runs; `nvcc`: the
    toolkit's compiler; `compiled`: whether the package of FlashInfer's compiled kernels is there.
    """

    flashinfer: str | None
    torch: str
    torch_cuda: str | None
    driver: str | None
    driver_cuda: str | None
    nvcc: str | None
    compiled: bool = False

    def __str__(self) -> str:
        built = f"built for CUDA {self.torch_cuda}" if self.torch_cuda else "built without CUDA"
        driver = f"driver {self.driver or 'of unknown version'}, which runs CUDA up to {self.driver_cuda}"
        return (
            f"FlashInfer {self.flashinfer or 'none'}, torch {self.torch} {built}, "
            f"{driver if self.driver_cuda else 'no driver'}, nvcc {self.nvcc or 'none'}"
        )

    def problem(self) -> str | None:
        """Why FlashInfer cannot run with these, if so."""
        if self.torch_cuda is None:
            return "this torch has no CUDA: it must be replaced by a build that has"
        if self.driver_cuda is None:
            return "there is no NVIDIA driver"
        if _major(self.torch_cuda) > _major(self.driver_cuda):
            return f"the driver is too old for CUDA {self.torch_cuda}, which torch was built for"
        if self.flashinfer is None:
            return "FlashInfer is not installed"
        if self.flashinfer != _UNKNOWN and not _LEAST <= _pair(self.flashinfer) < _BEYOND:
            return f"FlashInfer must be {_dotted(_LEAST)} or newer, and older than {_dotted(_BEYOND)}"
        if self.nvcc is None and not self.compiled:
            return (
                "FlashInfer compiles its kernels with nvcc: install the CUDA toolkit (or the package "
                "flashinfer-jit-cache, which has them compiled)"
            )
        if self.nvcc is not None and _major(self.nvcc) > _major(self.driver_cuda):
            return f"the driver is too old for what nvcc {self.nvcc} compiles"
        return None


def versions_found(torch: Any = None) -> Versions:
    """Those of this machine; nothing of FlashInfer is imported."""
    torch = torch or importlib.import_module("torch")
    runs = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return Versions(
        flashinfer=_flashinfer_version(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        driver=_driver_version(),
        driver_cuda=f"{runs // 1000}.{runs % 1000 // 10}" if runs else None,
        nvcc=_nvcc_version(),
        compiled=importlib.util.find_spec("flashinfer_jit_cache") is not None,
    )


def load_flashinfer(found: Versions | None = None) -> ModuleType:
    """The package, imported (which takes seconds) on the first call.

    Raises RuntimeError that says what does not fit, which versions were found, and how to install.
    """
    found = found or versions_found()
    if (problem := found.problem()) is not None:
        raise _Unfit(problem, found)
    try:
        module = importlib.import_module("flashinfer")
    except ImportError as e:
        raise _Unfit(f"FlashInfer cannot be imported: {e}", found) from e
    # A copy without the package's metadata tells its version only now.
    found = replace(found, flashinfer=getattr(module, "__version__", found.flashinfer))
    if (problem := found.problem()) is not None:
        raise _Unfit(problem, found)
    return module


@contextmanager
def jit_progress(flashinfer: Any, log: Callable[[str], None], every: float = 10.0) -> Iterator[None]:
    """Inside, `log` is told which kernel FlashInfer compiles, again each `every` seconds while it does, and
    when it is done. A FlashInfer that compiles otherwise than known is left alone."""
    spec = getattr(getattr(getattr(flashinfer, "jit", None), "core", None), "JitSpec", None)
    load = getattr(spec, "build_and_load", None)
    if spec is None or load is None:
        yield
        return

    def build_and_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, log, every):
            return load(self, *args, **kwargs)

    spec.build_and_load = build_and_load
    try:
        yield
    finally:
        spec.build_and_load = load


@contextmanager
def _told(spec: Any, log: Callable[[str], None], every: float) -> Iterator[None]:
    """Nothing is said of a kernel that is there and needs no compiling."""
    name, began, done = getattr(spec, "name", "a kernel"), time.monotonic(), threading.Event()
    new = not getattr(spec, "is_compiled", False)
    if new:
        log(f"compiling {name}: once on this machine, about a minute")

    def tick() -> None:
        while not done.wait(every):
            log(f"still compiling {name}, {time.monotonic() - began:.0f} s so far")

    ticker = threading.Thread(target=tick, name="jit progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
    if new:
        log(f"compiled {name} in {time.monotonic() - began:.0f} s")


class _Unfit(RuntimeError):
    def __init__(self, problem: str, found: Versions) -> None:
        super().__init__(f"{problem} (found: {found}). To install: {INSTALL}")


def _flashinfer_version() -> str | None:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return _UNKNOWN if importlib.util.find_spec("flashinfer") is not None else None


def _driver_version() -> str | None:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None


def _nvcc_version() -> str | None:
    """Of the compiler that FlashInfer will take."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.environ.get("FLASHINFER_NVCC") or (f"{home}/bin/nvcc" if home else shutil.which("nvcc"))
    try:
        command = [nvcc or str(_TOOLKIT / "bin/nvcc"), "--version"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", told)
    return found[1] if found else None


def _pair(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _major(version: str) -> int:
    return _pair(version)[0]


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
