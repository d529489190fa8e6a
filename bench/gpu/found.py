"""What is there: the device, its memory, versions, and what FlashInfer lacks."""

from __future__ import annotations

import torch

from bench.gpu.here import Here
from bench.gpu.place import missing
from sapwood.kernels import toolkit
from sapwood.kernels.flashinfer import versions_found


def found(here: Here) -> None:
    place = here.place
    free, total = place.accelerator.memory()
    here.row(f"device: {place.hardware}", None, hardware=place.hardware, versions=place.versions())
    if not place.dry:
        major, minor = torch.cuda.get_device_capability(place.device)
        here.row(f"compute capability {major}.{minor}", None)
        here.row("memory", total / 2**30, "GiB")
        here.row("memory that is free", free / 2**30, "GiB")
    lacks, others = missing(place.folder)
    if not (place.dry or place.plain):
        lacks += [f"{name}, to compile" for name in toolkit.complete()]
    here.row(
        f"FlashInfer: {_state(here)}",
        None,
        missing=lacks,
        optional=others,
        versions_found=str(versions_found()),
    )
    for lack in lacks:
        here.row(f"FlashInfer lacks {lack}", None)
    if others:
        here.row(f"optional packages that are not there: {', '.join(others)}", None)


def _state(here: Here) -> str:
    if here.place.plain:
        return f"not used: {here.place.plain}"
    if here.place.dry:
        return "its double of the tests stands in"
    versions = versions_found()
    return versions.problem() or f"{versions.flashinfer}, to be imported"
