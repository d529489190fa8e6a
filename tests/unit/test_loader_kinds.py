"""Every storage type of GGUF gives the values that the gguf library gives, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from sapwood.srt.loader import gguf_kinds
from sapwood.srt.loader.gguf_kinds import KINDS, dequantise, kind_of

TYPES = gguf.GGMLQuantizationType


def random_rows(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Bytes of any value: every bit pattern of codes and scales, but no scale that is NaN or infinite."""
    draw = np.random.default_rng(3)
    size = KINDS[kind].size
    given = draw.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    if kind in ("f32", "f16", "bf16"):
        given[:, -1] &= 0x3F
    else:
        for at in {"q2_k": (81, 83), "q3_k": (109,), "q6_k": (209,)}.get(kind, (1, 3)):
            given[:, at] &= 0xBB
    return given.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_library(kind: str) -> None:
    rows = random_rows(kind, 7, 96)
    ours, theirs = dequantise(rows, kind), gguf.quants.dequantize(rows, TYPES[kind.upper()])
    assert ours.dtype == np.float32
    assert ours.shape == (7, 96 * KINDS[kind].values)
    assert np.isfinite(theirs).all()
    assert len(np.unique(theirs)) > 100
    assert ours.tobytes() == np.ascontiguousarray(theirs).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(kind, 5, 11)
    whole = dequantise(rows, kind)
    monkeypatch.setattr(gguf_kinds, "PIECE", 3 * KINDS[kind].values)
    assert dequantise(rows, kind).tobytes() == whole.tobytes()


def test_rows_need_not_lie_side_by_side() -> None:
    rows = random_rows("q5_k", 8, 2)
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
