"""Where the bench runs: a GPU, or a CPU that stands in for one; with FlashInfer, its double, or neither."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from sapwood import __version__
from sapwood.kernels.flashinfer import load_flashinfer, versions_found
from sapwood.srt.worker.device.accelerator import Accelerator, Cuda

DRY = "none: dry run on a CPU"


class NotHere(Exception):
    """What is to be measured is not there, and why."""


class Place:
    """`plain`: why plain torch is used instead of FlashInfer, if it is. `folder`: where a part of it lies.

    Raises NotHere where there is no GPU, unless it is a dry run.
    """

    def __init__(self, dry: bool, plain: str, folder: Path | None = None) -> None:
        self.dry, self.plain, self.folder = dry, plain, folder
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
        return self._flashinfer

    def versions(self) -> dict[str, Any]:
        found = versions_found()
        return {
            "sapwood": __version__, "python": platform.python_version(), "torch": found.torch,
            "torch_cuda": found.torch_cuda, "driver": found.driver, "driver_cuda": found.driver_cuda,
            "nvcc": found.nvcc, "flashinfer": found.flashinfer, "flashinfer_compiled": found.compiled,
        }  # fmt: skip


def missing(folder: Path | None) -> list[str]:
    """What FlashInfer asks for and is not there: packages that its own metadata names, and, of a part of its
    wheel in `folder`, sources that it compiles."""
    lacking: list[str] = []
    try:
        wanted = importlib.metadata.requires("flashinfer-python") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    for line in wanted:
        name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        if "extra ==" in line:
            continue
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(f"the package {name}")
    if folder is not None:
        parts = ("flashinfer", *(f"flashinfer/data/{part}" for part in ("csrc", "include", "cutlass")))
        lacking += [f"{folder / part}" for part in parts if not (folder / part).is_dir()]
    return lacking


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
