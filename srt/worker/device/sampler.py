"""The sampler of a device: all of a step's draws are launched, and read when the step is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.kernels.ops.device_sampling import Filters, Renorm, draw, verify
from sapwood.kernels.ops.sampling import OK
from sapwood.srt.messages import TokenLogprob
from sapwood.srt.models.parallel import Alone, Group
from sapwood.srt.worker.device.changes import Changes, apply
from sapwood.srt.worker.device.columns import DeviceColumns
from sapwood.srt.worker.device.lines import Bunch, Lines
from sapwood.srt.worker.device.logprobs import Telling
from sapwood.srt.worker.device.transfer import Download, Pinned, upload
from sapwood.srt.worker.sampler import Drawn, Places
from sapwood.srt.worker.token_pool import TokenPool


class DeviceSampler:
    """What `Sampler` is on a CPU, for the rows of the same pool, with all columns of it that the device has.

    Of several ranks rank 0 alone samples (`launch`), and the others are told each row's next input within the
    step (`follow`). With `flashinfer` its filters do for top_k and top_p.

    Beside the ops' WORKSPACE a step takes a copy of the lines that are changed (4 bytes a token of the
    vocabulary for each), and a few hundred bytes a draw.
    """

    def __init__(
        self,
        columns: DeviceColumns,
        pool: TokenPool,
        pinned: Pinned,
        group: Group | None = None,
        flashinfer: ModuleType | None = None,
    ) -> None:
        self._columns = columns
        self._pool = pool
        self._pinned = pinned
        self._group: Group = group or Alone()
        self._renorm = cast(Renorm | None, flashinfer)
        (self._ends,) = upload({"ends": pool.eos_ids}, columns.device, pinned).values()

    def launch(self, logits: Tensor, places: Places) -> Launched:
        """Draw as `Sampler.draw`, from logits float32 [lines, vocab], which stay as they are: each row's next
        input is there for what is launched after this. Nothing waits for the device."""
        vocab, pool = logits.shape[1], self._pool
        lines = Lines(places, pool, vocab)
        changes = Changes(lines, places, pool, self._columns.entries)
        bunches = lines.bunches(changes.changed)
        told = _told(lines, places, pool)
        arrays: dict[str, npt.NDArray[Any]] = {"rows": places.rows.astype(np.int64)}
        arrays |= dict(lines.arrays()) | dict(changes.arrays(vocab))
        if told is not None:
            arrays |= {"told": told.draws} | dict(told.telling.arrays())
        sent = upload(arrays, self._columns.device, self._pinned)
        ids, errors = self._draw(logits, lines, bunches, sent)
        results, chain = [ids, errors], _Chain(ids[:, None], errors[:, None])
        if not lines.is_plain:
            chain = _Chain(ids[sent["chains"]], errors[sent["chains"]])
            chain.kept = verify(chain.ids, chain.errors, sent["drafts"], self._ends)
            results.append(chain.kept)
        if len(changes.counted):
            self._columns.seen.add(sent["counted_entries"], *chain.counted(sent["counted"]))
        self._next(chain.following, sent["rows"])
        if told is not None:
            results += told.telling.launch(logits, sent, ids.index_select(0, sent["told"]).long())
        return Launched(places, lines, told, Download(results, self._pinned))

    def follow(self, places: Places) -> None:
        """On a rank that does not sample: be told each row's next input, as rank 0 launches the same."""
        rows = upload({"rows": places.rows.astype(np.int64)}, self._columns.device, self._pinned)["rows"]
        self._next(torch.empty(len(places.rows), dtype=torch.int32, device=rows.device), rows)

    def _next(self, ids: Tensor, rows: Tensor) -> None:
        self._group.broadcast(ids)
        self._columns.last.index_copy_(0, rows, ids)

    def _draw(
        self, logits: Tensor, lines: Lines, bunches: Sequence[Bunch], sent: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The id of each draw, and its error."""
        parts: list[tuple[Tensor, Tensor]] = []
        changed, begin = logits, 0
        if bunches[-1].changed:
            begin = next(bunch.span.start for bunch in bunches if bunch.changed)
            changed = logits.index_select(0, sent["order"][begin:])
            apply(changed, sent, self._columns.seen)
        for bunch in bunches:
            span, at = bunch.span, None
            if bunch.changed:
                source = changed[span.start - begin : span.stop - begin]
            else:
                source, at = logits, None if len(bunches) == 1 else sent["order"][span]
            filters = u = None
            if not bunch.greedy:
                columns = {name: sent[name][span] for name in ("temperature", "top_k", "top_p", "min_p")}
                filters = Filters(**columns, by_k=bunch.by_k, by_p=bunch.by_p, floors=bunch.floors)
                u = sent["u"][span]
            ids, errors = draw(source, filters, u, lines=at, renorm=self._renorm)
            parts.append((ids.expand(-1, lines.most), errors[:, None].expand(-1, lines.most)))
        ids, errors = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        ids, errors = ids.reshape(-1), errors.reshape(-1)
        if "draws" in sent:
            ids, errors = ids.index_select(0, sent["draws"]), errors.index_select(0, sent["draws"])
        return ids, errors


@dataclass(slots=True)
class _Chain:
    """Of each row what was drawn behind 0, 1, ... drafts, int32 [rows, drafts + 1], of which it keeps the
    first `kept` [rows] (None: one); of a fork its first draw."""

    ids: Tensor
    errors: Tensor
    kept: Tensor | None = None

    @property
    def following(self) -> Tensor:
        """The rows' next inputs."""
        if self.kept is None:
            return self.ids.view(-1)
        return self.ids.gather(1, self.kept.long()[:, None] - 1).view(-1)

    def counted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of some of the rows, and how often each counts for penalties: what is kept, once."""
        times = (self.errors == OK).int()
        if self.kept is not None:
            times *= torch.arange(times.shape[1], device=times.device) < self.kept[:, None]
        return self.ids.index_select(0, rows), times.index_select(0, rows)


class Launched:
    """A step's draws on their way. `fetch` begins to copy them to the host, on the stream that it is called
    on; once that is done `read` tells them, as the rows wanted it when they were launched."""

    def __init__(self, places: Places, lines: Lines, told: _Told | None, download: Download) -> None:
        self._samples = places.samples
        self._lines = lines
        self._told = told
        self._download = download

    def fetch(self) -> None:
        self._download.fetch()

    def read(self) -> tuple[Drawn, dict[int, TokenLogprob]]:
        """What was drawn, and the logprobs by index into its ids."""
        lines = self._lines
        ids, errors, *values = self._download.read()
        counts = self._samples
        if not lines.is_plain:
            kept, *values = values
            counts = np.where(counts > 1, counts, kept).astype(np.int32)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        draws = np.repeat(lines.first_draws, counts) + offsets
        drawn = Drawn(ids[draws], counts, lines.sources[draws].astype(np.int32), errors[lines.first_draws])
        logprobs = {} if self._told is None else self._told.read(ids, values, draws)
        return drawn, logprobs


@dataclass(slots=True)
class _Told:
    """The draws whose rows want logprobs, in order, and what is told of them."""

    draws: npt.NDArray[np.int64]
    telling: Telling

    def read(
        self, ids: npt.NDArray[np.int32], values: Sequence[npt.NDArray[Any]], kept: npt.NDArray[np.int64]
    ) -> dict[int, TokenLogprob]:
        """Of the draws that were kept, by index into those."""
        places = np.flatnonzero(np.isin(kept, self.draws))
        wanted = np.searchsorted(self.draws, kept[places])
        return dict(zip(places.tolist(), self.telling.read(ids[self.draws], values, wanted), strict=True))


def _told(lines: Lines, places: Places, pool: TokenPool) -> _Told | None:
    owner = np.repeat(places.rows, lines.draws)
    draws = np.flatnonzero(pool.logprobs[owner] >= 0)
    if not len(draws):
        return None
    further, rows = pool.logprob_ids, owner[draws]
    chosen = {i: further[row] for i, row in enumerate(rows.tolist()) if row in further} if further else {}
    return _Told(draws, Telling(lines.sources[draws], pool.logprobs[rows], chosen))
