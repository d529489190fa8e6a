"""Rows of a quantised matrix as integers and their scales: what lies between a file's blocks, or floats that
are rounded at load, and packed weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

GROUP, WIDE_GROUP = 32, 16
LARGEST_HALF = 65504.0

_HELD_BY = {
    "q8": ("q8", "q8w"),
    "q4": ("q4", "q4w", "q8w"),
    "q4w": ("q4w", "q8w"),
    "q8w": ("q8w",),
    "float16": ("float16", "float32"),
    "float32": ("float32",),
}
"""The packed formats that hold what another holds, the nearest first (float32 holds everything)."""


class Codes(NamedTuple):
    """A weight is scale * code + low, group by group of inputs.

    codes int8 [n, k]; scales and lows float32 [n, ceil(k / group)], lows None where all are zero.
    """

    codes: npt.NDArray[np.int8]
    scales: Floats
    lows: Floats | None
    group: int

    def values(self) -> Floats:
        """The weights, float32 [n, k]: first the product is rounded, then the sum."""
        n, k = self.codes.shape
        out = np.zeros((n, self.scales.shape[1], self.group), np.float32)
        out.reshape(n, -1)[:, :k] = self.codes
        out *= self.scales[:, :, None]
        if self.lows is not None:
            out += self.lows[:, :, None]
        return out.reshape(n, -1)[:, :k]

    def cut(self, columns: range) -> Codes:
        """Those columns, which begin with a group."""
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        lows = None if self.lows is None else self.lows[:, groups]
        codes = self.codes[:, columns.start : columns.stop]
        return Codes(codes, self.scales[:, groups], lows, self.group)

    def fit(self, format: str) -> Codes:
        """The same weights in the codes of a packed format that holds them (see `common_format`)."""
        codes, scales, lows, group = self
        if format == "q8":
            return self
        if lows is None and format in ("q4", "q4w"):
            codes, lows = codes + np.int8(8), scales * np.float32(-8)
        if format == "q8w":
            lows = np.zeros_like(scales) if lows is None else lows
            if group == GROUP:
                wide = -(-codes.shape[1] // WIDE_GROUP)
                scales, lows = (np.repeat(part, 2, axis=1)[:, :wide] for part in (scales, lows))
                group = WIDE_GROUP
        return Codes(codes, scales, lows, group)


def common_format(formats: Collection[str]) -> str:
    """The nearest packed format that holds without loss what each of `formats` holds."""
    first, *others = formats
    return next((f for f in _HELD_BY[first] if all(f in _HELD_BY[other] for other in others)), "float32")
