"""Linear layers: right against torch, and a row's bits never depend on its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import (
    PackedWeight,
    embed,
    embed_reference,
    linear,
    linear_reference,
    pack,
    pack_reference,
)

FLOATS = ("float32", "float16")
SHAPES = ((16, 8), (1, 1), (33, 7), (100, 301), (577, 64), (48, 1025))


def weight(n: int, k: int, format: str, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    return pack(torch.randn(n, k, generator=generator) / k**0.5, format)


def apply(x: Tensor, w: PackedWeight) -> Tensor:
    out = torch.full((x.shape[0], w.n), float("nan"))
    linear(x, w, out)
    return out


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packing_equals_the_reference(n: int, k: int, format: str) -> None:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(1)) * 3
    packed = pack(values, format)
    assert torch.equal(packed.data, pack_reference(values, format).data)
    assert torch.equal(packed.unpack(), values.to(getattr(torch, format)).float())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_torch_within_rounding(n: int, k: int, format: str) -> None:
    w = weight(n, k, format)
    for m in (1, 2, 3, 5, 14, 15, 31):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        expected = torch.empty(m, n)
        linear_reference(x.double().float(), w, expected)
        torch.testing.assert_close(apply(x, w), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(100, 301), (77, 600), (576, 96)])
def test_a_row_alone_equals_the_row_in_any_batch(n: int, k: int, format: str) -> None:
    w = weight(n, k, format)
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([apply(row[None], w) for row in x])
    for m in range(2, 71):
        assert torch.equal(apply(x[:m], w), alone[:m]), m
        assert torch.equal(apply(x[70 - m :], w), alone[70 - m :]), m


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", FLOATS)
def test_a_long_batch_equals_its_rows(format: str) -> None:
    w = weight(40, 530, format)
    x = torch.randn(1030, 530, generator=torch.Generator().manual_seed(3))
    together = apply(x, w)
    for row in (0, 1, 513, 1022, 1023, 1024, 1029):
        assert torch.equal(together[row], apply(x[row : row + 1], w)[0]), row


@pytest.mark.parametrize("format", FLOATS)
def test_threads_change_nothing(isa: str, format: str) -> None:
    w = weight(700, 300, format)
    x = torch.randn(37, 300, generator=torch.Generator().manual_seed(4))
    results = []
    for threads in (1, 2, 3, 5):
        native.load(isa, threads)
        results.append((apply(x, w), apply(x[:1], w)))
    for many, one in results[1:]:
        assert torch.equal(many, results[0][0])
        assert torch.equal(one, results[0][1])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("m", [1, 20])
def test_accumulate_adds_the_finished_sum_once(m: int) -> None:
    w = weight(50, 700, "float32")
    x = torch.randn(m, 700, generator=torch.Generator().manual_seed(5))
    before = torch.randn(m, 50, generator=torch.Generator().manual_seed(6))
    out = before.clone()
    linear(x, w, out, accumulate=True)
    assert torch.equal(out, before + apply(x, w))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("m", [1, 9])
def test_strided_rows_are_read_and_written_in_place(m: int) -> None:
    w = weight(21, 40, "float32")
    wide = torch.randn(m, 64, generator=torch.Generator().manual_seed(7))
    out = torch.full((m, 30), 7.0)
    linear(wide[:, 3:43], w, out[:, 4:25])
    assert torch.equal(out[:, 4:25], apply(wide[:, 3:43].contiguous(), w))
    assert torch.equal(out[:, :4], torch.full((m, 4), 7.0))
    assert torch.equal(out[:, 25:], torch.full((m, 5), 7.0))


@pytest.mark.usefixtures("isa")
def test_no_rows_is_no_work() -> None:
    linear(torch.empty(0, 8), weight(16, 8, "float32"), torch.empty(0, 16))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", FLOATS)
def test_embedding_reads_rows_of_the_packed_weight(format: str) -> None:
    w = weight(83, 37, format)
    ids = torch.tensor([0, 15, 16, 82, 0, 41], dtype=torch.int32)
    out, expected = torch.empty(6, 37), torch.empty(6, 37)
    embed(ids, w, out)
    embed_reference(ids, w, expected)
    assert torch.equal(out, expected)
    assert torch.equal(out, w.unpack()[ids.long()])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("wrong", [-1, 83, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_an_error(wrong: int) -> None:
    ids = torch.tensor([3, wrong], dtype=torch.int32)
    with pytest.raises(IndexError, match=str(wrong)):
        embed(ids, weight(83, 37, "float32"), torch.empty(2, 37))


@pytest.mark.usefixtures("isa")
def test_wrong_tensors_are_refused_before_c_sees_them() -> None:
    w = weight(16, 8, "float32")
    out = torch.empty(2, 16)
    for x in (torch.zeros(2, 9), torch.zeros(2, 8).half(), torch.zeros(8, 2).T, torch.zeros(2, 8)[:, ::2]):
        with pytest.raises(ValueError, match="x must be"):
            linear(x, w, out)
    with pytest.raises(ValueError, match="out must be"):
        linear(torch.zeros(2, 8), w, torch.empty(3, 16))
    with pytest.raises(ValueError, match=r"float32, float16, q8.*not bfloat16"):
        PackedWeight(4, 4, "bfloat16")
    with pytest.raises(ValueError, match="float32 or float16, not q4"):
        pack(torch.zeros(4, 4), "q4")
