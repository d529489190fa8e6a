"""The parts that measure the model: each tells its figures through `Here.row`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from bench.gpu.compiling import attention_kernels
from bench.gpu.here import Here
from bench.gpu.parts import CASCADE, RAN
from bench.gpu.place import NotHere
from bench.gpu.session import Pace, Session, before_warm_up, spread_of
from bench.gpu.shape import prefill_flops, weight_bytes
from bench.gpu.trace import busiest, exported, gaps, window

DECODE_GOAL, PREFILL_GOAL = 0.7, 0.6
GAP_STEPS = 5
CAPTURE_SHARE = 0.5
"""Of its time that the part `model` spends on graphs."""


def model(here: Here) -> None:
    """Load it, run a step of each kind, and make the graphs that will be needed."""
    begin = time.monotonic()
    with before_warm_up(lambda: here.row("weights, to be warmed up", time.monotonic() - begin, "s")):
        session = here.session()
    here.row("loaded, with random weights, K and V", session.load_s, "s", facts=session.facts)
    session.prefill(here.sizes.prefills[0], ahead=1, repeats=1)
    session.decode(here.sizes.pair[1], here.sizes.context, steps=2)
    here.row(RAN, "run")
    begin = time.monotonic()
    made = _capture(here, session)
    session.decode(here.sizes.pair[1], here.sizes.context, steps=2)
    here.row(f"graphs of {made or 'no'} rows", time.monotonic() - begin, "s", graphs=made)


def decode(here: Here) -> None:
    session = _ready(here)
    for batch in here.sizes.batches:
        if not session.holds(batch, here.sizes.context):
            here.row(f"batch {batch}: {session.pool.num_slots} slots do not hold it", None)
            continue
        _decode_row(here, session, batch, session.decode(batch, here.sizes.context), DECODE_GOAL)


def prefill(here: Here) -> None:
    session = _ready(here)
    for tokens in here.sizes.prefills:
        _begun, ended = session.prefill(tokens, ahead=2, repeats=here.sizes.repeats)
        took = np.diff(ended)
        step_s = statistics.median(took)
        here.row(
            f"{tokens} tokens in one step", tokens / step_s, "tokens/s", step_s=step_s, of="matmul",
            rate=prefill_flops(session.spec, tokens) / step_s, goal=PREFILL_GOAL, batch=1, context=tokens,
            **spread_of(took),
        )  # fmt: skip


def first_token(here: Here) -> None:
    """From a step's start to its result, with nothing else to do."""
    session, sizes = _ready(here), here.sizes
    found = {}
    for cached in (sizes.prefix, 0):
        tokens = sizes.prefix + sizes.suffix - cached
        begun, ended = session.prefill(tokens, cached=cached, ahead=1, repeats=sizes.repeats)
        took = np.subtract(ended, begun)
        found[cached] = statistics.median(took)
        what = f"{cached or 'nothing'} of {sizes.prefix + sizes.suffix} cached"
        size = {"batch": 1, "context": sizes.prefix + sizes.suffix}
        here.row(what, found[cached] * 1e3, "ms", **size, **spread_of(took))
    here.row("not cached / cached", found[0] / found[sizes.prefix], "times")


def switches(here: Here) -> None:
    """Graphs and overlap, on and off."""
    session, context = _ready(here), here.sizes.context
    graphs = bool(session.runner._parts.lanes[0].captured)
    for batch in here.sizes.pair:
        on, late = session.decode(batch, context), session.decode(batch, context, ahead=1)
        _step_row(here, f"batch {batch}, overlap on", batch, on)
        _step_row(here, f"batch {batch}, overlap off", batch, late, over=on)
        if not graphs:
            here.row(f"batch {batch}, graphs: there are none", None)
            continue
        with session.eager():
            eager = session.decode(batch, context)
        _step_row(here, f"batch {batch}, graphs off", batch, eager, over=on)


def idle_gaps(here: Here) -> None:
    """Where the device waits within consecutive decode steps."""
    if here.place.dry:
        raise NotHere("a CPU has no streams to profile")
    session = _ready(here)
    for batch in here.sizes.pair:
        for ahead, name in ((2, "overlap on"), (1, "overlap off")):
            found = _profiled(session, batch, here.sizes.context, ahead)
            goal = {"most": 0} if ahead == 2 else {}
            count, total = found.pop("compute")
            here.row(f"batch {batch}, {name}", count, "gaps", seconds=total, **goal, **found)


def cascade(here: Here) -> None:
    """What rows share is read once (eager, as the worker runs it), or for each row."""
    session, sizes = _ready(here), here.sizes
    if here.place.plain:
        raise NotHere("attention in plain torch has no cascade")
    if CASCADE in here.place.without:
        raise NotHere("its kernels are not there")
    context = sizes.shared + 64
    what = f"{sizes.sharing} rows share {sizes.shared} tokens, cascade"
    on = session.decode(sizes.sharing, context, shared=sizes.shared)
    off = session.decode(sizes.sharing, context, shared=sizes.shared, told=False)
    _step_row(here, f"{what} on", sizes.sharing, on)
    _step_row(here, f"{what} off", sizes.sharing, off, over=on)


def baseline(here: Here) -> None:
    """FlashInfer beside torch's SDPA over gathered KV, in turn."""
    session, context = _ready(here), here.sizes.context
    for batch in here.sizes.compared:
        ours = None if here.place.plain else session.decode(batch, context)
        with session.plain_torch():
            theirs = session.decode(batch, context, steps=here.sizes.steps // 2)
        if ours is not None:
            name = "FlashInfer's double" if here.place.dry else "FlashInfer"
            _decode_row(here, session, batch, ours, None, f", {name}")
        ratio: dict[str, Any] = {} if ours is None else {"ratio": theirs.step_s / ours.step_s}
        _decode_row(here, session, batch, theirs, None, ", plain torch", **ratio)


def fp8(here: Here) -> None:
    """Weights and activations in 8 bits, and K and V too."""
    here.close()
    attention_kernels(here, torch.float8_e4m3fn)
    options: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    session, batch = here.session(**options), here.sizes.pair[1]
    _capture(here, session, [batch])
    pace = session.decode(batch, here.sizes.context)
    _decode_row(here, session, batch, pace, None, ", W8A8, fp8 KV", each=1)


def deterministic(here: Here) -> None:
    """Whether a row's logits are the same bits alone and among others. Attention is batch-invariant in this
    mode; the products are the library's, which may choose by the batch."""
    if here.place.plain:
        raise NotHere("the batch-invariant mode is FlashInfer's")
    session, context = here.session(deterministic=True), here.sizes.context
    alone = session.first_logits(1, context)
    among = session.first_logits(here.sizes.alone_among, context)
    same, off = torch.equal(alone, among), float((alone - among).abs().max())
    what = f"a row's logits alone and in {here.sizes.alone_among} rows are the same bits"
    here.row(what, "yes" if same else "no", off=off)


def _ready(here: Here) -> Session:
    """The model with its graphs: after a process has been lost it is loaded again."""
    session = here.session()
    if not session.runner._parts.lanes[0].captured:
        _capture(here, session)
    return session


def _capture(here: Here, session: Session, sizes: list[int] | None = None) -> list[int]:
    wanted = here.sizes.captured if sizes is None else sizes
    if not here.graphs:
        wanted = []
    return session.capture(wanted, time.monotonic() + CAPTURE_SHARE * here.left)


def _step_row(here: Here, what: str, batch: int, pace: Pace, over: Pace | None = None) -> None:
    """Its time, also as a multiple of another one's."""
    more = {} if over is None else {"ratio": pace.step_s / over.step_s}
    size = {"batch": batch, "context": pace.context}
    here.row(what, pace.step_s * 1e3, "ms/step", **size, **pace.spread, **more)


def _decode_row(
    here: Here, session: Session, batch: int, pace: Pace, goal: float | None, kind: str = "", each: int = 2,
    **more: Any,
) -> None:  # fmt: skip
    read = weight_bytes(session.spec, each) + batch * pace.context * session.slot_bytes
    graphs = session.runner._parts.lanes[0].captured
    if not kind:
        kind = ", as a graph" if batch in graphs else ", eager"
    here.row(
        f"batch {batch}, context {here.sizes.context}{kind}", batch / pace.step_s, "tokens/s",
        step_s=pace.step_s, bytes=read, of="read", rate=read / pace.step_s,
        batch=batch, context=pace.context, **pace.spread,
        **({} if goal is None else {"goal": goal}), **more,
    )  # fmt: skip


def _profiled(session: Session, batch: int, context: int, ahead: int) -> dict[str, Any]:
    """Gaps of GAP_STEPS steps: on the compute stream, and those in which nothing at all ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        pace = session.decode(batch, context, ahead=ahead, steps=2 * GAP_STEPS)
        session.place.wait()
    events = exported(run)
    if not events:
        raise NotHere("the profiler saw nothing of the device")
    # The last two steps have none behind them that could be launched ahead.
    span = window(events, pace.step_s, GAP_STEPS, after=2)
    stream = busiest(events)
    compute = gaps([event for event in events if event.stream == stream], *span)
    idle = gaps(events, *span)
    return {
        "compute": (compute.count, compute.seconds), "steps": GAP_STEPS, "step_s": pace.step_s,
        "idle_gaps": idle.count, "idle_seconds": idle.seconds, "events": len(events),
    }  # fmt: skip
