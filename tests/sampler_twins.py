"""The same steps on the CPU's sampler and on a device's, which must give the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.srt import messages
from sapwood.srt.messages import RowStart, TokenLogprob
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.device.columns import DeviceColumns
from sapwood.srt.worker.device.sampler import DeviceSampler, Launched
from sapwood.srt.worker.sampler import Drawn, Places, Sampler
from sapwood.srt.worker.token_pool import TokenPool

VOCAB, ROWS, EOS = 200, 12, [3, 7]
WORDS = -(-VOCAB // 32)
CPU = torch.device("cpu")
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.9}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.3},
    {"top_k": 7, "logprobs": 0},
    {"top_p": 0.8, "logprobs": 5, "logprob_ids": [4, 199, 0]},
    {"min_p": 0.05, "temperature": 2.0},
    {"top_k": 1},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    {**PENALTIES, "temperature": 0.0, "logprobs": 1},
    {**PENALTIES, "temperature": 0.9, "top_k": 40},
    {"frequency_penalty": 2.0, "logit_bias": {5: 3.0, 150: 2.5}},
    {"logit_bias": dict.fromkeys(range(40), 1.0), "top_p": 0.95},
    {"min_tokens": 8, "stop_token_ids": [9, 11], "logit_bias": {9: 6.0, 3: 6.0}},
    {**PENALTIES, "min_tokens": 4, "logit_bias": {3: 9.0}, "logprobs": 3, "logprob_ids": [3], "min_p": 0.02},
    {"logit_bias": {i: -float("inf") for i in range(VOCAB)}},
)  # fmt: skip


KINDS = [
    (False, False, False),
    (False, True, False),
    (True, True, False),
    (False, False, True),
    (True, True, True),
]
"""Of steps: whether they have drafts, forks, masks."""


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def start_of(row: int, params: dict[str, Any], rng: np.random.Generator) -> RowStart:
    prompt = int(rng.integers(1, 20))
    given = SamplingParams(**params)
    history = rng.integers(0, VOCAB, prompt + int(rng.integers(0, 3)))
    return RowStart(
        row=row, prefix=messages.pack(rng.integers(0, 1000, prompt)), params=given,
        seed=int(rng.integers(-(2**63), 2**63)), choice=int(rng.integers(0, 5)), prompt_len=prompt,
        history=messages.pack(history),
    )  # fmt: skip


def new_pool() -> TokenPool:
    return TokenPool(ROWS, 64, VOCAB, 8, EOS)


@dataclass
class Twins:
    """The same steps on the CPU's sampler and on the device's."""

    rng: np.random.Generator
    device: torch.device = CPU
    flashinfer: ModuleType | None = None
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool, self.other = new_pool(), new_pool()
        self.cpu = Sampler(self.pool)
        self.columns = DeviceColumns(self.other, self.device, pinned)
        self.sampler = DeviceSampler(self.columns, self.other, pinned, flashinfer=self.flashinfer)
        self.taste = self.rng.normal(size=(ROWS, VOCAB)) * 2.5
        """What each row would rather say."""

    def release(self, rows: list[int]) -> None:
        for pool in (self.pool, self.other):
            pool.release(np.array(rows, np.int32))
        self.columns.release(np.array(rows, np.int32))
        for row in rows:
            del self.lengths[row]

    def admit(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self.pool.admit(start)
            self.other.admit(start)
            self.lengths[start.row] = len(start.history) // 4
        self.columns.admit([start.row for start in starts])

    def change_rows(self) -> None:
        free = [row for row in range(ROWS) if row not in self.lengths]
        leaving = [row for row in self.lengths if self.rng.random() < 0.08]
        self.release(leaving)
        # A row that has been given up may be taken again at once.
        taken = [row for row in free + leaving if self.rng.random() < 0.6]
        which = self.rng.integers(0, len(SAMPLINGS), len(taken)).tolist()
        self.admit([start_of(r, SAMPLINGS[k], self.rng) for r, k in zip(taken, which, strict=True)])

    def places(self, drafts: bool, forks: bool) -> tuple[Places, Tensor]:
        """Of some rows, with their logits: drafts are often what the logits want."""
        rng = self.rng
        rows = np.array([row for row in self.lengths if rng.random() < 0.8] or [*self.lengths][:1], np.int32)
        samples = np.where(rng.random(len(rows)) < 0.2 * forks, rng.integers(2, 5, len(rows)), 1)
        counts = np.where(
            (rng.random(len(rows)) < 0.6 * drafts) & (samples == 1), rng.integers(0, 5, len(rows)), 0
        )
        places = Places(
            rows, samples.astype(np.int32), np.array([self.lengths[row] for row in rows.tolist()], np.int32),
            counts.astype(np.int32), np.empty(0, np.int32),
        )  # fmt: skip
        owner = np.repeat(rows, places.widths)
        logits = self.taste[owner] + rng.normal(size=(len(owner), VOCAB))
        proposed: list[int] = []
        for first, count in zip(places.first_lines.tolist(), counts.tolist(), strict=True):
            for line in range(first, first + count):
                liked = 3 if rng.random() < 0.1 else int(rng.integers(0, VOCAB))
                logits[line, liked] += 25.0
                proposed.append(liked if rng.random() < 0.8 else int(rng.integers(0, VOCAB)))
        places.proposed = np.array(proposed, np.int32)
        for bad in (np.nan, np.inf):
            logits[rng.random(len(logits)) < 0.03, 5] = bad
        return places, torch.from_numpy(logits.astype(np.float32))

    def mask(self, places: Places) -> None:
        """Some lines: most allow half of the tokens, some only ends, or nothing."""
        rng, count = self.rng, int(places.widths.sum())
        masks = rng.integers(-(2**31), 2**31, (count + 1, WORDS)).astype(np.int32)
        for line in np.flatnonzero(rng.random(count + 1) < 0.3).tolist():
            masks[line] = 0
            for token in rng.choice([3, 7, 9, 11], rng.integers(0, 4), replace=False).tolist():
                masks[line, token // 32] |= np.int32(1 << (token % 32))
        places.masks = masks
        places.masked = np.where(rng.random(count) < 0.6, rng.permutation(count + 1)[:count], -1).astype(
            np.int32
        )

    def went_on(self, places: Places, drawn: Drawn) -> None:
        for row, count in zip(
            places.rows.tolist(), np.where(places.samples > 1, 1, drawn.counts), strict=True
        ):
            self.lengths[row] += int(count)


def same_logprobs(ours: dict[int, TokenLogprob], theirs: dict[int, TokenLogprob]) -> bool:
    """The same tokens; values that differ no more than float32 exponentials do."""

    def ids(told: TokenLogprob) -> list[int]:
        return [told.id, *(token for token, _ in told.top)]

    def values(told: TokenLogprob) -> list[float]:
        return [told.logprob, *(value for _, value in told.top), *told.chosen]

    return list(ours) == list(theirs) and all(
        ids(ours[k]) == ids(theirs[k])
        and np.allclose(values(ours[k]), values(theirs[k]), rtol=1e-6, atol=2e-6, equal_nan=True)
        for k in theirs
    )


def equal(ours: Drawn, theirs: Drawn) -> bool:
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in ("ids", "counts", "sources", "errors")]
    return all(one.tolist() == other.tolist() and one.dtype == other.dtype for one, other in pairs)


def compare(
    twins: Twins, drafts: bool, forks: bool, masks: bool, settle: Callable[[], object] = lambda: None
) -> None:
    """Rows come and go, their counts go on, and a step is read after the next one has been launched; all that
    was launched is done after `settle`."""
    before: tuple[Launched, Drawn, dict[int, TokenLogprob]] | None = None
    kept = errors = told = 0
    for _ in range(40):
        twins.change_rows()
        if not twins.lengths:
            continue
        places, logits = twins.places(drafts, forks)
        if masks:
            twins.mask(places)
        given = logits.to(twins.device)
        launched = twins.sampler.launch(given, places)
        launched.fetch()
        settle()
        assert torch.equal(given.cpu().nan_to_num(9.0), logits.nan_to_num(9.0))
        drawn = twins.cpu.draw(logits, places)
        logprobs = twins.cpu.logprobs(logits, places, drawn)
        assert twins.columns.last[places.rows].tolist() == twins.pool.last[places.rows].tolist()
        for row, change in twins.pool.changes.items():
            if change.output_counts is not None:
                counts = twins.columns.seen.counts[int(twins.columns.entries[row])]
                assert counts.tolist() == change.output_counts.tolist()
        if masks:  # their memory is the next step's
            assert places.masks is not None
            places.masks[:] = 0
        if before is not None:
            ours, ours_told = before[0].read()
            assert equal(ours, before[1])
            assert same_logprobs(ours_told, before[2])
        before = launched, drawn, logprobs
        kept, errors = kept + int((drawn.counts > 1).sum()), errors + int(drawn.errors.sum())
        told += len(logprobs)
        twins.went_on(places, drawn)
    assert errors
    assert told
    assert kept or not (drafts or forks)
