"""What is read of prompts besides the next token: their tokens' logprobs, and hidden states to pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import RowError, RowRead, TokenLogprob
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.worker.logprobs import token_logprobs
from sapwood.srt.worker.token_pool import Reading, TokenPool

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

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


class Fetch(Protocol):
    """Brings what the device has computed to the host: both tell how to get it once the step is done, or, if
    it is there `at_once`, already before."""

    at_once: bool

    def places(self, places: Int64s, device: torch.device) -> torch.Tensor:
        """Indices to the device, where they are for what is launched after this."""

    def logprobs(
        self, logits: torch.Tensor, source: Int32s, ids: Int32s, tops: Int32s, chosen: Mapping[int, Int32s]
    ) -> Callable[[], list[TokenLogprob]]:
        """As `token_logprobs`; the logits may change afterwards."""

    def floats(self, values: torch.Tensor) -> Callable[[], npt.NDArray[np.float64]]:
        """The values, which may change afterwards."""


class HostFetch:
    """What is computed on a CPU is there at once."""

    at_once = True

    def places(self, places: Int64s, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(places)

    def logprobs(
        self, logits: torch.Tensor, source: Int32s, ids: Int32s, tops: Int32s, chosen: Mapping[int, Int32s]
    ) -> Callable[[], list[TokenLogprob]]:
        values = token_logprobs(logits, source, ids, tops, chosen)
        return lambda: values

    def floats(self, values: torch.Tensor) -> Callable[[], npt.NDArray[np.float64]]:
        found = values.numpy().astype(np.float64)
        return lambda: found


class PromptReader:
    """Reads the hidden states of prompts. Each value depends on its own row and position only."""

    def __init__(self, decoder: Decoder[Any], pool: TokenPool, fetch: Fetch) -> None:
        self._decoder = decoder
        self._pool = pool
        self._fetch = fetch

    def launch(
        self, hidden: torch.Tensor, rows: Int32s, starts: Int32s, counts: Int32s
    ) -> Callable[[], Reads]:
        """What the hidden states [m, hidden] of a step give, of rows that extend `starts` by `counts`: to be
        asked for once, when the step is done, and in the order of steps."""
        if not self._pool.reading:
            return lambda: Reads([], [])
        spans = list(self._spans(rows, starts, counts))
        tells = [self._logprobs(hidden, [span for span in spans if span.wanted])]
        tells += [self._pool_span(hidden, span) for span in spans if span.reading.pooling is not None]
        for span in spans:
            if span.reading.done:
                del self._pool.reading[span.row]

        def read() -> Reads:
            reads = Reads([], [])
            for tell in tells:
                tell(reads)
            return reads

        return read

    def _spans(self, rows: Int32s, starts: Int32s, counts: Int32s) -> Iterator[_Span]:
        firsts = np.cumsum(counts) - counts
        for i in np.flatnonzero(np.isin(rows, list(self._pool.reading))).tolist():
            row = int(rows[i])
            yield _Span(row, self._pool.reading[row], int(firsts[i]), int(starts[i]), int(counts[i]))

    def _logprobs(self, hidden: torch.Tensor, spans: list[_Span]) -> Callable[[Reads], None]:
        if not spans:
            return lambda reads: None
        wanted = [span.wanted for span in spans]
        lengths = [len(indices) for indices in wanted]
        # The logits that a token is judged by are those of the position before it.
        places = [
            span.first - span.start + indices.start - 1 + np.arange(len(indices))
            for span, indices in zip(spans, wanted, strict=True)
        ]
        ids = [
            span.reading.prompt[indices.start : indices.stop]
            for span, indices in zip(spans, wanted, strict=True)
        ]
        tops = np.repeat([span.reading.top for span in spans], lengths)
        chosen = [span.reading.chosen for span, n in zip(spans, lengths, strict=True) for _ in range(n)]
        pieces = list(self._in_pieces(hidden, np.concatenate(places), np.concatenate(ids), tops, chosen))
        for span, n in zip(spans, lengths, strict=True):
            span.reading.next += n

        def tell(reads: Reads) -> None:
            values = [value for piece in pieces for value in piece()]
            at = 0
            for span, indices in zip(spans, wanted, strict=True):
                part = values[at : at + len(indices)]
                at += len(indices)
                if any(math.isnan(value.logprob) for value in part):
                    reads.fail(span.row)
                else:
                    reads.reads.append(RowRead(span.row, indices.start, part))

        return tell

    def _in_pieces(
        self,
        hidden: torch.Tensor,
        places: Int64s,
        ids: Int32s,
        tops: Int32s,
        chosen: list[Int32s],
    ) -> Iterator[Callable[[], list[TokenLogprob]]]:
        size = max(1, min(PIECE_ROWS, PIECE_BYTES // (4 * self._decoder.spec.vocab)))
        index = self._fetch.places(places, hidden.device)
        for at in range(0, len(ids), size):
            piece = slice(at, at + size)
            logits = self._decoder.logits(hidden, index[piece])
            source = np.arange(len(ids[piece]), dtype=np.int32)
            further = {i: wanted for i, wanted in enumerate(chosen[piece]) if len(wanted)}
            yield self._fetch.logprobs(logits, source, ids[piece], tops[piece], further)

    def _pool_span(self, hidden: torch.Tensor, span: _Span) -> Callable[[Reads], None]:
        reading, means = span.reading, span.reading.pooling == "mean"
        through = span.start + span.size >= reading.prompt_len
        end = span.first + span.size
        if not (means or through):
            return lambda reads: None
        index = self._fetch.places(np.arange(span.first if means else end - 1, end), hidden.device)
        states: list[Callable[[], npt.NDArray[np.float64]]] = []
        for at in range(0, len(index), PIECE_ROWS):
            states.append(self._fetch.floats(self._decoder.normed(hidden, index[at : at + PIECE_ROWS])))
            if self._fetch.at_once:  # no more than one piece is held
                _fold(reading, states.pop()(), means)
        if through:
            reading.pooling = None

        def tell(reads: Reads) -> None:
            for state in states:
                _fold(reading, state(), means)
            if through:
                pooled = reading.total / reading.prompt_len if means else reading.total
                self._tell_pooled(span.row, pooled, reads)

        return tell

    def _tell_pooled(self, row: int, pooled: npt.NDArray[np.float64], reads: Reads) -> None:
        if np.isfinite(pooled).all():
            reads.reads.append(RowRead(row, pooled=pooled.astype("<f4").tobytes()))
        else:
            reads.fail(row)


def _fold(reading: Reading, states: npt.NDArray[np.float64], means: bool) -> None:
    """Take in more hidden states of a prompt: one after the other, so that it does not show where one chunk
    ended."""
    reading.total = np.add.accumulate(np.vstack([reading.total, states]), axis=0)[-1] if means else states[0]
