"""Answers to questions about the cache and the state. None of them changes anything, but "flush", and
"program" with `end`."""

from __future__ import annotations

import dataclasses
from math import inf
from typing import Any, TypeVar

import msgspec

from sapwood.srt import namespaces
from sapwood.srt.errors import BadRequest, ErrorInfo, ProgramNotFound, SapwoodError
from sapwood.srt.messages import Answer, Ask, IdsPrompt
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler.admission import verdict
from sapwood.srt.scheduler.programs import Ending, Program, ProgramKey
from sapwood.srt.scheduler.state import State

MAX_SEGMENTS = 100
MAX_BRANCHES = 5
BRANCH_TOKENS = 20
MAX_NAMESPACES = 20_000
"""Namespaces among which one is looked for by its label; the answer is `truncated` if there are more."""

T = TypeVar("T")


class ExplainOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reveal` shows what belongs to others too: what is cached where the prompt diverges, and the use of its
    path. `unsalted` is the namespace that the request would have without its cache_salt (see Scheduling)."""

    reveal: bool = False
    unsalted: str | None = None
    logprob_start_len: int | None = None


class TreeOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`namespace` is a label (see namespaces.py); None: those that hold most. With `ids` 0 no content."""

    depth: int = 3
    limit: int = 16
    ids: int = 16
    max_nodes: int = 1000
    namespace: str | None = None


class ProgramOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Which program of the namespace; with `end` it is ended."""

    program: str
    tenant: str = ""
    end: bool = False


def ask(state: State, message: Ask) -> None:
    """Answer a question, but the end of a program later; one that cannot be answered gets its error."""
    error: ErrorInfo | None = None
    data: dict[str, Any] = {}
    try:
        match message.what:
            case "flush":
                data = {"flushed_tokens": state.tree.flush()}
                state.drafts.recent.clear()
            case "explain":
                data = _explain(state, message)
            case "tree":
                data = _tree(state, _options(message, TreeOptions))
            case "program":
                options = _options(message, ProgramOptions)
                program = _program(state, message.namespace, options)
                if options.end:
                    _end(state, message, program)
                    return
                data = _counts(state, program)
            case "state" | "check":
                data = _state(state)
            case _:
                raise BadRequest(f"the scheduler cannot answer {message.what!r}")
        if message.what == "check":
            state.check()
    except AssertionError as e:
        error = SapwoodError(f"the pool invariant does not hold: {e}").info()
    except SapwoodError as e:
        error = e.info()
    state.tell(message.tokenizer, Answer(message.call, error, data))


def answer_endings(state: State) -> None:
    """Answer who has ended programs of which no step is in flight any more. O(1) if nobody has."""
    endings = state.programs.endings
    if not endings:
        return
    first = state.in_flight[0].number if state.in_flight else inf
    state.programs.endings = [ending for ending in endings if ending.number >= first]
    for ask, program, released, number in endings:
        if number < first:
            data = {**_counts(state, program), "released_tokens": released}
            state.tell(ask.tokenizer, Answer(ask.call, None, data))


def _program(state: State, namespace: str, options: ProgramOptions) -> Program:
    state.programs.expire(state.clock())
    program = state.programs.find(ProgramKey(namespace, options.tenant, options.program))
    if program is None:
        raise ProgramNotFound(
            f"there is no program {options.program!r}: none of its requests has come, it was ended, or none "
            f"has run for {state.config.program_timeout:g} s (--program-timeout)",
            param="program",
        )
    return program


def _end(state: State, message: Ask, program: Program) -> None:
    """End it now, and answer when the steps that work for it are taken in, so that they are counted."""
    released = state.programs.end(program)
    theirs = [
        sent.number
        for sent in state.in_flight
        if sent.part is not None and bool((sent.part.numbers == program.number).any())
    ]
    state.programs.endings.append(Ending(message, program, released, max(theirs, default=-1)))
    answer_endings(state)


def _counts(state: State, program: Program) -> dict[str, Any]:
    return {"program": program.key.name, **dataclasses.asdict(state.programs.counts(program))}


def _options(message: Ask, kind: type[T]) -> T:
    try:
        return msgspec.convert(message.options, kind)
    except msgspec.ValidationError as e:
        raise BadRequest(str(e)) from None


def _state(state: State) -> dict[str, Any]:
    return msgspec.structs.asdict(state.stats()) | {
        "slots_free": state.pool.num_free,
        "slots_private": int(state.rows.private[state.rows.active].sum()),
        "nodes": state.tree.num_nodes,
        "max_request_tokens": state.max_request_tokens,
    }


def _explain(state: State, message: Ask) -> dict[str, Any]:
    """What a request with these ids would find now. No use is noted, no edge split."""
    options = _options(message, ExplainOptions)
    if not isinstance(message.prompt, IdsPrompt):
        raise BadRequest("explain needs a prompt", param="prompt")
    ids = message.prompt.ids
    tokens = len(ids) // 4
    start = SamplingParams(logprob_start=options.logprob_start_len).reads_from(tokens)
    limit = tokens - 1 if start < 0 else start
    found = verdict(state, message.namespace, ids, limit, "logprobs", options.unsalted)
    if found.stopped == "disabled":
        return {"matched": 0, "stopped": "disabled", "goes_on": False}
    trace = state.tree.trace(message.namespace, ids, found.matched)
    data: dict[str, Any] = {
        "matched": found.matched,
        "stopped": found.stopped,
        "goes_on": trace.goes_on,
    }
    if options.reveal:
        data["segments"] = [segment._asdict() for segment in trace.segments(MAX_SEGMENTS)]
        # Where the prompt itself ends the lookup, what comes after it is not cached instead of anything.
        ended_early = found.stopped not in ("last_token", "logprobs")
        data["cached_instead"] = trace.branches(MAX_BRANCHES, BRANCH_TOKENS) if ended_early else []
    return data


def _tree(state: State, options: TreeOptions) -> dict[str, Any]:
    named, overlooked = None, False
    if options.namespace is not None:
        names = state.tree.namespaces
        named = [name for name in names[:MAX_NAMESPACES] if namespaces.label(name) == options.namespace]
        overlooked = not named and len(names) > MAX_NAMESPACES
    data = state.tree.snapshot(
        options.depth, options.limit, ids=options.ids, namespaces=named, max_nodes=options.max_nodes
    )
    data["truncated"] |= overlooked
    for namespace in data["namespaces"]:
        namespace["namespace"] = namespaces.label(namespace["namespace"])
    tree = state.tree
    totals = {"nodes": tree.num_nodes, "tokens": tree.cached_tokens, "evictable": tree.evictable_tokens}
    return {**totals, "slots_total": state.pool.total, **data}
