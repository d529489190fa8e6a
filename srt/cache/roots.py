"""Where the paths of each namespace begin: at a root of its own, or below a listed prefix.

    root of LISTED ──[5 9 2 7]──(end)          only the server writes here; listed paths are locked for ever
                                  ├─ door of "a" ──[1 1]
                                  └─ door of "b" ──[3 8]──[4]
    root of "a"    ──[6 0 6]

A lookup of "a" begins at the deepest listed end that its prompt goes through, with what "a" alone has there;
if there is none, at the root of "a". So what is listed is shared by all, and nothing else by any two.
"""

from __future__ import annotations

from collections.abc import Iterator

from sapwood.srt.cache.node import Node, Root, unpack_token
from sapwood.srt.namespaces import LISTED


class Roots:
    """The roots and doors of a tree. Those on which nothing hangs come and go; a lookup makes none."""

    def __init__(self) -> None:
        self.by_name: dict[str, Root] = {}
        self.ends: list[Node] = []
        """The ends of the listed prefixes."""
        self.listed_tokens = 0
        """Tokens on the paths to them."""

    def __iter__(self) -> Iterator[Root]:
        """Every root and door."""
        for root in self.by_name.values():
            yield from root.starts()

    def of(self, namespace: str | None) -> list[Root]:
        """The root and the doors of one namespace, or all (None)."""
        if namespace is None:
            return list(self)
        root = self.by_name.get(namespace)
        return root.starts() if root is not None else []

    def start(self, namespace: str, ids: bytes, limit: int) -> Root:
        """Where a lookup of `ids`, of at most `limit` tokens, begins. It may be not in the tree, see keep."""
        root = self.by_name.get(namespace)
        if self.ends and namespace != LISTED:
            end = self._deepest_end(ids, limit)
            if end is not None:
                door = root.doors.get(end) if root is not None else None
                return door or Root(namespace, end)
        return root or Root(namespace)

    def present(self, root: Root) -> Root:
        """The root or door that is in the tree in the place of `root`; `root` itself if there is none."""
        own = self.by_name.get(root.namespace)
        if own is None or root.parent is None:
            return own or root
        return own.doors.get(root.parent, root)

    def keep(self, root: Root) -> Root:
        """The same, but put into the tree if there is none: before something is hung on it."""
        if root.parent is None:
            return self.by_name.setdefault(root.namespace, root)
        own = self.by_name.setdefault(root.namespace, Root(root.namespace))
        return own.doors.setdefault(root.parent, root)

    def prune(self, root: Root) -> None:
        """Drop `root`, which is in the tree, if nothing hangs on it."""
        if root.children or root.spots:
            return
        own = self.by_name[root.namespace]
        if root.parent is not None:
            del own.doors[root.parent]
        if not (own.children or own.spots or own.doors):
            del self.by_name[own.namespace]

    def add_end(self, node: Node) -> None:
        """`node` ends a listed prefix from now on."""
        node.listed = True
        self.ends.append(node)
        listed: set[Node] = set()
        for end in self.ends:
            while end.parent is not None and end not in listed:
                listed.add(end)
                end = end.parent
        self.listed_tokens = sum(len(node.slots) for node in listed)

    def _deepest_end(self, ids: bytes, limit: int) -> Node | None:
        node: Node = self.by_name[LISTED]
        found: Node | None = None
        at, end = 0, min(4 * limit, len(ids))
        while at < end:
            child = node.children.get(unpack_token(ids, at)[0])
            if child is None or not ids.startswith(child.key, at, end):
                break
            at += len(child.key)
            node = child
            if node.listed:
                found = node
        return found
