"""What would make the host wait for a device, or break a capture, refused on a CPU, where it does neither."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "aten.equal")
READS = frozenset({"tolist", "numpy", "cpu", "item", "__array__"})
"""Methods of which operations tell nothing where the memory is the host's already."""


class NoWaiting(TorchDispatchMode):
    """Refuses operations that wait, of tensors that are `on_device`. What stands for a kernel may wait."""

    def __init__(self, on_device: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self._on_device = on_device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        indices = args[1] if str(func).startswith("aten.index") and isinstance(args[1], list) else []
        given += [i for i in indices if i is not None]
        if any(map(self._on_device, given)) and not _in_a_kernel():
            waits = any(name in str(func) for name in OPERATIONS)
            masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
            assert not waits, f"{func} waits for the device"
            assert not masks, f"{func} waits for the length of a mask"
        return func(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """Refuses that the host reads tensors that are `on_device`."""

    def __init__(self, on_device: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self._on_device = on_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and self._on_device(args[0]) and not _in_a_kernel():
            raise AssertionError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits(on_device: Callable[[Tensor], bool] = lambda tensor: True) -> Iterator[None]:
    with NoWaiting(on_device), NoReading(on_device):
        yield


def _in_a_kernel() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("_double.py"):
            return True
        frame = frame.f_back
    return False
