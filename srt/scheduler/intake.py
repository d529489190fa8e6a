"""What tokenizers send: new requests and ends."""

from __future__ import annotations

from sapwood.srt import messages
from sapwood.srt.errors import ContextTooLong, Overloaded, SapwoodError
from sapwood.srt.messages import Cancel, Done, Refused, StopAt, Submit
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler.ends import finish
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
        max_tokens = _room(state, len(prompt), message.params)
    except SapwoodError as e:
        state.tell(message.tokenizer, Refused(message.key, e.info()))
        return
    params = message.params
    request = Request(
        key=message.key,
        tokenizer=message.tokenizer,
        rid=message.rid,
        prompt=prompt,
        params=params,
        namespace=f"\0{message.key}" if state.config.disable_radix_cache else message.namespace,
        seed=params.seed if params.seed is not None else state.seeds.getrandbits(63),
        max_tokens=max_tokens,
        arrived=message.arrived,
        order=state.orders,
        live=params.n,
        reads_from=params.reads_from(len(prompt)),
        forked=params.n == 1,
    )
    state.orders += 1
    first = Sequence(request, 0, prompt)
    state.requests[request.key] = request
    state.sequences[first.key] = first
    state.wait(first)


def _room(state: State, prompt_tokens: int, params: SamplingParams) -> int:
    """How many tokens the request may produce; raises if its prompt can never fit or the queue is full."""
    limit, asked = state.max_request_tokens, params.max_tokens
    if prompt_tokens > limit or (prompt_tokens == limit and asked != 0):
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens; prompt and output together may have {limit}"
            f" (context length {state.context_length}, KV pool {state.pool.total} slots)",
            param="prompt",
        )
    if len(state.waiting) >= state.config.max_queued_requests:
        raise Overloaded(
            f"{len(state.waiting)} requests are waiting, the limit is {state.config.max_queued_requests}"
            " (--max-queued-requests)"
        )
    room = limit - prompt_tokens
    return room if asked is None else min(asked, room)


def stop_at(state: State, message: StopAt) -> None:
    """Cut a choice to its first n output tokens, wherever it is; one that has ended already stays ended."""
    sequence = state.sequences.get(message.key + message.choice)
    if sequence is not None:
        n = output_count(state, sequence)
        state.counters.surplus_tokens += max(0, n - message.n)
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
