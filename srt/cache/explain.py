"""Why a prefix lookup stopped where it did: the reasons, and the memory of what was evicted."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """The edges that were evicted last, at most `size` of them: each is known by the namespace, the CRC of
    the path to it, and its first token. No ids are kept, and a CRC collision costs a wrong reason at most.
    An edge that is cached again may stay: no lookup stops where it would be asked for.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._edges: OrderedDict[tuple[str, int, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._edges)

    def add(self, namespace: str, crc: int, token: int) -> None:
        """Remember that the edge which begins with `token` was evicted; the oldest gives way."""
        edge = (namespace, crc, token)
        if edge in self._edges:
            self._edges.move_to_end(edge)
        else:
            self._edges[edge] = None
        if len(self._edges) > self._size:
            self._edges.popitem(last=False)

    def has(self, namespace: str, crc: int, token: int) -> bool:
        """Whether the edge was evicted, as far as is known."""
        return (namespace, crc, token) in self._edges

    def clear(self, namespace: str | None) -> None:
        """Forget one namespace, or all (None)."""
        if namespace is None:
            self._edges.clear()
        else:
            self._edges = OrderedDict.fromkeys(e for e in self._edges if e[0] != namespace)
