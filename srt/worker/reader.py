"""What is read of prompts besides the next token: their tokens' logprobs, and hidden states to pool."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import RowError, RowRead, TokenLogprob
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.worker.logprobs import token_logprobs
from sapwood.srt.worker.token_pool import Reading, TokenPool

Int32s = npt.NDArray[np.int32]

PIECE_ROWS = 128
PIECE_BYTES = 2**25
"""A prompt's logits are computed for so many rows, and so many bytes, at a time: vocabularies are large."""

BROKEN = "the model's logits are not numbers"


@dataclass(slots=True)
class Reads:
    """What one step gave, and the rows for which it gave no numbers."""

    reads: list[RowRead]
    errors: list[RowError]

    def fail(self, row: int) -> None:
        self.errors.append(RowError(row, ErrorInfo(500, "server_error", "not_a_number", BROKEN)))


class _Span(NamedTuple):
    """Tokens of one row in a step: `first` is where they begin in the hidden states, `start` in the row."""

    row: int
    reading: Reading
    first: int
    start: int
    size: int

    @property
    def wanted(self) -> range:
        """The prompt indices whose logprobs this step can tell and which are still to be told."""
        reading = self.reading
        return range(reading.next, min(self.start + self.size + 1, reading.prompt_len))


class PromptReader:
    """Reads the hidden states of prompts. Each value depends on its own row and position only."""

    def __init__(self, decoder: Decoder, pool: TokenPool) -> None:
        self._decoder = decoder
        self._pool = pool

    def read(self, hidden: torch.Tensor, rows: Int32s, starts: Int32s, counts: Int32s) -> Reads:
        """What the hidden states [m, hidden] of a step give, of rows that extend `starts` by `counts`."""
        reads = Reads([], [])
        if not self._pool.reading:
            return reads
        spans = list(self._spans(rows, starts, counts))
        self._logprobs(hidden, [span for span in spans if span.wanted], reads)
        for span in spans:
            if span.reading.pooling is not None:
                self._pool_span(hidden, span, reads)
        for span in spans:
            if span.reading.done:
                del self._pool.reading[span.row]
        return reads

    def _spans(self, rows: Int32s, starts: Int32s, counts: Int32s) -> Iterator[_Span]:
        firsts = np.cumsum(counts) - counts
        for i in np.flatnonzero(np.isin(rows, list(self._pool.reading))).tolist():
            row = int(rows[i])
            yield _Span(row, self._pool.reading[row], int(firsts[i]), int(starts[i]), int(counts[i]))

    def _logprobs(self, hidden: torch.Tensor, spans: list[_Span], reads: Reads) -> None:
        if not spans:
            return
        lengths = [len(span.wanted) for span in spans]
        # The logits that a token is judged by are those of the position before it.
        places = [
            span.first - span.start + span.wanted.start - 1 + np.arange(n)
            for span, n in zip(spans, lengths, strict=True)
        ]
        ids = [span.reading.prompt[span.wanted.start : span.wanted.stop] for span in spans]
        tops = np.repeat([span.reading.top for span in spans], lengths)
        chosen = [span.reading.chosen for span, n in zip(spans, lengths, strict=True) for _ in range(n)]
        values = self._in_pieces(hidden, np.concatenate(places), np.concatenate(ids), tops, chosen)
        at = 0
        for span, n in zip(spans, lengths, strict=True):
            part = values[at : at + n]
            at += n
            if any(math.isnan(value.logprob) for value in part):
                reads.fail(span.row)
            else:
                reads.reads.append(RowRead(span.row, span.wanted.start, part))
            span.reading.next += n

    def _in_pieces(
        self,
        hidden: torch.Tensor,
        places: npt.NDArray[np.int64],
        ids: Int32s,
        tops: Int32s,
        chosen: list[Int32s],
    ) -> list[TokenLogprob]:
        size = max(1, min(PIECE_ROWS, PIECE_BYTES // (4 * self._decoder.spec.vocab)))
        values: list[TokenLogprob] = []
        for at in range(0, len(ids), size):
            piece = slice(at, at + size)
            logits = self._decoder.logits(hidden, torch.from_numpy(places[piece]))
            source = np.arange(len(ids[piece]), dtype=np.int32)
            further = {i: wanted for i, wanted in enumerate(chosen[piece]) if len(wanted)}
            values += token_logprobs(logits, source, ids[piece], tops[piece], further)
        return values

    def _pool_span(self, hidden: torch.Tensor, span: _Span, reads: Reads) -> None:
        reading = span.reading
        through = span.start + span.size >= reading.prompt_len
        if reading.pooling == "mean":
            for at in range(span.first, span.first + span.size, PIECE_ROWS):
                index = torch.arange(at, min(at + PIECE_ROWS, span.first + span.size))
                states = self._decoder.normed(hidden, index).numpy().astype(np.float64)
                # One after the other, so that it does not show where one chunk ended.
                reading.total = np.add.accumulate(np.vstack([reading.total, states]), axis=0)[-1]
        if not through:
            return
        if reading.pooling == "mean":
            pooled = reading.total / reading.prompt_len
        else:
            last = torch.tensor([span.first + span.size - 1])
            pooled = self._decoder.normed(hidden, last)[0].numpy().astype(np.float64)
        reading.pooling = None
        if np.isfinite(pooled).all():
            reads.reads.append(RowRead(span.row, pooled=pooled.astype("<f4").tobytes()))
        else:
            reads.fail(span.row)
