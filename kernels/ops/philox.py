"""Philox4x32-10, the counter-based generator behind every draw, in plain Python and in numpy.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer[Any]]

_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for four words of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw in [0, 1), a multiple of 2**-53, of (seed, choice, position)."""
    bits = seed & 0xFFFFFFFFFFFFFFFF
    first, second, _, _ = philox((position & _MASK, choice & _MASK, 0, 0), (bits & _MASK, bits >> 32))
    return float((first >> 5) * 2**26 + (second >> 6)) / 2.0**53


def uniforms(seeds: Integers, choices: Integers, positions: Integers) -> npt.NDArray[np.float64]:
    """`uniform` of each (seed, choice, position), of their common shape, to the bit."""
    seeds, choices, positions = np.broadcast_arrays(seeds, choices, positions)
    mask, half = np.uint64(_MASK), np.uint64(32)
    c0, c1 = positions.astype(np.uint64) & mask, choices.astype(np.uint64) & mask
    c2 = c3 = np.zeros_like(c0)
    bits = seeds.astype(np.uint64)
    k0, k1 = bits & mask, bits >> half
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    values = (c0 >> np.uint64(5)) * np.uint64(2**26) + (c1 >> np.uint64(6))
    return values.astype(np.float64) / 2.0**53
