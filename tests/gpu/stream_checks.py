"""Finds on a CPU what goes wrong on a GPU only now and then: work on several streams that nothing orders.

A race is two accesses of the same memory, of the device or pinned on the host, of which at least one writes,
and of which neither is known to have ended when the other begins: between them lies no event that one stream
records and the other, or the host, waits for, and no synchronise. Work of one stream is in order, and work
that is launched begins after all that the host has waited for by then. It is as much a fault to free memory
that was made on one stream while another may still use it: the allocator gives it at once to what is launched
next on the first.

Results are there at once, so that a fault shows in `Watch.faults` and nowhere else. Memory is looked at
storage by storage. The device is `cpu:0`, which torch takes for another than `cpu`: what is made on it, or
copied to it, is the device's, and what operations on such memory give. Not known as such is what is made from
nothing on the device of another tensor, for that one's is `cpu`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.host_accelerator import HostAccelerator, HostEvent, pins
from tests.gpu.stream_order import COMPUTE, COPY, PLAN, Access, Clock, Order, Stream, where

UNREAD = ("empty", "new_", "_like")
"""In names of operations that look at what they are given for its shape and type only."""


@dataclass(slots=True)
class Memory:
    """One storage: its last write, and all reads since then, by stream."""

    storage: StorageWeakRef
    pinned: bool
    made: Access
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)

    def before(self, writes: bool) -> list[Access]:
        """What must have ended before it is read, or written."""
        last = [] if self.write is None else [self.write]
        return [*last, *self.reads.values()] if writes else last


class Watch(TorchDispatchMode):
    """Within it nothing on the accelerator's streams goes unseen; what was seen to be wrong is in `faults`.
    `streams`: those on which there was work."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.streams: set[str] = set()
        self._order = order
        # A weak reference keeps a storage's place from being given to another.
        self._memory: dict[int, Memory] = {}
        self._abroad: dict[int, Memory] = {}
        """Device memory that is used on another stream than that which it was made on."""
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is captured is not run: memory is only made."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __enter__(self) -> Watch:
        pins.append(self.pin)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        pins.remove(self.pin)
        self.look_for_freed()
        super().__exit__(*exception)

    def is_on_device(self, tensor: Tensor) -> bool:
        """As far as is known."""
        memory = self._memory.get(_key(tensor))
        return memory is not None and not memory.pinned

    def pin(self, tensor: Tensor) -> None:
        self._add(tensor, Access(self._order.current, 0, where()), pinned=True)

    def look_for_freed(self) -> None:
        """Whether memory that is not there any more was given up in use: to be asked before anybody waits, as
        nothing else changes the answer."""
        for key in [key for key, memory in self._abroad.items() if memory.storage.expired()]:
            memory = self._abroad.pop(key)
            home = memory.made.stream
            for use in memory.before(writes=True):
                if use.stream != home and not use.ended(self._order.host, self._order.of(home)):
                    self._report(f"freed under {use}: made on {memory.made}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, written = _operands(func, args, kwargs)
        touched = {key: self._memory[key] for key in map(_key, given) if key in self._memory}
        outputs = list(_tensors(out))
        made = [t for t in outputs if _key(t) not in map(_key, given)]
        is_on_device = _is_made_there(kwargs) or any(not memory.pinned for memory in touched.values())
        writes = {_key(t) for t in written}
        is_view = bool(outputs) and not made and not writes
        name: str = func._schema.name
        if any(part in name for part in UNREAD):
            touched = {key: memory for key, memory in touched.items() if key in writes}
        if not is_on_device:
            for key, memory in touched.items():
                self._on_host(memory, key in writes)
        elif not is_view:
            self._launched(touched, writes, made, filled="empty" not in name)
        return out

    def _launched(
        self, touched: dict[int, Memory], writes: set[int], made: list[Tensor], filled: bool
    ) -> None:
        access = self._order.launch()
        self.streams.add(access.stream)
        for tensor in made:
            self._add(tensor, access).write = access if filled and not self._paused else None
        for key, memory in () if self._paused else touched.items():
            for other in memory.before(key in writes):
                if not other.ended(self._order.of(access.stream)):
                    self._report(f"race of {other} and {access}")
            if not memory.pinned and memory.made.stream != access.stream:
                self._abroad[key] = memory
            if key in writes:
                memory.write, memory.reads = access, {}
            else:
                memory.reads[access.stream] = access

    def _on_host(self, memory: Memory, writes: bool) -> None:
        """Who makes a view of pinned memory reads it next, or writes: torch does not tell of numpy's work."""
        for other in memory.before(writes):
            if not other.ended(self._order.host):
                self._report(f"race of {other} and the host ({' < '.join(where())})")
        if writes:
            memory.write, memory.reads = None, {}

    def _add(self, tensor: Tensor, made: Access, pinned: bool = False) -> Memory:
        memory = Memory(StorageWeakRef(tensor.untyped_storage()), pinned, made)
        self._memory[_key(tensor)] = memory
        return memory

    def _report(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)


class StreamEvent(HostEvent):
    """An event that carries what has ended when it is there."""

    def __init__(self, late: int, seconds: float, order: Order, watch: Watch) -> None:
        super().__init__(late, seconds)
        self._order, self._watch = order, watch
        self._clock: Clock = {}

    def record(self, stream: Stream) -> None:
        super().record(stream)
        self._clock = self._order.recorded(stream.name)

    def wait(self, stream: Stream) -> None:
        super().wait(stream)
        self._watch.look_for_freed()
        self._order.stream_waits(stream.name, self._clock)

    def query(self) -> bool:
        if found := super().query():
            self._waited()
        return found

    def synchronize(self) -> None:
        super().synchronize()
        self._waited()

    def _waited(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._watch.look_for_freed()
            self._order.host_waits(self._clock)


class StreamAccelerator(HostAccelerator):
    """The stand-in with streams; its `watch` is to be entered before anything is made on it."""

    device = torch.device("cpu", 0)

    def __init__(self, late: int = 0) -> None:
        super().__init__(late)
        self._order = Order()
        self._names = itertools.chain((COMPUTE, PLAN, COPY), map(str, itertools.count()))
        self.watch = Watch(self._order)

    def stream(self, urgent: bool = False) -> Stream:
        """Named as a runner asks for them."""
        return Stream(next(self._names))

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._order.current = self._order.current, stream.name
        try:
            yield
        finally:
            self._order.current = before

    def event(self) -> StreamEvent:
        return StreamEvent(self._late, self._seconds, self._order, self.watch)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = super().pinned(shape, dtype)
        self.watch.pin(tensor)
        return tensor

    def capture(self, run: Callable[[], object], stream: Stream) -> Callable[[], None]:
        """Begins with a synchronise, as `torch.cuda.graph` does."""
        self._wait_for_all()
        with self.watch.paused():
            return super().capture(run, stream)

    def synchronize(self) -> None:
        self._wait_for_all()

    def peak(self, run: Callable[[], object]) -> tuple[int, int]:
        found = super().peak(run)
        self._wait_for_all()
        return found

    def _wait_for_all(self) -> None:
        self.watch.look_for_freed()
        self._order.host_waits_for_all()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _operands(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """An operation's tensors, and those of them that it writes."""
    given = [*_tensors(args), *_tensors([*kwargs.values()])]
    written: list[Tensor] = []
    for place, name in _written(func):
        written += _tensors(args[place] if place < len(args) else kwargs.get(name))
    return given, written


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _is_made_there(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and device.index is not None
