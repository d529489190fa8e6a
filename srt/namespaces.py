"""The cache's namespaces: requests of different ones share nothing (see docs/cache.md)."""

from __future__ import annotations

import hashlib
import hmac

SHARED = ""
"""The namespace of requests without a salt."""
LISTED = "\1listed"
"""The namespace of --shared-prefixes, which the server alone writes: no salt and no key makes it."""
_SALT = "salt:"
_KEY = "key:"


def of_salt(salt: str) -> str:
    """The namespace of a `cache_salt`; no other one begins like it."""
    return _SALT + salt


def of_key(secret: bytes, digest: bytes, salt: str | None = None) -> str:
    """The namespace of an API key, known by the SHA-256 `digest` of it, and of a `cache_salt` under that key.

    Without the `secret` nobody can name it, whatever the salt.
    """
    said = salt.encode(errors="surrogatepass") if salt is not None else b""
    name = hmac.new(secret, digest + said, "sha256").hexdigest()
    return f"{_KEY}{key_id(digest)}:{_short(salt) if salt is not None else ''}:{name}"


def key_id(digest: bytes) -> str:
    """How an API key is told from others: the first 12 hex digits of its SHA-256 `digest`."""
    return digest.hex()[:12]


def label(namespace: str) -> str:
    """How a namespace is shown.

    A salt, which may be a secret, is the first 12 hex digits of its SHA-256. A key's namespace is "key:" and
    its id, then ":" and its salt's digits if it has one. That of --shared-prefixes is "listed", that of one
    request (see intake.py) "request".
    """
    if namespace.startswith(_SALT):
        return _short(namespace.removeprefix(_SALT))
    if namespace.startswith(_KEY):
        return namespace.rpartition(":")[0].rstrip(":")
    if namespace == LISTED:
        return "listed"
    return "request" if namespace.startswith("\0") else namespace


def _short(salt: str) -> str:
    return hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:12]
