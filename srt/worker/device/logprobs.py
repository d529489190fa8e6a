"""Log-probabilities of a step's tokens, from the device into messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.kernels.ops.device_logprobs import logprobs, values_at
from sapwood.srt.messages import TokenLogprob
from sapwood.srt.worker.device.transfer import Download, Pinned, upload

Int32s = npt.NDArray[np.int32]
Values = Sequence[npt.NDArray[Any]]


class Telling:
    """What is told of n tokens, as `token_logprobs` tells it: token i is drawn from, or judged by, the line
    `source[i]`; with it come the `tops[i]` most likely and the values of the ids `chosen[i]`."""

    def __init__(self, source: npt.NDArray[Any], tops: Int32s, chosen: Mapping[int, Int32s]) -> None:
        self._source = source.astype(np.int64)
        self._tops = tops
        self._chosen = chosen

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """What the device needs, by name."""
        yield "told_lines", self._source
        if self._chosen:
            sizes = [len(ids) for ids in self._chosen.values()]
            yield "chosen_of", np.repeat(np.array(list(self._chosen), dtype=np.int64), sizes)
            yield "chosen", np.concatenate(list(self._chosen.values())).astype(np.int64)

    def launch(self, logits: Tensor, sent: Mapping[str, Tensor], ids: Tensor) -> list[Tensor]:
        """From logits [s, vocab] all that `read` needs for the tokens ids int64 [n]."""
        source = sent["told_lines"]
        found = logprobs(logits, source, ids, int(self._tops.max()))
        result = [found.values, found.top_ids, found.top_values]
        if self._chosen:
            of = sent["chosen_of"]
            norms = found.norms.index_select(0, of)
            result.append(values_at(logits, source.index_select(0, of), sent["chosen"], norms))
        return result

    def read(self, ids: Int32s, values: Values, wanted: npt.NDArray[Any]) -> list[TokenLogprob]:
        """Of the tokens ids [n] those that are `wanted`, in that order."""
        own, top_ids, top_values, *further = values
        told = []
        for i in wanted.tolist():
            n = int(self._tops[i])
            pairs = zip(top_ids[i, :n].tolist(), top_values[i, :n].tolist(), strict=True)
            # A vocabulary smaller than n leaves places empty: id -1.
            told.append(TokenLogprob(int(ids[i]), float(own[i]), [pair for pair in pairs if pair[0] >= 0]))
        if further:
            sizes = [len(some) for some in self._chosen.values()]
            parts = dict(zip(self._chosen, np.split(further[0], np.cumsum(sizes)[:-1]), strict=True))
            for i, one in zip(wanted.tolist(), told, strict=True):
                one.chosen = parts[i].tolist() if i in parts else []
        return told


class DeviceFetch:
    """`reader.Fetch` from a device: what it gives can be asked for once the step is done."""

    at_once = False

    def __init__(self, pinned: Pinned) -> None:
        self._pinned = pinned

    def places(self, places: npt.NDArray[np.int64], device: torch.device) -> Tensor:
        return upload({"places": places}, device, self._pinned)["places"]

    def logprobs(
        self, logits: Tensor, source: Int32s, ids: Int32s, tops: Int32s, chosen: Mapping[int, Int32s]
    ) -> Callable[[], list[TokenLogprob]]:
        telling = Telling(source, tops, chosen)
        arrays = {"ids": ids.astype(np.int64), **dict(telling.arrays())}
        sent = upload(arrays, logits.device, self._pinned)
        download = self._download(telling.launch(logits, sent, sent["ids"]))
        kept = ids.copy()
        return lambda: telling.read(kept, download.read(), np.arange(len(kept)))

    def floats(self, values: Tensor) -> Callable[[], npt.NDArray[np.float64]]:
        download = self._download([values.float()])
        return lambda: download.read()[0].astype(np.float64)

    def _download(self, tensors: list[Tensor]) -> Download:
        download = Download(tensors, self._pinned)
        download.fetch()
        return download
