"""Where the bench runs: a GPU, or a CPU that stands in for one; with FlashInfer, its double, or neither."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.parts import CASCADE, FA3, OPS
from sapwood import __version__
from sapwood.kernels.flashinfer import load_flashinfer, versions_found
from sapwood.srt.worker.device.accelerator import Accelerator, Cuda

DRY = "none: dry run on a CPU"
WANTED = ("apache-tvm-ffi", "einops", "filelock", "ninja", "numpy", "nvidia-ml-py", "packaging", "torch")
"""The packages without which it cannot be imported, or compiles nothing here."""
SOURCES = (
    "flashinfer/__init__.py", "flashinfer/data/csrc/batch_prefill.cu", "flashinfer/data/include/flashinfer",
    "flashinfer/data/cccl/cub", "flashinfer/data/cutlass/include/cute",
    "flashinfer/data/cutlass/tools/util/include", "flashinfer/data/spdlog/include",
)  # fmt: skip
"""Of its wheel, one for each folder that is needed to compile."""


class NotHere(Exception):
    """What is to be measured is not there, and why."""


class Place:
    """`plain`: why plain torch is used instead of FlashInfer, if it is; `without`: what of FlashInfer is not.
    `folder`: where a part of its wheel lies.

    Raises NotHere where there is no GPU, unless it is a dry run.
    """

    def __init__(
        self, dry: bool, plain: str, folder: Path | None = None, without: Sequence[str] = ()
    ) -> None:
        self.dry, self.plain, self.folder = dry, plain, folder
        self.without = set(without)
        self._flashinfer: Any = None
        if not dry and not torch.cuda.is_available():
            raise NotHere(f"torch {torch.__version__} sees no GPU (found: {versions_found()}); see --dry-run")
        self.accelerator: Accelerator = _stand_in() if dry else Cuda(0)
        self.device = self.accelerator.device

    @property
    def hardware(self) -> str:
        return DRY if self.dry else torch.cuda.get_device_name(self.device)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def flashinfer(self) -> Any:
        """The package (in a dry run the tests' double); None where `plain` says why not. Raises NotHere with
        the versions found."""
        if self.plain:
            return None
        if self._flashinfer is None:
            try:
                self._flashinfer = _double() if self.dry else load_flashinfer()
            except RuntimeError as e:
                self.plain = str(e)
                raise NotHere(self.plain) from e
        lost = self.without & {FA3, CASCADE}
        return _Partly(self._flashinfer, lost) if lost else self._flashinfer

    def operations(self) -> Any:
        """The package as it is used for all but attention; None: plain torch."""
        return None if OPS in self.without else self.flashinfer()

    def versions(self) -> dict[str, Any]:
        found = versions_found()
        return {
            "sapwood": __version__, "python": platform.python_version(), "torch": found.torch,
            "torch_cuda": found.torch_cuda, "driver": found.driver, "driver_cuda": found.driver_cuda,
            "nvcc": found.nvcc, "flashinfer": found.flashinfer, "flashinfer_compiled": found.compiled,
        }  # fmt: skip


class _Partly:
    """FlashInfer without some of its kernels: FlashAttention 3, of which the older one takes the place, or
    the merging of a cascade's levels, which is then not called in earnest."""

    def __init__(self, flashinfer: Any, lost: set[str]) -> None:
        self._flashinfer, self._lost = flashinfer, lost

    def __getattr__(self, name: str) -> Any:
        kind = getattr(self._flashinfer, name)
        if name == "BatchPrefillWithPagedKVCacheWrapper" and FA3 in self._lost:
            return lambda *args, **options: kind(*args, **(options | {"backend": "fa2"}))
        if name == "merge_state_in_place" and CASCADE in self._lost:
            return lambda *args: None
        return kind


def missing(folder: Path | None) -> tuple[list[str], list[str]]:
    """What FlashInfer needs here and is not there, packages and, of a part of its wheel in `folder`, sources
    that it compiles; and packages that its metadata names too."""
    try:
        named = importlib.metadata.requires("flashinfer-python") or []
    except importlib.metadata.PackageNotFoundError:
        named = []
    others = {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in named if "extra ==" not in line}
    lacking = [f"the package {name}" for name in WANTED if not _installed(name)]
    if folder is not None:
        lacking += [str(folder / part) for part in SOURCES if not (folder / part).exists()]
    return lacking, sorted(name for name in others - set(WANTED) if not _installed(name))


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def put_first(folder: Path | None) -> None:
    """What is imported comes from `folder` if it is there, here and in the processes that are started."""
    if folder is not None:
        sys.path.insert(0, str(folder))
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([others] if others else [])])


def _stand_in() -> Accelerator:
    from tests.gpu.host_accelerator import HostAccelerator

    return HostAccelerator()


def _double() -> Any:
    from tests.gpu.package_double import package

    return package()
