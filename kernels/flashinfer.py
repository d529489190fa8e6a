"""FlashInfer on first use: what is missing is told with the versions found, and so is what is compiled."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from sapwood.kernels import toolkit

INSTALL = "pip install 'sapwood[cuda]'"
_log = logging.getLogger("sapwood")

_LEAST, _BEYOND = (0, 7, 4), (0, 8, 0)
"""The versions whose functions are called here as they are: those before want a larger workspace, and a next
one may name its arguments otherwise."""
_LEAST_NVCC = (12, 8, 0)
"""The first toolkit that knows --compress-mode, which FlashInfer has for each kernel."""
_LEAST_DRIVER = (12, 4, 0)
"""The first driver, by the CUDA that it runs, which unpacks what is compressed so."""

_UNKNOWN = "of unknown version"
_SOURCE = "0.0.0+unknown"
"""What FlashInfer says of itself where it was not built."""
_BROKEN = (ImportError, OSError, AttributeError, RuntimeError)
"""What importing it raises where a library of it is missing or is of another version."""
_DRIVER = Path("/proc/driver/nvidia/version")
_TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class Versions:
    """What was found, None for what there is not.

    `torch_cuda`: what torch was built for; `driver_cuda`: the highest that the driver runs; `nvcc`: the
    toolkit's compiler; `jit_cache`: FlashInfer's compiled kernels.
    """

    flashinfer: str | None
    torch: str
    torch_cuda: str | None
    driver: str | None
    driver_cuda: str | None
    nvcc: str | None
    jit_cache: str | None = None

    @property
    def compiled(self) -> bool:
        """Whether there are compiled kernels that FlashInfer will take: those of its own version."""
        if self.jit_cache is None or self.flashinfer is None:
            return False
        unchecked = self.flashinfer == _UNKNOWN or bool(os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"))
        return unchecked or self.jit_cache.split("+")[0] == self.flashinfer

    def __str__(self) -> str:
        built = f"built for CUDA {self.torch_cuda}" if self.torch_cuda else "built without CUDA"
        driver = f"driver {self.driver or 'of unknown version'}, which runs CUDA up to {self.driver_cuda}"
        return (
            f"FlashInfer {self.flashinfer or 'none'}, torch {self.torch} {built}, "
            f"{driver if self.driver_cuda else 'no driver'}, nvcc {self.nvcc or 'none'}"
            f"{f', compiled kernels {self.jit_cache}' if self.jit_cache else ''}"
        )

    def problem(self) -> str | None:
        """Why FlashInfer cannot run with these, if so."""
        if self.torch_cuda is None:
            return "this torch has no CUDA: it must be replaced by a build that has"
        if self.driver_cuda is None:
            return "there is no NVIDIA driver"
        if _parsed(self.torch_cuda)[0] > _parsed(self.driver_cuda)[0]:
            return f"the driver is too old for CUDA {self.torch_cuda}, which torch was built for"
        if self.flashinfer is None:
            return "FlashInfer is not installed"
        if self.flashinfer != _UNKNOWN and not _LEAST <= _parsed(self.flashinfer) < _BEYOND:
            return f"FlashInfer must be {_dotted(_LEAST)} or newer, and older than {_dotted(_BEYOND[:2])}"
        return None if self.compiled else self._compiler_problem(self.torch_cuda, self.driver_cuda)

    def _compiler_problem(self, torch_cuda: str, driver_cuda: str) -> str | None:
        major = _parsed(torch_cuda)[0]
        least = max(_LEAST_NVCC, (major, 0, 0))
        wanted = (
            "FlashInfer compiles its kernels with nvcc: install the CUDA toolkit "
            f"{_dotted(least[:2])} or a newer {major}.x, CUDA_HOME names it where there are several (or the "
            "package flashinfer-jit-cache of FlashInfer's own version, which has them compiled)"
        )
        if self.nvcc is None:
            return wanted
        if major != _parsed(self.nvcc)[0]:
            # Kernels are linked with the toolkit's own runtime library, of which torch has brought another.
            return f"nvcc {self.nvcc} does not fit a torch built for CUDA {torch_cuda}. {wanted}"
        if _parsed(self.nvcc) < least:
            return f"nvcc {self.nvcc} is too old. {wanted}"
        if _parsed(driver_cuda) < _LEAST_DRIVER:
            return (
                "the driver is too old for what FlashInfer compiles: it must run CUDA "
                f"{_dotted(_LEAST_DRIVER[:2])} or newer"
            )
        return None


def versions_found(torch: Any = None) -> Versions:
    """Those of this machine; nothing of FlashInfer is imported."""
    torch = torch or importlib.import_module("torch")
    runs = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return Versions(
        flashinfer=_installed("flashinfer-python", "flashinfer"),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        driver=_driver_version(),
        driver_cuda=f"{runs // 1000}.{runs % 1000 // 10}" if runs else None,
        nvcc=_nvcc_version(),
        jit_cache=_installed("flashinfer-jit-cache", "flashinfer_jit_cache"),
    )


def load_flashinfer(found: Versions | None = None) -> ModuleType:
    """The package, imported (which takes seconds) on the first call.

    Raises RuntimeError that says what does not fit, which versions were found, and how to install.
    """
    found = found or versions_found()
    if (problem := found.problem() or _tools_problem(found)) is not None:
        raise _Unfit(problem, found)
    if not found.compiled and (lacking := toolkit.complete()):
        _log.warning(
            "FlashInfer's kernels may not compile: %s is found neither in the CUDA toolkit nor beside torch",
            ", ".join(lacking),
        )
    try:
        module = importlib.import_module("flashinfer")
    except _BROKEN as e:
        raise _Unfit(f"FlashInfer cannot be imported: {type(e).__name__}: {e}", found) from e
    told = getattr(module, "__version__", _SOURCE)
    if found.flashinfer == _UNKNOWN and told != _SOURCE:
        # A copy without the package's metadata tells its version only now.
        found = replace(found, flashinfer=told)
    if (problem := found.problem() or _tools_problem(found)) is not None:
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


def _installed(package: str, module: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _UNKNOWN if importlib.util.find_spec(module) is not None else None


def _tools_problem(found: Versions) -> str | None:
    """Why kernels cannot be compiled here though nvcc is there, if so. FlashInfer runs plain `ninja`, for
    kernels that are compiled already too: where that is in an environment which is not activated, its folder
    is added to this process's PATH."""
    if found.compiled:
        return None
    if shutil.which("ninja") is None:
        folder = next((folder for folder in _script_folders() if shutil.which("ninja", path=folder)), None)
        if folder is None:
            return "FlashInfer compiles its kernels with ninja: pip install ninja"
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    if shutil.which(toolkit.compiler()) is None:
        return (
            "FlashInfer compiles its kernels with a C++ compiler, and there is no "
            f"{toolkit.compiler()}: install one (apt install g++), or name it in CXX"
        )
    return None


def _script_folders() -> list[str]:
    """Where pip has put ninja, if it has: first where the package itself says."""
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    try:
        return [importlib.import_module("ninja").BIN_DIR, *folders]
    except (ImportError, AttributeError):
        return folders


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


def _parsed(version: str) -> tuple[int, int, int]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
