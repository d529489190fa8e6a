"""Whose a request is: which cache it looks into, and how it is ordered and kept."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

from sapwood.srt import namespaces
from sapwood.srt.config import Config, split_keys
from sapwood.srt.errors import BadRequest
from sapwood.srt.params import Scheduling

MAX_SALT_CHARS = 256
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_KEEP = 3600.0
MAX_QUEUE_TIMEOUT = 86_400.0
MAX_PROGRAM_CHARS = 128


class PlaceFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request that computes may say of its cache and its turn; null means absent."""

    cache_salt: str | None = None
    priority: int | None = None
    keep: float | None = None
    queue_timeout: float | None = None
    program: str | None = None


class Place(NamedTuple):
    """The cache namespace of a request, and how it is scheduled."""

    namespace: str = namespaces.SHARED
    scheduling: Scheduling = Scheduling()


class Tenants:
    """The callers of one server, told apart by the digests of their keys (see keys.py).

    With several API keys each has a cache of its own, whose name is made with a secret that is drawn at each
    start and never leaves this process. With one key or none, salts alone keep caches apart.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._several = len(set(split_keys(config.api_key))) > 1
        self._apart = self._several and config.cache_isolation == "key"
        # Who may read the metrics then is one of the tenants.
        self._hidden = self._apart and config.admin_api_key is None
        self._secret = os.urandom(32)

    def place(self, fields: PlaceFields, key: bytes = b"") -> Place:
        """Where a request under `key` goes that says `fields`. Raises BadRequest naming the field."""
        namespace, unsalted = self.caches(fields.cache_salt, key)
        return Place(
            namespace,
            Scheduling(
                tenant=namespaces.key_id(key) if self._several and key else "",
                priority=self._priority(fields.priority or 0),
                keep=self._keep(fields.keep or 0.0),
                queue_timeout=_queue_timeout(fields.queue_timeout),
                unsalted=unsalted,
                program=_program(fields.program),
            ),
        )

    def caches(self, cache_salt: str | None, key: bytes = b"") -> tuple[str, str]:
        """The namespace of a request under `key` with that salt, and what it would be without the salt.

        Raises BadRequest.
        """
        if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
            raise BadRequest(
                f"cache_salt must have from 1 to {MAX_SALT_CHARS} characters, got {len(cache_salt)}",
                param="cache_salt",
            )
        if self._apart and key:
            own = namespaces.of_key(self._secret, key)
            return own if cache_salt is None else namespaces.of_key(self._secret, key, cache_salt), own
        shared = namespaces.SHARED
        return shared if cache_salt is None else namespaces.of_salt(cache_salt), shared

    def label(self, namespace: str) -> str:
        """How the metrics name a namespace. Without an admin key those of all keys count together, as "keys":
        each tenant could read what the others do."""
        label = namespaces.label(namespace)
        return "keys" if self._hidden and label.startswith("key:") else label

    @property
    def orders_by_priority(self) -> bool:
        """Whether a request's priority has any effect."""
        return "priority" in (self._config.schedule_policy, self._config.radix_eviction_policy)

    def _priority(self, priority: int) -> int:
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise BadRequest(
                f"priority must be from {MIN_PRIORITY} to {MAX_PRIORITY}, got {priority}", param="priority"
            )
        if priority and not self.orders_by_priority:
            raise BadRequest(
                f"priority must be 0 or null, got {priority}: this server runs with --schedule-policy "
                f"{self._config.schedule_policy}; --schedule-policy priority obeys it",
                param="priority",
                code="unsupported",
            )
        return priority

    def _keep(self, keep: float) -> float:
        if not 0 <= keep <= MAX_KEEP:
            raise BadRequest(f"keep must be from 0 to {MAX_KEEP:g} seconds, got {keep}", param="keep")
        if keep and self._config.disable_radix_cache:
            raise BadRequest(
                f"keep must be 0 or null, got {keep:g}: this server keeps nothing (--disable-radix-cache)",
                param="keep",
                code="unsupported",
            )
        return keep


def _queue_timeout(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= MAX_QUEUE_TIMEOUT:
        raise BadRequest(
            f"queue_timeout must be above 0 and at most {MAX_QUEUE_TIMEOUT:g} seconds, got {seconds}",
            param="queue_timeout",
        )
    return seconds


def _program(name: str | None) -> str:
    if name is None:
        return ""
    if not 1 <= len(name) <= MAX_PROGRAM_CHARS or not all("!" <= character <= "~" for character in name):
        raise BadRequest(
            f"program must have from 1 to {MAX_PROGRAM_CHARS} visible ASCII characters, "
            f"got {name[: MAX_PROGRAM_CHARS + 1]!r}",
            param="program",
        )
    return name
