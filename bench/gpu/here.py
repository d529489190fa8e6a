"""What a part of the bench has: the place, the sizes, its time, the loaded model, and where its rows go."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.place import Place
from bench.gpu.session import Session
from bench.gpu.shape import Sizes


@dataclass(slots=True)
class Here:
    """`until`: when (of time.monotonic) the part should be over. `tell` takes its rows."""

    place: Place
    sizes: Sizes
    tell: Callable[[dict[str, Any]], None]
    until: float = 0.0
    graphs: bool = True
    _session: Session | None = None
    _options: dict[str, Any] | None = None

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def row(self, what: str, value: object, unit: str = "", **more: Any) -> None:
        """One figure. With `rate` (bytes or operations a second) and `of` ("read" or "matmul") it has a share
        of what was measured of that; `goal` is the least share, `most` the highest figure."""
        self.tell({"what": what, "value": value, "unit": unit, **more})

    def session(self, **options: Any) -> Session:
        """The model with these options of the configuration; at most one is loaded at a time."""
        if self._session is None or self._options != options:
            self.close()
            self._session, self._options = Session(self.place, self.sizes, **options), options
        return self._session

    def close(self) -> None:
        """Give up the model's memory."""
        self._session = self._options = None
        gc.collect()
        if not self.place.dry:
            torch.cuda.empty_cache()
