"""The forward pass of a planned step, launched kernel by kernel or as a graph; graphs are made when idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sapwood.srt.models.decoder import Batch, Decoder, KvPool
from sapwood.srt.worker.device.accelerator import Accelerator
from sapwood.srt.worker.device.lane import Lane, Planned

_log = logging.getLogger("sapwood.worker")

STEP = 8
"""Between two captured numbers of rows, from that many on; a step runs in the next larger one."""
EAGER_STEPS = 64
"""After so many steps without a graph that it could have, its graph is made though there is work to do: a
server that is never idle gets its graphs too."""


def graph_sizes(most: int) -> list[int]:
    """The numbers of rows that are captured, the largest first: powers of two, then multiples of 8 and 32."""
    sizes = [1, 2, 4, *range(STEP, min(most, 64), STEP), *range(64, most, 4 * STEP), most]
    return sorted({size for size in sizes if size <= most}, reverse=True)


class DeviceForward:
    """Runs one decoder over one pool. All of it is given to the compute stream."""

    def __init__(
        self,
        decoder: Decoder[Any],
        pool: KvPool,
        accelerator: Accelerator,
        stream: Any,
        sizes: Sequence[int],
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._accelerator = accelerator
        self._stream = stream
        self._sizes = list(sizes)
        self._wanted = 0
        """Steps since the last capture that had no graph, and could have had one."""

    def __call__(self, planned: Planned) -> Tensor:
        """The hidden states [m, hidden], before the final norm; valid until the next call."""
        if planned.replay is None:
            rows = len(planned.batch.starts)
            self._wanted += rows == len(planned.batch.ids) and rows <= max(self._sizes, default=0)
            return self._eager(planned)
        planned.replay()
        return self._decoder.hidden(len(planned.batch.ids))

    def overdue(self, lanes: Sequence[Lane]) -> bool:
        """Whether graphs should be made now though there is work to do."""
        return self._wanted > EAGER_STEPS and self.lacks_graphs(lanes)

    def lacks_graphs(self, lanes: Sequence[Lane]) -> bool:
        """Whether there are graphs to be made."""
        return self._missing(lanes) is not None

    def capture_one(self, lanes: Sequence[Lane]) -> bool:
        """Make the next graph, in every lane; False if there are all. No step may be in flight."""
        size = self._missing(lanes)
        if size is None:
            return False
        begin = time.perf_counter()
        self._wanted = 0
        try:
            for lane in lanes:
                with self._accelerator.using(self._stream):
                    lane.capture(size, self._capture)
        except torch.OutOfMemoryError:
            _log.warning("no memory for the graph of %d rows: steps without a graph go on without", size)
            self._sizes = []
            return False
        _log.debug("graph of %d rows: %.2f s", size, time.perf_counter() - begin)
        return True

    def _missing(self, lanes: Sequence[Lane]) -> int | None:
        return next((size for size in self._sizes if any(size not in lane.captured for lane in lanes)), None)

    def _capture(self, planned: Planned) -> Callable[[], None]:
        self._eager(planned)  # what is compiled or allocated at first use must not be captured
        return self._accelerator.capture(lambda: self._eager(planned), self._stream)

    def _eager(self, planned: Planned) -> Tensor:
        attention = planned.attention

        def attend(layer: int, qkv: Tensor, _batch: Batch, out: Tensor) -> None:
            attention.attend(layer, qkv, out)

        return self._decoder.forward(planned.batch, self._pool, attend)
