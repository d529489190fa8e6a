"""A CPU that stands in for a GPU behind `Accelerator`: for the tests of the device's runner, and dry runs.

Work is done at once, but an event that was not recorded may not be waited for, and one that is recorded is
only done once it was looked at `late` times, or `seconds` later: so results are read when the next step has
begun, as with a GPU. A captured graph is a list of the torch operations that ran, with their very tensors: as
with a GPU it knows nothing of Python values that have changed since.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.srt.models.parallel import Group
from tests.gpu.no_waiting import nothing_waits

pins: list[Callable[[Tensor], None]] = []
"""Who is told of the pinned memory that a library takes for itself."""


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a library has instead of `torch.empty(..., pin_memory=True)`."""
    tensor = torch.empty(shape, dtype=dtype)
    for tell in pins:
        tell(tensor)
    return tensor


class HostEvent:
    """Done once it was looked at more than `late` times, or waited for in the main thread; or, with
    `seconds`, so long after it was recorded."""

    def __init__(self, late: int, seconds: float) -> None:
        self._late = late
        self._seconds = seconds
        self._recorded = 0.0
        self._done = threading.Event()

    def record(self, stream: Any) -> None:
        self._recorded = time.monotonic()

    def wait(self, stream: Any) -> None:
        assert self._recorded, "a stream waits for an event that was never recorded"

    def query(self) -> bool:
        assert self._recorded, "an event is looked at that was never recorded"
        self._late -= 1
        if self._late < 0 and time.monotonic() >= self._recorded + self._seconds:
            self._done.set()
        return self._done.is_set()

    def synchronize(self) -> None:
        assert self._recorded, "an event is waited for that was never recorded"
        if self._seconds:
            time.sleep(max(0.0, self._recorded + self._seconds - time.monotonic()))
        if self._seconds or threading.current_thread() is threading.main_thread():
            self._done.set()
        self._done.wait()


class Recorder(TorchDispatchMode):
    """Keeps what is called; `opaque` calls are kept as they are, to read what they read when replayed."""

    active: Recorder | None = None

    def __init__(self, is_pinned: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        super().__init__()
        self._is_pinned = is_pinned
        self._calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse(func, args, kwargs)
        out = func(*args, **kwargs)

        def again() -> None:
            new = func(*args, **kwargs)
            olds = out if isinstance(out, (tuple, list)) else [out]
            news = new if isinstance(new, (tuple, list)) else [new]
            for old, fresh in zip(olds, news, strict=True):
                if isinstance(old, Tensor) and fresh is not old and fresh.data_ptr() != old.data_ptr():
                    old.copy_(fresh)

        self._calls.append(again)
        return out

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        """What crosses between host and device: a graph would do it again with the host's memory of then."""
        to = kwargs.get("device")
        crosses = "_to_copy" in str(func) and to is not None and to.index is not None
        crosses |= any(isinstance(arg, Tensor) and self._is_pinned(arg) for arg in args)
        assert not crosses, f"{func} copies between host and device in a capture"

    def keep(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def replay(self) -> None:
        for call in self._calls:
            call()


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel, whatever it does inside: replayed as a whole into the tensor `out` that it was given."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = Recorder.active
        if recorder is None:
            return function(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            result = function(*args, **kwargs)

        def again() -> None:
            new = function(*args, **kwargs)
            if isinstance(new, Tensor) and new is not result:
                result.copy_(new)

        recorder.keep(again)
        return result

    return call


class Captured:
    """A `Group` whose every call is one kernel, as with NCCL."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.sum, self.gather = opaque(group.sum), opaque(group.gather)
        self.broadcast, self.smallest = opaque(group.broadcast), group.smallest


class HostAccelerator:
    """`srt.worker.device.accelerator.Accelerator` on the CPU."""

    device = torch.device("cpu")

    def __init__(self, late: int = 0, seconds: float = 0.0) -> None:
        self._late, self._seconds = late, seconds
        self._pinned: dict[int, StorageWeakRef] = {}
        self.captures = 0
        self.replays = 0

    def stream(self, urgent: bool = False) -> Any:
        return object()

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def event(self) -> HostEvent:
        return HostEvent(self._late, self._seconds)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert Recorder.active is None, "pinned memory is made in a capture"
        made = torch.zeros(shape, dtype=dtype)
        self._pinned[_storage(made)] = StorageWeakRef(made.untyped_storage())
        return made

    def capture(self, run: Callable[[], object], stream: Any) -> Callable[[], None]:
        recorder = Recorder(self._is_pinned)
        with _recording(recorder), nothing_waits():
            run()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay

    def _is_pinned(self, tensor: Tensor) -> bool:
        known = self._pinned.get(_storage(tensor))
        return known is not None and not known.expired()

    def choose(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def peak(self, run: Callable[[], object]) -> tuple[int, int]:
        run()
        return 2**20, 2**19

    def memory(self) -> tuple[int, int]:
        return 3 * 2**29, 2**31


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    Recorder.active = recorder
    try:
        with recorder:
            yield
    finally:
        Recorder.active = None
