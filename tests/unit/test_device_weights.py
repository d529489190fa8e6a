"""Weights on their way to a device: rows in order, as they are stored, then in the type that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.kernels.ops.dense import (
    FP8,
)
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader import packing
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models import device_weights
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, HEAD
from sapwood.srt.models.weights import Part, Stored, WeightSource
from tests.models import source_of, tiny_llama

CPU = torch.device("cpu")
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Made:
    """A source whose matrices are given; `pieces` rows come at a time."""

    def __init__(self, pieces: int = 3, **matrices: Tensor) -> None:
        self._pieces, self._matrices = pieces, matrices

    def stored(self, part: Part) -> Stored:
        matrix = self._matrices[part.name]
        starts = range(0, len(matrix), self._pieces)
        return Stored(*matrix.shape, (matrix[begin : begin + self._pieces] for begin in starts))


def made(pieces: int = 3, **matrices: Tensor) -> Any:
    return Made(pieces, **matrices)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_lie_in_order_however_they_come(kind: torch.dtype) -> None:
    a, b = values(7, 16), values(5, 16, seed=1)
    ops = DeviceOps(CPU, kind)
    weight = ops.weight(made(a=a, b=b), [Part("b"), Part("a")])
    assert torch.equal(weight.data, torch.cat([b, a]).to(kind))
    assert weight.data.is_contiguous()
    assert weight.scale is None
    assert ops.rows(weight) == 12
    assert ops.summary() == f"{kind}".removeprefix("torch.") + " 0 MiB"


def test_float16_refuses_what_it_cannot_hold_by_name() -> None:
    large = values(7, 16)
    large[6, 3] = 70000.0
    source, parts = made(fine=values(7, 16), large=large), [Part("fine"), Part("large")]
    with pytest.raises(ModelError, match=r"^large holds values beyond 65504.*use --dtype bfloat16"):
        DeviceOps(CPU, torch.float16).weight(source, parts)
    held = DeviceOps(CPU, torch.bfloat16).weight(source, parts)
    assert held.data[13, 3] == 70144.0
    with pytest.raises(ModelError, match=r"^large holds values beyond 65504"):
        DeviceOps(CPU, torch.float16).weight(made(large=large.half()), [Part("large")])


def test_embedding_and_head_keep_their_16_bits() -> None:
    ops = DeviceOps(CPU, torch.bfloat16, quantization="fp8")
    source = made(**{EMBEDDING: values(32, 16), HEAD: values(32, 16), "other": values(32, 16)})
    assert ops.weight(source, [Part(EMBEDDING)]).scale is None
    assert ops.weight(source, [Part(HEAD)]).scale is None
    other = ops.weight(source, [Part("other")])
    assert other.scale is not None
    assert other.data.dtype is FP8
    torch.testing.assert_close(
        other.data.float() * other.scale[:, None], values(32, 16), rtol=2**-3, atol=2**-5
    )


def test_a_matrix_that_8_bits_do_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--quantization fp8 does not fit odd: .* not 20 x 16") as error:
        DeviceOps(CPU, torch.bfloat16, quantization="fp8").weight(made(odd=values(20, 16)), [Part("odd")])
    assert error.value.param == "quantization"


def test_a_ranks_rows_and_columns_are_those_of_the_file(tmp_path: Path) -> None:
    weights = open_weights(source_of(tiny_llama(tmp_path), skip_tokenizer_init=True))
    ops = DeviceOps(CPU, torch.float32)
    whole = torch.cat(list(weights.stored(Part(GATE)).pieces))
    cut = ops.weight(weights, [Part(GATE, rows=range(64, 96)), Part(UP, columns=None, rows=range(3))])
    assert torch.equal(cut.data[:32], whole[64:96])
    down = Part("model.layers.0.mlp.down_proj.weight", columns=range(64))
    assert ops.weight(weights, [down]).data.shape == (64, 64)


FILES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_as(path: Path, kind: torch.dtype) -> WeightSource:
    return open_weights(source_of(tiny_llama(path, dtype=kind), skip_tokenizer_init=True))


@pytest.mark.parametrize("kind", FILES.values(), ids=FILES)
def test_what_a_file_holds_is_given_as_it_is_stored(
    tmp_path: Path, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is computed on so, whole or in parts: nothing is lost, or gained, on the way."""
    monkeypatch.setattr(packing, "COPIED", 5 * 64)
    weights = stored_as(tmp_path, kind)
    exact = weights.vector(GATE)
    for part in (Part(GATE), Part(GATE, rows=range(7, 40)), Part(GATE, columns=range(16, 48))):
        cut = exact[part.rows.start : part.rows.stop] if part.rows else exact
        cut = cut[:, part.columns.start : part.columns.stop] if part.columns else cut
        stored = weights.stored(part)
        pieces = list(stored.pieces)
        assert (stored.n, stored.k) == cut.shape
        assert len(pieces) > 1
        assert {piece.dtype for piece in pieces} == {kind}
        assert torch.equal(torch.cat(pieces).float(), cut)
        for own in FILES.values():
            found = DeviceOps(CPU, own).weight(weights, [part]).data
            assert torch.equal(found, cut.to(own))


class Sent(TorchDispatchMode):
    """Copies from the host to the device (`meta`): each goes as it is, and nothing is converted before."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            target, source = (result, args[0]) if len(args) == 1 else args[:2]
            assert target.dtype is source.dtype or source.is_meta, "converted on the host"
            if target.is_meta and not source.is_meta:
                assert kwargs["non_blocking"] if len(args) == 1 else args[2]
                assert source.is_contiguous()
                self.kinds.append(source.dtype)
        return result


@pytest.mark.parametrize("columns", [None, range(64)])
@pytest.mark.parametrize("kind", FILES.values(), ids=FILES)
def test_weights_are_converted_on_the_device(
    tmp_path: Path, kind: torch.dtype, columns: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's one thread has only copies to make."""
    pinned: list[torch.dtype] = []

    def room(piece: Tensor) -> Tensor:
        pinned.append(piece.dtype)
        return torch.empty(piece.shape, dtype=piece.dtype).copy_(piece)

    monkeypatch.setattr(device_weights, "_pinned", room)
    down = [Part(f"model.layers.{i}.mlp.down_proj.weight", columns=columns) for i in range(2)]
    weights = stored_as(tmp_path, kind)
    with Sent() as sent:
        matrix = device_weights.device_matrix(weights, down, torch.device("meta"), torch.bfloat16)
    assert matrix.shape == (128, 64 if columns else 96)
    assert matrix.dtype is torch.bfloat16
    assert sent.kinds == pinned == [kind] * 2


def dummies(tmp_path: Path, device: torch.device | None) -> WeightSource:
    source = source_of(tiny_llama(tmp_path, weights=False), load_format="dummy", skip_tokenizer_init=True)
    return open_weights(source, device=device)


def test_dummy_weights_are_drawn_where_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, randn, seen = torch.device("cpu", 0), torch.randn, set()

    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        seen.add(kwargs["device"])
        return randn(*args, **kwargs)

    monkeypatch.setattr(torch, "randn", drawn)
    weights = dummies(tmp_path, device)
    for part, k in ((Part(GATE), 64), (Part(UP, columns=range(32)), 32)):
        stored = weights.stored(part)
        assert (stored.n, stored.k) == (96, k)
        assert torch.cat(list(stored.pieces)).shape == (96, k)
    assert seen == {device}


def test_a_decoder_of_dummies_is_the_same_in_every_process(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path, weights=False), load_format="dummy", skip_tokenizer_init=True)

    def gate_up() -> Tensor:
        weights = open_weights(source, device=CPU)
        return (
            Decoder(spec_of(source.config), weights, DeviceOps(CPU, torch.bfloat16), 64)
            .layers[1]
            .gate_up.data
        )

    assert torch.equal(gate_up(), gate_up())
    assert gate_up().float().std() == pytest.approx(64**-0.5, rel=0.05)
