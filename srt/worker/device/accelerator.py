"""What the worker needs of a GPU besides arithmetic: streams, events, pinned memory, graphs, its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """It is there when all that has been given to the stream so far is done."""

    def wait(self, stream: Any) -> None:
        """What is given to the stream from now on begins after it."""

    def query(self) -> bool:
        """Whether it is done."""

    def synchronize(self) -> None:
        """Wait for it."""


class Accelerator(Protocol):
    """One device. Work that is given to a stream is done in order, behind the host's back."""

    @property
    def device(self) -> torch.device: ...

    def stream(self, urgent: bool = False) -> Any:
        """A new stream. What an urgent one is given runs as soon as the device has room for it, and not
        behind all that others were given before."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """What is launched inside goes to this stream."""

    def event(self) -> Event: ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host from which, and to which, is copied without waiting."""

    def capture(self, run: Callable[[], object], stream: Any) -> Callable[[], None]:
        """What `run` launches, to be launched again as a whole, over the same memory, by the result. All
        captures share one pool of memory, so that no two of them may run at a time. Waits for all streams
        before and after (as torch.cuda.graph does before)."""

    def choose(self) -> None:
        """Make it the device of this thread."""

    def synchronize(self) -> None:
        """Wait for all streams, that which nothing else waits for too: torch's default one."""

    def peak(self, run: Callable[[], object]) -> tuple[int, int]:
        """Bytes that `run` takes at most beyond what is taken before, and how many of them it keeps."""

    def memory(self) -> tuple[int, int]:
        """(bytes free, bytes in all)."""


class Cuda:
    """The CUDA device with this index."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.choose()
        self._graphs: Any = torch.cuda.graph_pool_handle()

    def stream(self, urgent: bool = False) -> Any:
        stream: Callable[..., Any] = torch.cuda.Stream
        return stream(self.device, priority=-1 if urgent else 0)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self) -> Event:
        # The thread that waits for it sleeps: the host's cores are for planning.
        event: Callable[..., Event] = torch.cuda.Event
        return event(blocking=True)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, run: Callable[[], object], stream: Any) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may look at their events meanwhile.
        mode = "thread_local"
        with _uncollected(), torch.cuda.graph(graph, self._graphs, stream=stream, capture_error_mode=mode):
            run()
        self.synchronize()
        return graph.replay

    def choose(self) -> None:
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak(self, run: Callable[[], object]) -> tuple[int, int]:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.synchronize()
        kept = int(torch.cuda.memory_allocated(self.device)) - int(before)
        return int(torch.cuda.max_memory_allocated(self.device)) - int(before), kept

    def memory(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected inside: pinned memory in it would be given up there, for which torch records an
    event on the stream that is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
