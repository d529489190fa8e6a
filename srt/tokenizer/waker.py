"""Ends a process's own wait for messages."""

from __future__ import annotations

import threading

from sapwood.srt.channel import Outbox
from sapwood.srt.orders import Boot


class Waker:
    """Ends this process's own wait for messages, from any thread: by an empty frame to its inbox."""

    def __init__(self, boot: Boot) -> None:
        self._outbox = Outbox(boot.directory, "tokenizer", boot.index)
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self) -> None:
        with self._lock:
            if not self._closed:
                self._outbox.send()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._outbox.close()
