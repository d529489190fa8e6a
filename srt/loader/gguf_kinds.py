"""The storage types of GGUF tensors: their blocks as codes and scales, and the values that these mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.srt.loader.codes import GROUP, LARGEST_HALF, WIDE_GROUP, Codes, Floats

Bytes = npt.NDArray[np.uint8]

PIECE = 2**20
"""Values dequantised at a time: bounds the memory for what lies between bytes and floats."""


class Kind(NamedTuple):
    """A storage type: its name, values of one block, and the bytes it takes."""

    name: str
    values: int
    size: int


_NUMBERS = {
    0: Kind("f32", 1, 4), 1: Kind("f16", 1, 2), 2: Kind("q4_0", 32, 18), 3: Kind("q4_1", 32, 20),
    6: Kind("q5_0", 32, 22), 7: Kind("q5_1", 32, 24), 8: Kind("q8_0", 32, 34), 9: Kind("q8_1", 32, 40),
    10: Kind("q2_k", 256, 84), 11: Kind("q3_k", 256, 110), 12: Kind("q4_k", 256, 144),
    13: Kind("q5_k", 256, 176), 14: Kind("q6_k", 256, 210), 15: Kind("q8_k", 256, 292),
    16: Kind("iq2_xxs", 256, 66), 17: Kind("iq2_xs", 256, 74), 18: Kind("iq3_xxs", 256, 98),
    19: Kind("iq1_s", 256, 50), 20: Kind("iq4_nl", 32, 18), 21: Kind("iq3_s", 256, 110),
    22: Kind("iq2_s", 256, 82), 23: Kind("iq4_xs", 256, 136), 24: Kind("i8", 1, 1), 25: Kind("i16", 1, 2),
    26: Kind("i32", 1, 4), 27: Kind("i64", 1, 8), 28: Kind("f64", 1, 8), 29: Kind("iq1_m", 256, 56),
    30: Kind("bf16", 1, 2), 34: Kind("tq1_0", 256, 54), 35: Kind("tq2_0", 256, 66), 39: Kind("mxfp4", 32, 17),
}  # fmt: skip
"""By the number in the file, those that cannot be read too, so that a refusal has their name."""


def kind_of(number: int) -> Kind | None:
    """The storage type of a number in a tensor table; None if no such type is known."""
    return _NUMBERS.get(number)


def dequantise(rows: Bytes, kind: str) -> Floats:
    """float32 [n, k] of uint8 [n, bytes of a row], bit for bit what GGUF's reference implementation says.

    A piece at a time, so that beside the result only little memory is needed.
    """
    _name, values, size = KINDS[kind]
    blocks = np.ascontiguousarray(rows).reshape(-1, size)
    out = np.empty((len(blocks), values), np.float32)
    step = max(1, PIECE // values)
    for begin in range(0, len(blocks), step):
        part = blocks[begin : begin + step]
        floats = _FLOATS[kind](part) if kind in _FLOATS else codes_of(part, kind).values()
        out[begin : begin + step] = floats.reshape(len(part), values)
    return out.reshape(rows.shape[0], -1)


def codes_of(rows: Bytes, kind: str) -> Codes:
    """The codes and scales [n, k] of a quantised kind in uint8 [n, bytes of a row]."""
    blocks = np.ascontiguousarray(rows).reshape(-1, KINDS[kind].size)
    codes, scales, lows = _CODES[kind](blocks)
    n, group = len(rows), codes[0].size // scales[0].size
    return Codes(
        codes.view(np.int8).reshape(n, -1),
        scales.reshape(n, -1),
        None if lows is None else lows.reshape(n, -1),
        group,
    )


def format_of(rows: Bytes, kind: str) -> str:
    """The smallest packed format that holds the values of `rows` as they are."""
    if kind == "q4_0" and not np.all(np.abs(_half(rows.reshape(-1, 18), 0)) <= LARGEST_HALF / 8):
        return "q4w"  # its low of -8 steps would overflow half precision
    return _FORMATS[kind]


def _half(blocks: Bytes, at: int) -> Floats:
    """A float16 of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _shifted(part: Bytes, shifts: tuple[int, ...], width: int, mask: int) -> Bytes:
    """Bit fields in the order of the values: of each `width` bytes first all lowest fields, then the next."""
    fields = part.reshape(len(part), -1, 1, width) >> np.array(shifts, np.uint8)[:, None]
    fields &= np.uint8(mask)
    return fields.reshape(len(part), -1)


def _bits(words: Bytes) -> Bytes:
    """The bits of each row's bytes, lowest first."""
    return np.unpackbits(words, axis=1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


_Parts = tuple[Bytes, Floats, Floats | None]
"""Of each block its codes (bytes that are to be read as int8), scales and lows."""


def _q4_0(blocks: Bytes) -> _Parts:
    return _shifted(blocks[:, 2:], (0, 4), 16, 15) - np.uint8(8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> _Parts:
    return _shifted(blocks[:, 4:], (0, 4), 16, 15), _half(blocks, 0), _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    return _shifted(low, (0, 4), 16, 15) | _bits(high) << np.uint8(4)


def _q5_0(blocks: Bytes) -> _Parts:
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.uint8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Parts:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]), _half(blocks, 0), None


def _q2_k(blocks: Bytes) -> _Parts:
    scales = blocks[:, :16]
    step = _half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    low = _half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return _shifted(blocks[:, 16:80], (0, 2, 4, 6), 32, 3), step, -low


def _q3_k(blocks: Bytes) -> _Parts:
    packed = blocks[:, 96:108]
    scales = _shifted(packed[:, :8], (0, 4), 8, 15)
    scales |= _shifted(packed[:, 8:], (0, 2, 4, 6), 4, 3) << np.uint8(4)
    step = _half(blocks, 108) * (scales.astype(np.int8) - np.int8(32)).astype(np.float32)
    # A clear bit takes 4 away.
    absent = _shifted(blocks[:, :32], tuple(range(8)), 32, 1) ^ np.uint8(1)
    return _shifted(blocks[:, 32:96], (0, 2, 4, 6), 32, 3) - (absent << np.uint8(2)), step, None


def _scales_and_lows(blocks: Bytes) -> tuple[Floats, Floats]:
    """Step and low of the eight groups of a Q4_K or Q5_K block: 6 bits each, packed into 12 bytes."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    high = np.uint8(0x30)
    scales = np.concatenate(
        [first & np.uint8(63), (rest & np.uint8(15)) | ((first >> np.uint8(2)) & high)], axis=1
    )
    lows = np.concatenate(
        [second & np.uint8(63), (rest >> np.uint8(4)) | ((second >> np.uint8(2)) & high)], axis=1
    )
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * lows.astype(np.float32))


def _q4_k(blocks: Bytes) -> _Parts:
    return _shifted(blocks[:, 16:], (0, 4), 32, 15), *_scales_and_lows(blocks)


def _q5_k(blocks: Bytes) -> _Parts:
    codes = _shifted(blocks[:, 48:], (0, 4), 32, 15)
    codes |= _shifted(blocks[:, 16:48], tuple(range(8)), 32, 1) << np.uint8(4)
    return codes, *_scales_and_lows(blocks)


def _q6_k(blocks: Bytes) -> _Parts:
    step = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = _shifted(blocks[:, :128], (0, 4), 64, 15)
    codes |= _shifted(blocks[:, 128:192], (0, 2, 4, 6), 32, 3) << np.uint8(4)
    return codes - np.uint8(32), step, None


_IQ4 = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)


def _iq4_nl(blocks: Bytes) -> _Parts:
    return _IQ4[_shifted(blocks[:, 2:], (0, 4), 16, 15)].view(np.uint8), _half(blocks, 0), None


_FLOATS: dict[str, Callable[[Bytes], Floats]] = {"f32": _f32, "f16": _f16, "bf16": _bf16}
_CODES: dict[str, Callable[[Bytes], _Parts]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_nl": _iq4_nl,
}  # fmt: skip
_FORMATS = {
    "f32": "float32", "f16": "float16", "bf16": "float32", "q4_0": "q4", "q4_1": "q4", "q5_0": "q8",
    "q5_1": "q8w", "q8_0": "q8", "q2_k": "q8w", "q3_k": "q8w", "q4_k": "q4w", "q5_k": "q8w", "q6_k": "q8w",
    "iq4_nl": "q8",
}  # fmt: skip

KINDS = {kind.name: kind for kind in _NUMBERS.values() if kind.name in _FORMATS}
"""The types that can be read, by name."""
QUANTISED = frozenset(_CODES)
_WIDE = ("q2_k", "q3_k", "q6_k")


def group_of(kind: str) -> int:
    """How many inputs have a scale together; 1 for floats."""
    return 1 if kind not in QUANTISED else WIDE_GROUP if kind in _WIDE else GROUP
