"""The matchers of rows: which tokens each may draw, while the model computes, and where it stands after."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.errors import BadRequest, ErrorInfo, SapwoodError
from sapwood.srt.grammar.engine import Filler, Masks, Matcher
from sapwood.srt.messages import GrammarState, RowError, RowStart
from sapwood.srt.worker.grammars import Grammars, Loaded

Int32s = npt.NDArray[np.int32]

MAX_FORCED = 64
"""Tokens told of those that must come next."""
APART = 64
"""Output tokens between one time that a row's matcher is made anew and the next."""
SLICE = 16
"""Output tokens that a matcher goes on by at a time: the engine lets no other thread run meanwhile."""
SECONDS = 0.25
SECONDS_A_TOKEN = 0.001
"""Of CPU time in which a row's matcher may go on: all rows wait meanwhile. Only what keeps just below the
limits of the engine, which depend on no machine, is ever ended for this: of 200 schemas from the wild the
worst takes 0.04 ms a token, 200 optional properties take 0.06 ms."""


class _Follower:
    """A row's place in its grammar, after `output`. Where its matcher fails, it may be of what others have
    walked, or of what drafts asked for; so it begins anew then, but not too often: that takes long. The
    second time within APART tokens, or at once, it goes on from a base that it has alone and keeps: if that
    fails as soon, nobody else is to blame."""

    def __init__(self, grammar: Loaded, output: list[int]) -> None:
        """Raises BadRequest if the grammar does not allow that output."""
        self.grammar = grammar
        self.output: list[int] = []
        self.matcher = self._base = grammar.base
        self._alone = False
        """Whether no other row walks what its matcher does."""
        self._renewed = -APART
        self._walked = 0
        self._seconds = 0.0
        self._begin()
        if self.accept(output) < len(output):
            if self._is_slow:
                raise BadRequest("the constraint is too complex to follow", code="constraint_too_complex")
            raise BadRequest("the constraint does not allow the output that there is")

    @property
    def looks_ahead(self) -> bool:
        """Whether drafts are looked at: not soon after it began anew, so that they are no reason to fail."""
        return len(self.output) - self._renewed >= APART

    @property
    def failed(self) -> bool:
        """Whether it cannot go on."""
        return self._is_slow or bool(self.matcher.error)

    @property
    def _is_slow(self) -> bool:
        return self._seconds > SECONDS + SECONDS_A_TOKEN * self._walked

    def accept(self, ids: list[int]) -> int:
        """Go on by the ids, up to the end: how many they were; 0 if it fails, or they were not allowed."""
        taken = self._walk(ids)
        if self.failed:
            for _ in self._attempts():
                taken = self._walk(ids)
        if self.failed or (taken < len(ids) and not self.matcher.ended):
            return 0
        self.output += ids[:taken]
        return taken

    def fill_anew(self, mask: npt.NDArray[np.int32]) -> None:
        """The mask, of a matcher that has failed; if it fails again, it stays so."""
        for _ in self._attempts():
            self.matcher.fill(mask.ctypes.data, mask.nbytes)

    def _attempts(self) -> Iterator[None]:
        """As long as it fails: from a base that others walk too, and then from its own."""
        lately = not self.looks_ahead
        if self._is_slow or (lately and self._alone):
            return
        self._renewed = len(self.output)
        for alone in (True,) if lately or self._alone else (False, True):
            self.grammar.spoil(self._base)
            self._begin(alone)
            if not self.failed:
                yield
            if not self.failed or self._is_slow:
                return

    def _begin(self, alone: bool = False) -> None:
        """From the grammar's beginning to where it is; as it was, and failed, if there can be no new base."""
        with contextlib.suppress(BadRequest):
            self._base = self.grammar.apart() if alone else self.grammar.base
            self._alone = alone
            self.matcher = self._base.copy()
            self._walk(self.output)

    def _walk(self, ids: list[int]) -> int:
        """The matcher goes on by those of the ids that are allowed, up to the first that is not."""
        taken = 0
        for at in range(0, len(ids), SLICE):
            some, begun = ids[at : at + SLICE], time.thread_time()
            count = self.matcher.accept(some)
            self._seconds += time.thread_time() - begun
            self._walked += count
            taken += count
            if count < len(some) or self._is_slow:
                break
        return taken

    def error(self) -> ErrorInfo:
        place = f"at output token {len(self.output) + 1}"
        if self.matcher.dead_end:
            code, what = "constraint_dead_end", f"no token can go on with the constraint {place}"
        else:
            code, what = "constraint_too_complex", f"the constraint became too complex to follow {place}"
        return ErrorInfo(BadRequest.status, BadRequest.type, code, what)


@dataclass(slots=True)
class Filling:
    """The masks of a step, being filled. `lines[i]` is the first line of the i-th row that samples, -1 if it
    has no grammar; a row with d drafts has d + 1 of them, of which those are zeros that are not known."""

    rows: list[int]
    drafts: Int32s
    lines: Int32s
    masks: Masks
    done: Future[None] | None
    errors: list[RowError]

    def masked(self, widths: Int32s) -> Int32s:
        """The line of each mask, for rows with `widths[i]` of them, one row's after the other's; -1 where
        there is none."""
        first = np.repeat(self.lines, widths)
        ahead = np.arange(len(first), dtype=np.int32) - np.repeat(np.cumsum(widths) - widths, widths)
        return np.where(first >= 0, first + ahead, -1).astype(np.int32)


class Constraints:
    """The rows that have a grammar, of those `grammars` that are loaded; masks are filled by `threads`."""

    def __init__(self, grammars: Grammars, threads: int) -> None:
        self._grammars = grammars
        self._threads = threads
        self._rows: dict[int, _Follower | ErrorInfo] = {}
        self._masks: Masks = np.empty((0, 0), dtype=np.int32)
        self._filler: Filler | None = None
        self._pool: ThreadPoolExecutor | None = None

    def admit(self, start: RowStart) -> None:
        """Begin a row, with a grammar at the end of its history. If it cannot, it fails when it samples."""
        self._rows.pop(start.row, None)
        if not start.grammar:
            return
        loaded = self._grammars.get(start.grammar)
        output = messages.unpack(start.history)[start.prompt_len :].tolist()
        self._rows[start.row] = _follow(loaded, output)

    def release(self, rows: Int32s) -> None:
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def follows(self, rows: Int32s) -> bool:
        """Whether any of the rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def begin(self, rows: Int32s, drafts: Int32s, proposed: Int32s) -> Filling | None:
        """Begin to fill the masks of rows that are to sample, and those after each of the row's `drafts[i]`
        proposals, which lie in `proposed` in order; None if none of the rows has a grammar."""
        if not self._rows:
            return None
        filling = Filling(rows.tolist(), drafts, np.full(len(rows), -1, np.int32), self._masks, None, [])
        wanted: list[tuple[Matcher, int, list[int]]] = []
        lines = words = 0
        ends = np.cumsum(drafts)
        for i, row in enumerate(filling.rows):
            follower = self._rows.get(row)
            if isinstance(follower, ErrorInfo):
                filling.errors.append(RowError(row, follower))
            elif follower is not None:
                ahead = proposed[ends[i] - drafts[i] : ends[i]].tolist() if follower.looks_ahead else []
                wanted.append((follower.matcher, lines, ahead))
                filling.lines[i] = lines
                lines += 1 + int(drafts[i])
                words = follower.grammar.mask_words
        if wanted:
            filling.masks = self._room(lines, words)
            filling.done = self._start(wanted, filling.masks)
        return filling if wanted or filling.errors else None

    def finish(self, filling: Filling) -> None:
        """Wait for the masks. A row whose matcher has failed gets an error, if it was not for what other rows
        or its drafts asked for."""
        if filling.done is None:
            return
        filling.done.result()
        for i in np.flatnonzero(filling.lines >= 0).tolist():
            row = filling.rows[i]
            follower = self._rows[row]
            assert isinstance(follower, _Follower)
            if follower.failed:
                # Lines of a matcher that has failed allow the end, which nobody has allowed.
                first = filling.lines[i]
                filling.masks[first : first + filling.drafts[i] + 1] = 0
                follower.fill_anew(filling.masks[first])
            if follower.failed:
                self._rows[row] = error = follower.error()
                filling.errors.append(RowError(row, error))
                filling.lines[i] = -1

    def accept(self, row: int, ids: list[int]) -> tuple[int, GrammarState | ErrorInfo | None]:
        """Go on by what the row has drawn: how many of the ids count, as it may end before the last, and
        where it stands then; None for a row without a grammar, and one that has failed before."""
        follower = self._rows.get(row)
        if not isinstance(follower, _Follower):
            return len(ids), None
        if follower.matcher.ended:  # what it drew is the end
            return 1, GrammarState(complete=True, ended=True)
        taken = follower.accept(ids)
        if taken == 0:
            self._rows[row] = error = follower.error()
            return 1, error
        matcher = follower.matcher
        if matcher.ended:
            return taken, GrammarState(matcher.complete, ended=True)
        return taken, GrammarState(matcher.complete, False, messages.pack(matcher.forced()[:MAX_FORCED]))

    def _room(self, lines: int, words: int) -> Masks:
        """Zeros: what is not written allows nothing."""
        if self._masks.shape[0] < lines or self._masks.shape[1] != words:
            self._masks = np.empty((2 * lines, words), dtype=np.int32)
        masks = self._masks[:lines]
        masks.fill(0)
        return masks

    def _start(self, wanted: list[tuple[Matcher, int, list[int]]], masks: Masks) -> Future[None]:
        if self._filler is None or self._pool is None:
            self._filler = Filler(self._threads)
            self._pool = ThreadPoolExecutor(1, "masks")
        return self._pool.submit(self._filler.fill, wanted, masks)


def _follow(loaded: Loaded | None, output: list[int]) -> _Follower | ErrorInfo:
    if loaded is None:
        return SapwoodError("the row's grammar was never loaded").info()
    try:
        return _Follower(loaded, output)
    except BadRequest as e:
        return e.info()
