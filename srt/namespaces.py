"""The cache's namespaces: requests of different ones share nothing (see docs/cache.md)."""

from __future__ import annotations

import hashlib

SHARED = ""
"""The namespace of requests without a salt."""
_SALT = "salt:"


def of_salt(salt: str) -> str:
    """The namespace of a `cache_salt`; no other one begins like it."""
    return _SALT + salt


def label(namespace: str) -> str:
    """How a namespace is shown: a salt, which may be a secret, is the first 12 hex digits of its SHA-256; the
    namespace of one request (see intake.py) is "request"."""
    if namespace.startswith(_SALT):
        salt = namespace.removeprefix(_SALT)
        return hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:12]
    return "request" if namespace.startswith("\0") else namespace
