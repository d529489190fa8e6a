"""The ranks of one model as processes of one machine: what they tell each other, over torch.distributed."""

from __future__ import annotations

import datetime
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from sapwood.srt.errors import ConfigError, RankLost
from sapwood.srt.lifeline import FATAL_EXIT, Lifeline
from sapwood.srt.models.parallel import Group
from sapwood.srt.orders import Boot
from sapwood.srt.worker import listeners

PATIENCE = datetime.timedelta(days=1)
"""When a rank is dead is the launcher's to say, not a timeout's: loading, or compiling, may take long."""
TOLD_SECONDS = 10.0
EXCHANGE_SECONDS = 120.0
"""For the first exchange, which only needs that all ranks are there and can reach each other: where two GPUs
cannot, NCCL does not say so, but waits."""
LOST_SECONDS = 5.0
"""For which a rank that has lost another one waits to be ended: that it is the launcher sees at once, and
tells of the one that died, not of those that it took along."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_LOST = re.compile(
    r"connection (closed|reset|refused)|socket closed|broken pipe|tim(ed |e)out|remote (process|error)", re.I
)
"""What gloo and NCCL say when another rank is gone. Gloo raises nothing more special than a RuntimeError."""
_WHERE = re.compile(r"^\[\S+:\d+\] |\. This is typically caused by.*$")
"""Of gloo's messages what is not for our users."""

_log = logging.getLogger("sapwood")


@contextmanager
def joined(boot: Boot, device: torch.device, lifeline: Lifeline) -> Iterator[Group]:
    """The ranks of this process's worker, once all are there. The process is ended where they cannot talk."""
    meeting = Path(boot.directory) / f"ranks-{boot.index}"

    def end(why: str) -> None:
        lifeline.fatal(why, expected=True)
        os._exit(FATAL_EXIT)

    try:
        yield Ranks(boot.rank, boot.config.tensor_parallel_size, meeting, device, end)
    except RankLost:
        time.sleep(LOST_SECONDS)
        raise


class Ranks:
    """`models.parallel.Group` of two or more processes that compute on `device`, by NCCL on GPUs and by gloo
    on a CPU.

    They find each other by the file `meeting`, which must be in a folder of their user's alone, and be used
    once; ConfigError if they cannot. They connect over the loopback interface, and exchange only tensors:
    nothing is pickled. Once all are connected gloo's listeners answer nobody, where the system can do that
    (Linux); NCCL's stay open, as it connects anew when a buffer is first used. No two may be made in one
    process. Every method may raise RankLost.

    `give_up` is told, by another thread, if the first exchange takes longer than EXCHANGE_SECONDS.
    """

    def __init__(
        self, rank: int, size: int, meeting: Path, device: torch.device, give_up: Callable[[str], object]
    ) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._gpu = device.type == "cuda"
        self._room = torch.empty(0)
        self._together = _Together()
        os.environ.update(dict.fromkeys(INTERFACES, _loopback()))
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # all connect now, or some would find the listeners shut
        before = listeners.listening()
        try:
            with _watched("the meeting of the ranks"):
                self._meet(meeting)
        except RuntimeError as e:
            raise ConfigError(
                f"the ranks cannot meet in {meeting.parent}: {_told(e)}; "
                "set TMPDIR if that folder is at fault"
            ) from None
        over, hint = "gloo", ""
        if self._gpu:
            over, hint = "NCCL", ": NCCL_DEBUG=INFO tells more, NCCL_P2P_DISABLE=1 may help"
        with _watched(f"the first exchange between ranks over {over}", hint, give_up):
            self.smallest(0)
        if self._gpu:
            return
        if not listeners.shut(but=before):
            _log.debug("the ranks' listeners stay open to everybody on this machine")

    def _meet(self, meeting: Path) -> None:
        with self._together:
            dist.init_process_group(
                "nccl" if self._gpu else "gloo",
                store=dist.FileStore(str(meeting), self.size),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=PATIENCE,
                device_id=self._device if self._gpu else None,
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
        with self._together:
            _gather(room.view(self.size * own.shape[0], *own.shape[1:]), own)
        return list(room.view(self.size, *own.shape))


@contextmanager
def _watched(what: str, hint: str = "", give_up: Callable[[str], object] | None = None) -> Iterator[None]:
    """Inside, the log is told every TOLD_SECONDS how long it has taken so far; and `give_up`, if there is
    one, after EXCHANGE_SECONDS."""
    began, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(TOLD_SECONDS):
            seconds = time.monotonic() - began
            words = f"{what} takes {seconds:.0f} s{hint}"
            if give_up is not None and seconds >= EXCHANGE_SECONDS:
                give_up(words)
                return
            _log.warning(words)

    ticker = threading.Thread(target=tick, name="ranks meet", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def _gather(room: Tensor, own: Tensor) -> None:
    """All ranks' tensors one after another into `room`; into a list of tensors NCCL goes by way of a room of
    its own."""
    gather: Callable[[Tensor, Tensor], object] = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as torch < 2.13 calls it
    )
    gather(room, own)


class _Together:
    """What is done with all ranks: raises RankLost for an error that says that another one is gone."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):
            raise RankLost(f"the ranks have lost each other: {_told(error)}") from None


def _told(error: RuntimeError) -> str:
    """The message in one line, without what torch and gloo add for their own developers."""
    text = str(error).partition("\nException raised from")[0]
    return _WHERE.sub("", " ".join(text.split()))


def _loopback() -> str:
    """The name of the interface that nobody outside this machine reaches."""
    names = [name for _index, name in socket.if_nameindex()]
    found = next((name for name in names if re.fullmatch(r"lo\d*", name)), None)
    if found is None:
        raise ConfigError(
            f"the ranks of one model connect over the loopback interface, and there is none among {names}",
            param="tensor_parallel_size",
        )
    return found
