"""The forward pass of a planned step, launched kernel by kernel or as a graph; graphs are made when idle."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sapwood.srt.models.decoder import Batch, Decoder, KvPool
from sapwood.srt.models.parallel import Group
from sapwood.srt.worker.device.accelerator import Accelerator
from sapwood.srt.worker.device.lane import Lane, Planned

_log = logging.getLogger("sapwood.worker")

STEP = 8
"""Between two captured numbers of rows, from that many on; a step runs in the next larger one."""
EAGER_STEPS = 32
"""After so many steps of a lane without the graph that fits them best, it is made there though there is work
to do: a server that is never idle gets its graphs too."""


def graph_sizes(most: int) -> list[int]:
    """The numbers of rows that are captured, the largest first: powers of two, then multiples of 8 and 32."""
    sizes = [1, 2, 4, *range(STEP, min(most, 64), STEP), *range(64, most, 4 * STEP), most]
    return sorted({size for size in sizes if size <= most}, reverse=True)


class DeviceForward:
    """Runs one decoder over one pool, all of it on the compute stream. `sizes`: the numbers of rows of which
    each of the `lanes` is to have a graph, the largest first."""

    def __init__(
        self,
        decoder: Decoder[Any],
        pool: KvPool,
        accelerator: Accelerator,
        stream: Any,
        lanes: Sequence[Lane],
        sizes: Sequence[int],
        group: Group,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._accelerator = accelerator
        self._stream = stream
        self._lanes = lanes
        self._sizes = list(sizes)
        self._group = group
        self._missed: defaultdict[Lane, Counter[int]] = defaultdict(Counter)
        """By number of rows, a lane's steps that would have run in a graph of so many, had there been one."""

    def __call__(self, planned: Planned, lane: Lane) -> Tensor:
        """The hidden states [m, hidden] of a step of this lane, before the final norm; valid until the next
        call."""
        if planned.decodes:
            best = min((size for size in self._sizes if size >= planned.decodes), default=0)
            if best and best not in lane.captured:
                self._missed[lane][best] += 1
        if planned.replay is None:
            return self._eager(planned)
        planned.replay()
        return self._decoder.hidden(len(planned.batch.ids))

    def overdue(self, lane: Lane) -> int | None:
        """The number of rows of which the lane should have a graph now though there is work to do."""
        (size, steps), *_ = self._missed[lane].most_common(1) or [(0, 0)]
        return size if steps > EAGER_STEPS else None

    def lacking(self) -> tuple[Lane, int] | None:
        """The next graph to be made: of the largest number of rows that a lane has none of; None if there
        are all."""
        missing = ((lane, size) for size in self._sizes for lane in self._lanes if size not in lane.captured)
        return next(missing, None)

    def capture(self, lane: Lane, size: int) -> bool:
        """Make the lane's graph of `size` rows; False if there is no memory for it, and so for no other.
        No step may be in flight."""
        begin = time.perf_counter()
        try:
            with self._accelerator.using(self._stream):
                lane.capture(size, self._capture)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as e:
            # With other ranks in the same place there is no way on for one of them alone.
            if "out of memory" not in str(e) or self._group.size > 1:
                raise
            self._accelerator.synchronize()  # raises if the device is not well
            _log.warning("no memory for a graph of %d rows: the steps that have none go on without", size)
            self._sizes = [size for size in self._sizes if all(size in lane.captured for lane in self._lanes)]
            self._missed.clear()
            return False
        del self._missed[lane][size]
        _log.debug("graph of %d rows: %.2f s", size, time.perf_counter() - begin)
        return True

    def _capture(self, planned: Planned) -> Callable[[], None]:
        self._eager(planned)  # what is compiled or allocated at first use must not be captured
        return self._accelerator.capture(lambda: self._eager(planned), self._stream)

    def _eager(self, planned: Planned) -> Tensor:
        attention = planned.attention

        def attend(layer: int, qkv: Tensor, _batch: Batch, out: Tensor) -> None:
            attention.attend(layer, qkv, out)

        return self._decoder.forward(planned.batch, self._pool, attend)
