"""What FlashInfer's kernels need beside nvcc to compile: headers and libraries that a toolkit may lack, and
that lie elsewhere then, in NVIDIA's packages for Python or with the driver."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

HEADERS = ("cuda_runtime.h", "cublasLt.h", "curand.h", "curand_kernel.h")
_USUAL = Path("/usr/local/cuda")


def complete() -> list[str]:
    """Let compilers that this process starts find what the toolkit lacks, by CUDA_HOME, CPLUS_INCLUDE_PATH
    and LIBRARY_PATH of its environment, and return what is nowhere. Where nothing lacks nothing is changed.
    """
    home = _home()
    lacking = [] if shutil.which(compiler()) else [compiler()]
    lacking += [name for name in HEADERS if not _has(home, name) and not _found_header(name)]
    own = [path for pattern in ("lib", "targets/*/lib") for path in home.glob(f"{pattern}/libcudart.so*")]
    for name, places in (("cudart", own or _packaged("lib", "libcudart.so*")), ("cuda", _driver())):
        if not _linkable(home, name) and not _link(name, places):
            lacking.append(f"lib{name}.so")
    return lacking


def compiler() -> str:
    """That of C++, as FlashInfer calls it."""
    return (os.environ.get("CXX", "").split() or ["c++"])[0]


def _home() -> Path:
    """The folder in which FlashInfer will look: where that is only a script's that calls the toolkit, the
    toolkit's."""
    told = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    home = Path(told) if told else Path(nvcc).parent.parent if nvcc else _USUAL
    if not told and not _has(home, HEADERS[0]) and _has(_USUAL, HEADERS[0]):
        os.environ["CUDA_HOME"] = str(_USUAL)
        return _USUAL
    return home


def _has(home: Path, header: str) -> bool:
    return any((folder / header).is_file() for folder in (home / "include", *home.glob("targets/*/include")))


def _found_header(name: str) -> bool:
    folders = [folder for folder in _packaged("include") if (folder / name).is_file()]
    # Searched after the toolkit's own, whose headers may be of another version.
    return bool(folders) and _add("CPLUS_INCLUDE_PATH", folders[0])


def _packaged(*parts: str) -> list[Path]:
    """What NVIDIA's installed packages have there."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    return sorted(path for root in roots or () for path in Path(root).glob("/".join(("*", *parts))))


def _driver() -> list[Path]:
    """Its library, as this process loads it."""
    try:
        ctypes.CDLL("libcuda.so.1")
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [Path(line.split(maxsplit=5)[5]) for line in lines if "/libcuda.so" in line]


def _linkable(home: Path, name: str) -> bool:
    """Whether the linker finds it: FlashInfer names the toolkit's folders, the compiler knows its own."""
    file = f"lib{name}.so"
    if any((folder / file).exists() for folder in (home / "lib64", home / "lib64/stubs")):
        return True
    command = [compiler(), f"-print-file-name={file}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.sep in found


def _link(name: str, found: list[Path]) -> bool:
    """Under the name that a linker looks for, where FlashInfer keeps what it compiles."""
    if not found:
        return False
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    folder = base / ".cache" / "flashinfer" / "libraries"
    file = f"lib{name}.so"
    begun = folder / f"{file}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begun.symlink_to(found[0])
        begun.replace(folder / file)  # of a driver before, or by another rank just now
    except OSError:
        return False
    return _add("LIBRARY_PATH", folder)


def _add(variable: str, folder: Path) -> bool:
    folders = [known for known in os.environ.get(variable, "").split(os.pathsep) if known]
    if str(folder) not in folders:
        os.environ[variable] = os.pathsep.join([*folders, str(folder)])
    return True
