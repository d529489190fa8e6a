"""Floats rounded to 8 or 4 bits at load (`--quantization`), in groups of 32 inputs."""

from __future__ import annotations

import numpy as np

from sapwood.srt.loader.codes import GROUP, LARGEST_HALF, Codes, Floats

REFINEMENTS = 2
"""Least-squares steps of the 4-bit scales."""


def quantise8(weight: Floats) -> Codes:
    """float32 [n, k] as scale * code, codes from -127 to 127; scale is a group's max|x| / 127 in float16.

    OverflowError if float16 cannot hold a scale.
    """
    groups = _grouped(weight)
    scales = _half(np.abs(groups).max(axis=2) / np.float32(127))
    codes = np.rint(groups * _inverse(scales)[:, :, None])
    np.clip(codes, -127, 127, out=codes)
    return Codes(_codes(codes, weight), scales, None, GROUP)


def quantise4(weight: Floats) -> Codes:
    """float32 [n, k] as scale * code + low, codes from 0 to 15, both in float16.

    They first reach from the least to the largest of a group, then move to where its squared error is less.
    OverflowError as in `quantise8`.
    """
    groups = _grouped(weight)
    low, high = groups.min(axis=2), groups.max(axis=2)
    lows, scales = _half(low), _half((high - low) / np.float32(15))
    codes, error = _nearest(groups, scales, lows)
    for _ in range(REFINEMENTS):
        new_scales, new_lows = _least_squares(groups, codes, scales, lows)
        new_codes, new_error = _nearest(groups, new_scales, new_lows)
        better = new_error < error
        scales, lows, error = (
            np.where(better, new, old)
            for new, old in ((new_scales, scales), (new_lows, lows), (new_error, error))
        )
        codes = np.where(better[:, :, None], new_codes, codes)
    return Codes(_codes(codes, weight), scales, lows, GROUP)


def _grouped(weight: Floats) -> Floats:
    """[n, groups, 32]; the last group is filled with its last value, which changes neither of its ends."""
    rest = -weight.shape[1] % GROUP
    padded = np.pad(weight, ((0, 0), (0, rest)), mode="edge") if rest else weight
    return padded.reshape(len(weight), -1, GROUP)


def _codes(codes: Floats, weight: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    return codes.reshape(len(weight), -1)[:, : weight.shape[1]].astype(np.int8)


def _half(values: Floats) -> Floats:
    """Rounded to float16."""
    if not np.all(np.abs(values) <= LARGEST_HALF):
        raise OverflowError("a scale is not finite in float16")
    return values.astype(np.float16).astype(np.float32)


def _inverse(scales: Floats) -> Floats:
    """1 / scale, 0 of 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


def _nearest(groups: Floats, scales: Floats, lows: Floats) -> tuple[Floats, Floats]:
    """The codes nearest to the values, and the squared error of each group."""
    codes = groups - lows[:, :, None]
    codes *= _inverse(scales)[:, :, None]
    np.rint(codes, out=codes)
    np.clip(codes, 0, 15, out=codes)
    off = codes * scales[:, :, None]
    off += lows[:, :, None]
    off -= groups
    return codes, np.einsum("ngi,ngi->ng", off, off)


def _least_squares(groups: Floats, codes: Floats, scales: Floats, lows: Floats) -> tuple[Floats, Floats]:
    """The line that fits the values best as a function of their codes; as it was where there is none."""
    mean_code, mean = codes.mean(axis=2), groups.mean(axis=2)
    off = codes - mean_code[:, :, None]
    spread = np.einsum("ngi,ngi->ng", off, off)
    slope = np.einsum("ngi,ngi->ng", off, groups) * _inverse(spread)
    low = mean - slope * mean_code
    fits = (spread > 0) & (slope > 0) & (slope <= LARGEST_HALF) & (np.abs(low) <= LARGEST_HALF)
    return _half(np.where(fits, slope, scales)), _half(np.where(fits, low, lows))
