"""Philox4x32-10, the counter-based generator behind every draw, in plain Python.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

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
