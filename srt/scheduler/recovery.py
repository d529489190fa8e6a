"""How the scheduler begins anew: when an invariant does not hold, and with another worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sapwood.srt.errors import ContextTooLong, ErrorInfo, SapwoodError
from sapwood.srt.messages import Answer, Ask, Done, Refused, Submit
from sapwood.srt.scheduler import intake
from sapwood.srt.scheduler.dump import BROKEN, dump, write
from sapwood.srt.scheduler.request import Request
from sapwood.srt.scheduler.results import output_count
from sapwood.srt.scheduler.state import State

if TYPE_CHECKING:
    from sapwood.srt.scheduler.loop import Scheduler

MAX_REBUILDS = 3
REBUILD_SECONDS = 60.0
"""So many times within so long the scheduler begins anew; once more, and its process ends."""
MAX_DUMPS = 10
"""Files that one process leaves behind."""
CHECK_SECONDS = 5.0
"""Between two self-checks of an idle scheduler, at least."""
CHECK_MICROSECONDS = 5000.0
"""A state is not checked that would take longer, by what a node of the tree and a slot of the pool take."""
NODE_MICROSECONDS = 6.0
SLOT_MICROSECONDS = 0.03

logger = logging.getLogger("sapwood.scheduler")


class Guard:
    """Drives a Scheduler so that an invariant that does not hold costs the requests, not the server.

    `handle` and `advance` are the scheduler's own; they raise only after MAX_REBUILDS. `on_rebuild` is called
    when it has begun anew. While nothing is to be done, the state checks itself now and then.
    """

    def __init__(self, scheduler: Scheduler, on_rebuild: Callable[[], None] = lambda: None) -> None:
        self._scheduler = scheduler
        self._on_rebuild = on_rebuild
        self._rebuilt: deque[float] = deque(maxlen=MAX_REBUILDS)
        self._dumps = 0
        self._unchecked = False
        self._checked = float("-inf")

    def handle(self, message: Any) -> None:
        """Take in one message. If that fails, who has sent it is answered all the same."""
        before = self._scheduler.state
        try:
            self._scheduler.handle(message)
        except BROKEN as error:
            told = self._begin_anew(error)
            after = self._scheduler.state
            if isinstance(message, Submit) and message.key not in before.requests:
                after.tell(message.tokenizer, Refused(message.key, told))
            elif isinstance(message, Ask):
                after.tell(message.tokenizer, Answer(message.call, told, {}))

    def advance(self) -> None:
        """Plan what can be planned, and check the state if there is time for that."""
        try:
            self._scheduler.advance()
            self._check_if_idle()
        except BROKEN as error:
            self._begin_anew(error)

    def patience(self) -> float | None:
        """Seconds until the next self-check is due; None if none is to come."""
        state = self._scheduler.state
        if not self._unchecked or not _idle(state):
            return None
        return max(0.0, self._checked + CHECK_SECONDS - state.clock())

    def _check_if_idle(self) -> None:
        state = self._scheduler.state
        if not _idle(state):
            self._unchecked = True
            return
        if self.patience() != 0.0:
            return
        self._unchecked, self._checked = False, state.clock()
        assert state.rows.num_active == state.reserved_rows == 0, "rows are taken, and nobody has them"
        assert not state.requests, f"{len(state.requests)} requests have no choice left and have not ended"
        takes = NODE_MICROSECONDS * state.tree.num_nodes + SLOT_MICROSECONDS * state.pool.total
        if takes <= CHECK_MICROSECONDS:
            state.check()

    def _begin_anew(self, error: Exception) -> ErrorInfo:
        """Dump what there is and give it up. Returns what the requests are told; raises `error` if that
        has happened too often."""
        scheduler = self._scheduler
        now = scheduler.state.clock()
        if len(self._rebuilt) == MAX_REBUILDS and now - self._rebuilt[0] < REBUILD_SECONDS:
            raise error
        self._rebuilt.append(now)
        where = f"not written ({MAX_DUMPS} are enough)"
        if self._dumps < MAX_DUMPS:
            self._dumps += 1
            where = write(dump(scheduler.state, scheduler.recent, error))
        logger.critical(
            "an invariant does not hold (%s: %s): every request gets an error, and the cache begins empty; "
            "dump: %s",
            type(error).__name__,
            error,
            where,
        )
        told = SapwoodError(
            "the scheduler has found its own state broken and has begun anew; the request may be retried"
        ).info()
        scheduler.rebuild(told)
        self._on_rebuild()
        return told


def _idle(state: State) -> bool:
    return not state.in_flight and not state.sequences


def carry_over(old: State, new: State, error: ErrorInfo, waiting_too: bool) -> None:
    """Go on in `new`, which is empty. Requests that have run end with `error`; those that never have go on
    waiting, but for such as no longer fit, unless they are to end as well (`waiting_too`)."""
    new.counters, new.tombstones, new.orders = old.counters, old.tombstones, old.orders
    new.outgoing, new.deadlines = old.outgoing, old.deadlines
    new.tenants = old.tenants
    new.programs.take_over(old.programs)
    # Prefixes are listed again while others are served already.
    new.keep_room(old.listed_tokens)
    # Of both, as nobody knows which of them is right if they differ.
    requests = {s.request.key: s.request for s in old.sequences.values()} | old.requests
    for request in sorted(requests.values(), key=lambda request: request.order):
        if waiting_too or request.admitted:
            _fail(old, new, request, error)
            continue
        try:
            request.max_tokens = intake.room(new, request.sent, request.params)
        except ContextTooLong as e:
            request.live = 0
            new.tell(request.tokenizer, Refused(request.key, e.info()))
        else:
            intake.enqueue(new, request)


def _fail(old: State, new: State, request: Request, error: ErrorInfo) -> None:
    """Answer Done for each choice that has not ended."""
    request.live = 0
    born = [old.sequences.get(request.key + choice) for choice in range(request.params.n)]
    ended = [sequence is None and request.forked for sequence in born]
    for choice, sequence in enumerate(born):
        # Whom all choices have left, and who is here still, would wait for ever.
        if not ended[choice] or all(ended):
            n = output_count(old, sequence) if sequence is not None else 0
            new.tell(request.tokenizer, Done(request.key, choice, n, "error", None, error))
            if request.program is not None:
                request.program.counts.output_tokens += n
