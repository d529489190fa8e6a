"""The folder of a runtime's sockets, which goes with its launcher, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from sapwood.srt.errors import ConfigError

PREFIX = "sapwood-"
OWNER = ".sapwood-launcher"
"""The file in it that its launcher holds locked: once it is not, nobody uses the folder any more."""
CLAIM_SECONDS = 60.0
"""Who has not locked it by then was killed."""
MAX_SOCKET_PATH = 107
"""Bytes, of the kernel."""
LONGEST_NAME = "worker.63-999"


class SocketFolder:
    """A new folder in the one for temporary files, for this user alone, until `remove`.

    Making one removes those of this user whose launchers were killed. Raises ConfigError.
    """

    def __init__(self) -> None:
        try:
            parent = Path(tempfile.gettempdir())
            self.path = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as e:
            raise ConfigError(f"cannot make a folder for sockets: {e}; set TMPDIR") from None
        self._owner = _claim(Path(self.path))
        if len(os.fsencode(self.path)) + 1 + len(LONGEST_NAME) > MAX_SOCKET_PATH:
            self.remove()
            raise ConfigError(
                f"the folder for temporary files is too deep for sockets (at most {MAX_SOCKET_PATH} bytes): "
                f"{self.path}; set TMPDIR to a shorter one"
            )
        with contextlib.suppress(OSError):
            for owner in parent.glob(f"{PREFIX}*/{OWNER}*"):
                _remove_if_left(owner)

    def remove(self) -> None:
        """Remove it and all that is in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            self._owner.close()


def _claim(folder: Path) -> BinaryIO | None:
    """The file that is locked now. None where there are no locks, or no room: then the folder stays if its
    launcher is killed."""
    # Locked before it has its name, so that nobody finds it and thinks it left.
    begun = folder / f"{OWNER}.new"
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(begun.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
            begun.rename(folder / OWNER)
            stack.pop_all()
            return file
    except OSError:
        return None


def _remove_if_left(owner: Path) -> None:
    folder = owner.parent
    with contextlib.suppress(OSError):  # it is locked, or has been removed just now
        found = folder.lstat()
        # Nobody else can have put anything into it then.
        private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
        if private and found.st_uid == os.getuid():
            with owner.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if owner.name != OWNER and time.time() - os.fstat(file.fileno()).st_mtime < CLAIM_SECONDS:
                    return  # whoever makes it is about to lock it
                shutil.rmtree(folder, ignore_errors=True)
