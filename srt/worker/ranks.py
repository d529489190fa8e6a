"""The ranks of one model as processes of one machine: what they tell each other, over torch.distributed."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from sapwood.srt.errors import SapwoodError
from sapwood.srt.models.parallel import Group
from sapwood.srt.orders import Boot

PATIENCE = datetime.timedelta(days=1)
"""When a rank is dead is the launcher's to say, not a timeout's: loading, or compiling, may take long."""
LOST_SECONDS = 5.0
"""For which a rank that has lost another one waits to be ended: that it is the launcher sees at once, and
tells of the one that died, not of those that it took along."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankLost(SapwoodError):
    """Another rank has ended, or does not do what this one does."""


@contextmanager
def joined(boot: Boot, device: torch.device) -> Iterator[Group]:
    """The ranks of this process's worker, once all are there."""
    meeting = Path(boot.directory) / f"ranks-{boot.index}"
    try:
        yield Ranks(boot.rank, boot.config.tensor_parallel_size, meeting, device)
    except RankLost:
        time.sleep(LOST_SECONDS)
        raise


class Ranks:
    """`models.parallel.Group` of two or more processes that compute on `device`, by NCCL on GPUs and by gloo
    on a CPU.

    They find each other by the file `meeting`, which must be in a folder of their user's alone, and be used
    once: no port is open for that, and the connections are on the loopback interface. Only tensors are
    exchanged: nothing is pickled. No two may be made in one process. Every method may raise RankLost.
    """

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._gpu = device.type == "cuda"
        self._room = torch.empty(0)
        # Gloo raises nothing more special than a RuntimeError, which on a GPU may be anything.
        self._together = _Together(dist.DistError if self._gpu else RuntimeError)
        os.environ.update(dict.fromkeys(INTERFACES, _loopback()))
        with self._together:
            dist.init_process_group(
                "nccl" if self._gpu else "gloo",
                store=dist.FileStore(str(meeting), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=PATIENCE,
                device_id=device if self._gpu else None,
            )

    def sum(self, partial: Tensor) -> None:
        """On a GPU as NCCL does it, without waiting for the device: it may be captured."""
        if self._gpu:
            with self._together:
                dist.all_reduce(partial)
            return
        # In rank order, each element by itself: so it does not depend on how many rows there are.
        parts = self._exchange(partial)
        torch.add(parts[0], parts[1], out=partial)
        for part in parts[2:]:
            partial += part

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor) -> None:
        padded, widest = part, max(widths)
        if part.shape[1] < widest:
            # What is beyond the rank's own width is not looked at.
            padded = part.new_empty((part.shape[0], widest))
            padded[:, : part.shape[1]] = part
        begin = 0
        for width, columns in zip(widths, self._exchange(padded), strict=True):
            out[:, begin : begin + width] = columns[:, :width]
            begin += width

    def broadcast(self, values: Tensor) -> None:
        with self._together:
            dist.broadcast(values, 0)

    def smallest(self, value: int) -> int:
        own = torch.tensor([value], device=self._device)
        return min(int(theirs) for theirs in self._exchange(own))

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one shape; on a CPU valid until the next call."""
        size = self.size * own.numel()
        if self._gpu or own.dtype != self._room.dtype:
            room = own.new_empty(size)  # what is captured must keep its own
        else:
            if self._room.numel() < size:
                self._room = torch.empty(size)
            room = self._room[:size]
        parts = list(room.view(self.size, *own.shape))
        with self._together:
            dist.all_gather(parts, own)
        return parts


class _Together:
    """Errors of this kind come when another rank is gone: raises RankLost for them."""

    def __init__(self, kind: type[RuntimeError]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._kind):
            raise RankLost(f"the ranks have lost each other: {str(error).splitlines()[0]}") from None


def _loopback() -> str:
    """The name of the interface that nobody outside this machine reaches."""
    return next(name for _index, name in socket.if_nameindex() if name.startswith("lo"))
