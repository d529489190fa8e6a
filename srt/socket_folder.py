"""The folder of a runtime's sockets, which goes with its launcher, however that ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from sapwood.srt.errors import ConfigError

PREFIX = "sapwood-"
OWNER = "owner"
"""The file in it that its launcher holds locked: once it is not, nobody uses the folder any more."""
MAX_SOCKET_PATH = 107
"""Bytes, of the kernel."""
LONGEST_NAME = "worker.63-999"


class SocketFolder:
    """A new folder in the one for temporary files, for this user alone, until `remove`.

    Making one removes those of this user whose launchers were killed. Raises ConfigError.
    """

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        _sweep(Path(parent))
        try:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            # Locked before it has its name, so that nobody finds it and thinks it left.
            begun = Path(self.path, OWNER + ".new")
            self._owner = begun.open("wb")
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            begun.rename(Path(self.path, OWNER))
        except OSError as e:
            raise ConfigError(f"cannot make a folder for sockets in {parent}: {e}; set TMPDIR") from None
        if len(os.fsencode(self.path)) + 1 + len(LONGEST_NAME) > MAX_SOCKET_PATH:
            self.remove()
            raise ConfigError(
                f"the folder for temporary files is too deep for sockets (at most {MAX_SOCKET_PATH} bytes): "
                f"{self.path}; set TMPDIR to a shorter one"
            )

    def remove(self) -> None:
        """Remove it and all that is in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._owner.close()


def _sweep(parent: Path) -> None:
    for owner in parent.glob(f"{PREFIX}*/{OWNER}"):
        try:
            if owner.parent.is_symlink() or owner.stat().st_uid != os.getuid():
                continue
            with owner.open("rb") as file:
                _remove_if_left(file, owner.parent)
        except OSError:  # it is removed just now, or none of ours
            continue


def _remove_if_left(owner: BinaryIO, folder: Path) -> None:
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    shutil.rmtree(folder, ignore_errors=True)
