"""The sampler on a GPU draws what the CPU's does, with FlashInfer's filters and without. Only a draw within
float32's rounding of a border may differ: none of these is."""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.gpu import sampling_double
from tests.gpu.backends import the_package
from tests.sampler_twins import KINDS, Twins, compare


@pytest.mark.parametrize("filters", ["sorted", "flashinfer"])
@pytest.mark.parametrize(("drafts", "forks", "masks"), KINDS)
def test_the_gpu_draws_what_the_cpu_draws(drafts: bool, forks: bool, masks: bool, filters: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    flashinfer: ModuleType | None = None
    if filters == "flashinfer":
        flashinfer = the_package()
    twins = Twins(np.random.default_rng(3), torch.device("cuda"), flashinfer)
    compare(twins, drafts, forks, masks, torch.cuda.synchronize)


@pytest.mark.parametrize("name", sampling_double.SIGNATURES)
def test_the_filters_have_the_arguments_that_the_package_has(name: str) -> None:
    double = getattr(sampling_double, name)
    assert list(inspect.signature(double).parameters) == sampling_double.SIGNATURES[name]
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    assert list(inspect.signature(getattr(flashinfer, name)).parameters) == sampling_double.SIGNATURES[name]
