"""The attentions under test, and where: on a CPU with FlashInfer's double, on a GPU with the package itself,
and on both without it, in torch."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt.worker.attention.flashinfer import WORKSPACE_BYTES, FlashInferAttention
from sapwood.srt.worker.attention.gathered import GatheredAttention
from tests.gpu import flashinfer_double, wide_double
from tests.gpu.steps import Platform, World, spec_of

TYPES = {
    "float32": (torch.float32, torch.float32, 2e-5),
    "float16": (torch.float16, torch.float16, 5e-3),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 4e-2),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn, 4e-2),
}
"""Of activations, of K and V, and how far a result of size 4 or less may be from float32's."""
ON_GPU = ("bfloat16", "fp8")
"""Each type is another set of kernels to be compiled; FlashInfer has none for float32."""
PLATFORMS = [f"double {types}" for types in TYPES] + [f"gpu {types}" for types in ON_GPU]


ONLY = "SAPWOOD_TEST_FLASHINFER"
"""The variable that says how much of the installed FlashInfer is tested: `nothing`; or what is `compiled`."""
UNCOMPILED = "its kernel is not compiled"


def the_package() -> ModuleType:
    """FlashInfer; skips where it is not installed, or not to be tested."""
    only = os.environ.get(ONLY)
    if only == "nothing":
        pytest.skip("FlashInfer is not to be tested")
    found: ModuleType = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    if only == "compiled":
        skip_uncompiled(importlib.import_module("flashinfer.jit.core").JitSpec)
    return found


def skip_uncompiled(spec: Any) -> None:
    """Where one of these would compile, its test is skipped."""
    load = spec.build_and_load
    if hasattr(load, "skips"):
        return

    def build_and_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_compiled:
            pytest.skip(UNCOMPILED)
        return load(self, *args, **kwargs)

    build_and_load.skips = True  # type: ignore[attr-defined]
    spec.build_and_load = build_and_load


def platform_of(name: str, package: bool = True) -> Platform:
    """One of PLATFORMS; skips where it is not. Without `package` FlashInfer need not be installed."""
    place, types = name.split()
    module: ModuleType | None = wide_double if types == "float32" else flashinfer_double
    if place == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        module = None
        if package:
            module = the_package()
    return Platform(module, torch.device("cuda" if place == "gpu" else "cpu"), *TYPES[types])


def flashinfer_attention(world: World, flashinfer: Any = None, **options: Any) -> FlashInferAttention:
    platform = world.platform
    if platform.device.type == "cuda":
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=platform.device)
    else:
        # These zeros cost nothing until they are touched, and the double does not.
        workspace = torch.from_numpy(np.zeros(flashinfer_double.WORKSPACE, np.uint8))
    module = flashinfer or platform.flashinfer
    return FlashInferAttention(
        module, world.spec, world, platform.dtype, platform.device, workspace, **options
    )


class Backend:
    """One kind of attention on a platform; `tolerance` as that."""

    def __init__(self, kind: str, platform: str) -> None:
        self.platform = platform_of(platform, package=kind == "flashinfer")
        self.kind = kind
        self.tolerance = self.platform.tolerance

    def world(self, q_heads: int = 6, kv_heads: int = 2, **options: Any) -> World:
        return World(spec_of(q_heads, kv_heads, **options), self.platform)

    def attention(self, world: World) -> FlashInferAttention | GatheredAttention:
        if self.kind == "gathered":
            return GatheredAttention(world.spec, world, self.platform.device)
        return flashinfer_attention(world)
