"""Every test here runs once for each instruction set that this build and this CPU have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sapwood.kernels import native


@pytest.fixture(params=native.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set under test, with one thread: more have tests of their own, and need idle cores."""
    if request.param not in native.available():
        pytest.skip(f"this CPU or build has no {request.param}")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield native.load(request.param, threads=1)
    native.load()
    torch.set_num_threads(torch_threads)
