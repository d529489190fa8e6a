"""Caches that know the future, or know only whole blocks: what a prefix cache is measured against."""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int32]]
GRAIN = 16
"""Tokens of an edge of the tree in `belady`, at least."""


def distinct_tokens(prompts: Sequence[Ids]) -> int:
    """Tokens that must be computed if nothing is ever forgotten: the nodes of the prompts' token trie."""
    ordered = sorted(prompt.tobytes() for prompt in prompts)
    total, before = 0, b""
    for ids in ordered:
        total += len(ids) // 4 - _common(before, ids)
        before = ids
    return total


def _common(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // 4
    if n == 0:
        return 0
    differ = np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)
    first = int(differ.argmax())
    return first if differ[first] else n


def _chain(prompt: Ids, grain: int) -> list[tuple[bytes, int]]:
    """The prompt's blocks, each known by the hash of all up to its end, with its length; the last token is
    always computed, and in none."""
    usable = len(prompt) - 1
    chain, known = [], b""
    for start in range(0, usable, grain):
        block = prompt[start : min(start + grain, usable)]
        known = _hash(known + block.tobytes())
        chain.append((known, len(block)))
    return chain


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


def belady(prompts: Sequence[Ids], slots: int) -> int:
    """Tokens found by a prefix tree of `slots` tokens that evicts the leaf whose next use is furthest away;
    requests one at a time, in their order, nothing but prompts is kept. Edges are GRAIN tokens."""
    chains = [_chain(prompt, GRAIN) for prompt in prompts]
    never = len(chains)
    following: dict[bytes, list[int]] = {}
    for i, chain in enumerate(chains):
        for block, _ in chain:
            following.setdefault(block, []).append(i)
    for uses in following.values():
        uses.reverse()
    size: dict[bytes, int] = {}
    parent: dict[bytes, bytes | None] = {}
    children: dict[bytes, int] = {}
    leaves: list[tuple[int, bytes]] = []
    used = hits = 0

    def next_use(block: bytes) -> int:
        uses = following[block]
        return uses[-1] if uses else never

    for chain in chains:
        for block, _ in chain:
            following[block].pop()
        above: bytes | None = None
        for block, length in chain:
            if block in size:
                hits += length
            else:
                size[block], parent[block], children[block] = length, above, 0
                if above is not None:
                    children[above] += 1
                used += length
            above = block
        if above is not None:
            heapq.heappush(leaves, (-next_use(above), above))
        while used > slots and leaves:
            when, block = heapq.heappop(leaves)
            if block not in size or children[block]:
                continue
            if -when != next_use(block):
                heapq.heappush(leaves, (-next_use(block), block))
                continue
            used -= size.pop(block)
            up = parent.pop(block)
            del children[block]
            if up is not None:
                children[up] -= 1
                if not children[up]:
                    heapq.heappush(leaves, (-next_use(up), up))
    return hits


def blocks(prompts: Sequence[Ids], slots: int, block: int) -> int:
    """Tokens found by a cache of whole blocks, each known by all up to its end, the least recently used
    evicted first; requests one at a time, in their order."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    room, hits = slots // block, 0
    for prompt in prompts:
        chain = [known for known, length in _chain(prompt, block) if length == block]
        found = 0
        for known in chain:
            if known not in cached:
                break
            found += 1
        hits += found * block
        # The end of a path is older than its beginning, so that it goes first.
        for known in reversed(chain):
            cached[known] = None
            cached.move_to_end(known)
        while len(cached) > room:
            cached.popitem(last=False)
    return hits
