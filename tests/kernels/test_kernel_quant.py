"""GGUF blocks: bit for bit what the format's reference says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import embed, pack
from sapwood.kernels.ops.quant import (
    KINDS,
    dequantise,
    dequantise_reference,
    pack_quantised,
    pack_quantised_reference,
    row_bytes,
)


def blocks_of(kind: str, n: int, k: int) -> torch.Tensor:
    """Random blocks whose halves are finite."""
    generator = torch.Generator().manual_seed(n * k)
    _code, weights, size = KINDS[kind]
    if kind == "f32":
        return torch.randn(n, k, generator=generator).view(torch.uint8)
    if kind == "f16":
        return torch.randn(n, k, generator=generator).half().view(torch.uint8)
    blocks = torch.randint(0, 256, (n * k // weights, size), generator=generator, dtype=torch.uint8)
    halves = 2 if kind == "q4_1" else 1
    scales = torch.randn(len(blocks), halves, generator=generator).half()
    blocks[:, : 2 * halves] = scales.view(torch.uint8).reshape(len(blocks), 2 * halves)
    return blocks


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(5, 32), (17, 96), (33, 576)])
def test_dequantise_equals_the_reference(kind: str, n: int, k: int) -> None:
    blocks = blocks_of(kind, n, k)
    assert torch.equal(dequantise(blocks, kind, n, k), dequantise_reference(blocks, kind, n, k))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_1"])
def test_dequantise_equals_the_gguf_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = blocks_of(kind, 8, 64)
    quantised = blocks.numpy().reshape(8, row_bytes(kind, 64))
    expected = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(dequantise(blocks, kind, 8, 64).numpy(), expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_packing_blocks_equals_packing_their_floats(kind: str, dtype: torch.dtype) -> None:
    for n, k in ((16, 32), (37, 320), (50, 576)):
        blocks = blocks_of(kind, n, k)
        packed = pack_quantised(blocks, kind, n, k, dtype)
        assert torch.equal(packed.data, pack(dequantise(blocks, kind, n, k), dtype).data)
        assert torch.equal(packed.data, pack_quantised_reference(blocks, kind, n, k, dtype).data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_threads_change_nothing(isa: str, dtype: torch.dtype) -> None:
    blocks = blocks_of("q4_1", 300, 320)
    results = []
    for threads in (1, 2, 5):
        native.load(isa, threads)
        packed = pack_quantised(blocks, "q4_1", 300, 320, dtype)
        out = torch.empty(600, 320)
        embed(torch.arange(300, dtype=torch.int32).repeat(2), packed, out)
        results.append((dequantise(blocks, "q4_1", 300, 320), packed.data, out))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.usefixtures("isa")
def test_every_half_is_converted_as_torch_does() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    floats = dequantise(halves.view(torch.uint8), "f16", 256, 256).view(-1)
    assert torch.equal(floats.nan_to_num(1.5), halves.float().nan_to_num(1.5))
    assert torch.equal(floats.signbit(), halves.float().signbit())


@pytest.mark.usefixtures("isa")
def test_floats_are_rounded_to_halves_as_torch_does() -> None:
    halves = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middle = (halves[:-1] + halves[1:]) / 2
    near = torch.cat([middle, middle.nextafter(halves[1:]), middle.nextafter(halves[:-1])])
    edges = torch.tensor([65504.0, 65519.9, 65520.0, 1e30, float("inf"), 1e-8, 2.9e-8, 2.98e-8, 3e-8, 0.0])
    values = torch.cat([near, edges, -near, -edges])
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(-1, 16)
    assert torch.equal(pack(values, torch.float16).unpack(), values.half().float())


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown block format 'q6_k'"):
        row_bytes("q6_k", 256)
    with pytest.raises(ValueError, match="whole q4_1 blocks"):
        row_bytes("q4_1", 40)
    with pytest.raises(ValueError, match="q8_0 blocks"):
        dequantise(torch.zeros(33, dtype=torch.uint8), "q8_0", 1, 32)
