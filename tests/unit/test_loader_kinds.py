"""Every storage type of GGUF gives the values that the gguf library gives, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from sapwood.kernels.ops.gemm import pack_codes
from sapwood.srt.loader import gguf_kinds
from sapwood.srt.loader.codes import common_format
from sapwood.srt.loader.gguf_kinds import KINDS, QUANTISED, codes_of, dequantise, format_of, kind_of
from tests.gguf_files import random_blocks

TYPES = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_library(kind: str) -> None:
    rows = random_blocks(kind, 7, 96)
    ours, theirs = dequantise(rows, kind), gguf.quants.dequantize(rows, TYPES[kind.upper()])
    assert ours.dtype == np.float32
    assert ours.shape == (7, 96 * KINDS[kind].values)
    assert np.isfinite(theirs).all()
    assert len(np.unique(theirs)) > 100
    assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_blocks(kind, 5, 11)
    whole = dequantise(rows, kind)
    monkeypatch.setattr(gguf_kinds, "PIECE", 3 * KINDS[kind].values)
    assert dequantise(rows, kind).tobytes() == whole.tobytes()


HOLDERS = {"q8": ("q8", "q8w"), "q4": ("q4", "q4w", "q8w"), "q4w": ("q4w", "q8w"), "q8w": ("q8w",)}


@pytest.mark.parametrize("kind", sorted(QUANTISED))
def test_packed_weights_hold_the_librarys_values(kind: str) -> None:
    """In every format that is to hold them: nothing is lost, not even a last bit (but the sign of a zero)."""
    rows = random_blocks(kind, 35, 3)
    theirs = gguf.quants.dequantize(rows, TYPES[kind.upper()])
    for format in HOLDERS[format_of(rows, kind)]:
        parts = codes_of(rows, kind).fit(format)
        codes, scales = torch.from_numpy(parts.codes), torch.from_numpy(parts.scales)
        lows = None if parts.lows is None else torch.from_numpy(parts.lows)
        assert np.array_equal(pack_codes(codes, scales, lows, format).unpack().numpy(), theirs), format


def test_a_low_beyond_half_precision_is_kept_in_a_float() -> None:
    rows = random_blocks("q4_0", 16, 3)
    assert format_of(rows, "q4_0") == "q4"
    rows[5, :2] = np.frombuffer(np.float16(-8192).tobytes(), np.uint8)
    assert format_of(rows, "q4_0") == "q4w"
    parts = codes_of(rows, "q4_0").fit("q4w")
    packed = pack_codes(*(torch.from_numpy(part) for part in parts[:3]), "q4w")
    assert np.array_equal(packed.unpack().numpy(), gguf.quants.dequantize(rows, TYPES.Q4_0))
    rows[5, :2] = np.frombuffer(np.float16(-8188).tobytes(), np.uint8)
    assert format_of(rows, "q4_0") == "q4"


def test_the_common_format_is_the_nearest() -> None:
    for together, expected in [
        ("q8", "q8"), ("q4 q4w", "q4w"), ("q4w q8", "q8w"), ("q4 q8", "q8w"), ("q8 q8w", "q8w"),
        ("float16", "float16"), ("float16 float32", "float32"), ("q4 float16", "float32"),
    ]:  # fmt: skip
        assert common_format(together.split()) == expected
        assert common_format(together.split()[::-1]) == expected


def test_rows_need_not_lie_side_by_side() -> None:
    rows = random_blocks("q5_k", 8, 2)
    assert np.array_equal(dequantise(rows[::2], "q5_k"), dequantise(rows, "q5_k")[::2])


def test_every_known_type_has_the_librarys_number_and_size() -> None:
    known = {kind.name: kind for number in range(64) if (kind := kind_of(number)) is not None}
    for name, kind in known.items():
        number = TYPES[name.upper()]
        assert kind_of(number) == kind
        assert gguf.GGML_QUANT_SIZES[number] == (kind.values, kind.size), name
    asked = "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k"
    assert set(asked.split()) <= KINDS.keys() < known.keys()
    assert kind_of(4) is None, "a type that the format gave up"
