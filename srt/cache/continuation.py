"""What the tree holds after a path: ids that may come next again."""

from __future__ import annotations

from sapwood.srt.cache.node import Node, token_at


def continuation(node: Node, since: bytes, most: int) -> bytes:
    """At most `most` ids that come after the path to `node` and then `since`; of several children the one
    used last. Empty if the tree does not go on like that. Nothing counts as used."""
    at, found = 0, b""
    while at < len(since):
        child = node.children.get(token_at(since, at))
        if child is None:
            return b""
        rest = len(since) - at
        if rest < len(child.key):
            if not child.key.startswith(since[at:]):
                return b""
            found = child.key[rest : rest + 4 * most]
        elif not since.startswith(child.key, at):
            return b""
        at += len(child.key)
        node = child
    while len(found) < 4 * most and node.children:
        node = max(node.children.values(), key=_last_use)
        found += node.key[: 4 * most - len(found)]
    return found


def _last_use(node: Node) -> int:
    return node.last_use
