"""Attention is tested wherever it can run; tests take what they compare from these."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from sapwood.kernels import native
from tests.gpu.backends import PLATFORMS, Backend, platform_of
from tests.gpu.steps import Platform


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are small here: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _kernels() -> Iterator[None]:
    """What needs the C++ kernels is skipped where they are not built."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("sapwood.kernels._C") is None:
            patch.setattr(native, "_import_extension", lambda: pytest.skip("the C++ kernels are not built"))
        yield


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> Platform:
    """FlashInfer or its double, with one set of types."""
    return platform_of(request.param)


@pytest.fixture(params=[f"{kind}, {name}" for kind in ("flashinfer", "gathered") for name in PLATFORMS])
def backend(request: pytest.FixtureRequest) -> Backend:
    """An attention of either kind on every platform."""
    return Backend(*request.param.split(", "))
