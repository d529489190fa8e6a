"""What tokenizers send: new requests and ends."""

from __future__ import annotations

from sapwood.srt import messages
from sapwood.srt.errors import ContextTooLong, Overloaded, OwnQueueTimeout, QueueTimeout, SapwoodError
from sapwood.srt.messages import Cancel, Done, GrammarLoaded, Refused, StopAt, Submit
from sapwood.srt.namespaces import LISTED
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler.ends import finish
from sapwood.srt.scheduler.programs import ProgramKey
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.results import output_count
from sapwood.srt.scheduler.state import State

TOMBSTONE_SECONDS = 10.0
MAX_TOMBSTONES = 10_000


def submit(state: State, message: Submit) -> None:
    """Queue a request, or refuse it with the reason."""
    if state.tombstones.pop(message.key, None) is not None:
        for choice in range(message.params.n):
            state.tell(message.tokenizer, Done(message.key, choice, 0, "abort"))
        return
    prompt = messages.unpack(message.ids)
    try:
        max_tokens = room(state, len(prompt), message.params)
        if message.namespace != LISTED:  # those of the server itself, once more after a restart
            _require_place(state)
    except SapwoodError as e:
        state.tell(message.tokenizer, Refused(message.key, e.info()))
        return
    params, scheduling = message.params, message.scheduling
    reads_from = params.reads_from(len(prompt))
    computed = len(prompt) - 1 if params.judges_last and reads_from >= 0 else len(prompt)
    sign = 1 if state.config.schedule_low_priority_values_first else -1
    request = Request(
        key=message.key,
        tokenizer=message.tokenizer,
        rid=message.rid,
        prompt=prompt[:computed],
        params=params,
        namespace=f"\0{message.key}" if state.config.disable_radix_cache else message.namespace,
        seed=params.seed if params.seed is not None else state.seeds.getrandbits(63),
        max_tokens=max_tokens,
        arrived=message.arrived,
        order=state.orders,
        live=params.n,
        urgency=sign * scheduling.priority if state.config.schedule_policy == "priority" else 0,
        priority=-sign * scheduling.priority,
        tenant=state.tenants.setdefault(scheduling.tenant, len(state.tenants)),
        keep=scheduling.keep,
        unsalted=scheduling.unsalted,
        reads_from=reads_from,
        judged=message.ids[4 * computed :],
        forked=params.n == 1,
        program=state.programs.of(ProgramKey(message.namespace, scheduling.tenant, scheduling.program)),
        grammar=message.grammar if max_tokens else None,
    )
    state.orders += 1
    _limit_wait(state, request, scheduling.queue_timeout)
    enqueue(state, request)


def enqueue(state: State, request: Request) -> None:
    """`request`, which has never run, begins to wait: for its turn once its grammar is loaded."""
    first = Sequence(request, 0, request.prompt)
    if request.grammar is not None:
        state.grammars.join(request)
    if request.program is not None:
        state.programs.join(request.program, request.order)
    state.requests[request.key] = request
    state.sequences[first.key] = first
    state.wait(first)


def grammar_loaded(state: State, message: GrammarLoaded) -> None:
    """Those that wait for this grammar may have their turn, or end with its error."""
    for request in state.grammars.loaded(message.key, message.error is not None):
        first = state.sequences[request.key]
        if message.error is None:
            state.wait(first)
        else:
            finish(state, first, 0, "error", None, message.error)


def _limit_wait(state: State, request: Request, own: float | None) -> None:
    limits = [limit for limit in (own, state.config.queue_timeout) if limit is not None]
    if limits and request.namespace != LISTED:  # the server waits for those before it begins
        state.deadlines.add(request, min(limits), min(limits) == own)


def expire(state: State) -> None:
    """End those that have waited too long for their turn. Takes no time if there are none."""
    if not len(state.deadlines):
        return
    for over in state.deadlines.over(state.clock()):
        kind = OwnQueueTimeout if over.own else QueueTimeout
        error = kind(
            f"the request has waited for its turn for more than {over.limit:g} s "
            + ("(queue_timeout)" if over.own else "(--queue-timeout)")
        )
        finish(state, state.sequences[over.request.key], 0, "error", None, error.info())


def room(state: State, prompt_tokens: int, params: SamplingParams) -> int:
    """How many tokens a request may produce. Raises ContextTooLong if its prompt can never fit."""
    limit, asked = state.max_request_tokens, params.max_tokens
    if prompt_tokens > limit or (prompt_tokens == limit and asked != 0):
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens; prompt and output together may have {limit}"
            f" (context length {state.context_length}, KV pool {state.pool.total} slots"
            + (f", {state.listed_tokens} of them for shared prefixes)" if state.listed_tokens else ")"),
            param="prompt",
        )
    left = limit - prompt_tokens
    return left if asked is None else min(asked, left)


def _require_place(state: State) -> None:
    if len(state.waiting) >= state.config.max_queued_requests:
        raise Overloaded(
            f"{len(state.waiting)} requests are waiting, the limit is {state.config.max_queued_requests}"
            " (--max-queued-requests)"
        )


def stop_at(state: State, message: StopAt) -> None:
    """Cut a choice to its first n output tokens, wherever it is; one that has ended already stays ended."""
    sequence = state.sequences.get(message.key + message.choice)
    if sequence is not None:
        n = output_count(state, sequence)
        state.surplus(sequence.request.program, max(0, n - message.n))
        finish(state, sequence, min(message.n, n), "stop")


def cancel(state: State, message: Cancel) -> None:
    """End all choices of a request. A Cancel that overtook its Submit is remembered for a short while."""
    request = state.requests.get(message.key)
    if request is None:
        now = state.clock()
        state.tombstones[message.key] = now
        while state.tombstones:
            key, when = next(iter(state.tombstones.items()))
            if now - when < TOMBSTONE_SECONDS and len(state.tombstones) <= MAX_TOMBSTONES:
                break
            del state.tombstones[key]
        return
    for choice in range(request.params.n):
        sequence = state.sequences.get(message.key + choice)
        if sequence is not None:
            finish(state, sequence, output_count(state, sequence), "abort")
