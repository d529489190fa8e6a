"""Recorded turns of the scheduler and their replay: the same messages must give the same steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.messages import Step
from sapwood.srt.scheduler.loop import Scheduler, make_state
from tests.simulation.scenario import STEP, Scenario, Shape
from tests.simulation.seeds import fill
from tests.simulation.shown import part, shown
from tests.simulation.simulator import Simulation, Turn
from tests.simulation.world import model

FOLDER = Path(__file__).parent.parent / "replay" / "traces"
RECORD = "python -m bench.scheduler record"


class Recorded(msgspec.Struct, array_like=True):
    """One Turn; `inputs`, `steps` and the outputs for each tokenizer are frames."""

    now: float
    inputs: bytes
    steps: bytes
    outputs: list[tuple[int, bytes]]


class Trace(msgspec.Struct):
    """Turns from the start, of a scheduler with these options on an empty pool."""

    options: dict[str, Any]
    num_slots: int
    context: int
    turns: list[Recorded]


def workloads() -> dict[str, Scenario]:
    """What is recorded, by name."""
    options: dict[str, Any] = {
        "max_running_requests": 8,
        "chunked_prefill_size": 16,
        "random_seed": 1,
        "speculative_algorithm": "none",
    }

    def shape(requests: int, num_slots: int, **more: Any) -> Shape:
        chosen = {**options, **more.pop("options", {})}
        given = {"gap": STEP, "burst": 4, "chaos": 0.0, "output": 10, **more}
        return Shape(chosen, num_slots, 96, requests, **given)

    found = {
        "chat": fill(1, shape(40, 1500, sharing=("chat",), gap=4 * STEP)),
        "few-shot-tree": fill(2, shape(60, 1000, sharing=("tree",), burst=60)),
        "overload": fill(3, shape(40, 110, output=40, chaos=1.0, burst=20)),
    }
    for policy in ("fcfs", "dfs-weight", "lof", "priority", "fair"):
        chosen = {"schedule_policy": policy, "max_running_requests": 3}
        found[policy] = fill(4, shape(30, 300, burst=10, chaos=0.5, options=chosen))
    drafting = {"speculative_algorithm": "auto"}
    found["drafts"] = fill(5, shape(60, 1500, output=40, repeats=True, burst=1, options=drafting))
    found["grammars"] = fill(7, shape(40, 600, output=40, grammars=0.7, chaos=0.5, options=drafting))
    return found


def record(scenario: Scenario) -> Trace:
    """Simulate it, and keep what the scheduler took in and gave."""
    shape = scenario.shape
    trace = Trace(shape.options, shape.num_slots, shape.context, [])

    def keep(turn: Turn) -> None:
        outputs = [(tokenizer, messages.encode(told)) for tokenizer, told in sorted(turn.outputs.items())]
        trace.turns.append(
            Recorded(turn.now, messages.encode(turn.inputs), messages.encode(turn.steps), outputs)
        )

    Simulation(scenario, tap=keep).run()
    return trace


def save(trace: Trace, path: Path) -> None:
    path.write_bytes(zlib.compress(msgspec.msgpack.encode(trace), 9))


def load(path: Path) -> Trace:
    return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=Trace)


def difference(trace: Trace) -> str | None:
    """The first thing in which the scheduler does not do what was recorded, for a person to read."""
    now = 0.0
    config = make(**trace.options)
    state = make_state(config, model(trace.context), trace.num_slots, lambda: now)
    steps: list[Any] = []

    def send(step: Any) -> bool:
        steps.append(step)
        return True

    scheduler = Scheduler(state, send)
    for number, turn in enumerate(trace.turns):
        now = turn.now
        for message in messages.decode(turn.inputs):
            scheduler.handle(message)
        scheduler.advance()
        outgoing, state.outgoing = state.outgoing, {}
        pairs = [("steps", messages.decode(turn.steps), steps)]
        recorded = {tokenizer: messages.decode(frame) for tokenizer, frame in turn.outputs}
        for tokenizer in sorted({*recorded, *outgoing}):
            told = recorded.get(tokenizer, [])
            pairs.append((f"messages to tokenizer {tokenizer}", told, outgoing.get(tokenizer, [])))
        for what, before, given in pairs:
            after = messages.decode(messages.encode(given))
            if before != after:
                inputs = "\n".join(f"    {shown(message)}" for message in messages.decode(turn.inputs))
                lines = "\n".join(_compare(before, after))
                return f"turn {number}, at {now:.4f} s, {what}:\n{lines}\nafter these inputs:\n{inputs}"
        steps.clear()
    return None


def _compare(before: list[Any], after: list[Any]) -> Iterator[str]:
    """Lines about the first message in which two lists differ."""
    if len(before) != len(after):
        yield f"  {len(before)} were recorded, there are {len(after)} now"
    for i, (was, now) in enumerate(zip(before, after, strict=False)):
        if was == now:
            continue
        name = f"step {was.number}" if isinstance(was, Step) else f"message {i}"
        if type(was) is not type(now):
            yield f"  {name}: recorded {shown(was)}"
            yield f"  {name}: now      {shown(now)}"
            return
        for field in was.__struct_fields__:
            old, new = getattr(was, field), getattr(now, field)
            if old != new:
                if isinstance(old, list):
                    old, new = [x for x in old if x not in new], [x for x in new if x not in old]
                yield f"  {name}, {field}: recorded {part(field, old)}"
                yield f"  {name}, {field}: now      {part(field, new)}"
        return
    longer, which = (before, "recorded") if len(before) > len(after) else (after, "now")
    extra = longer[min(len(before), len(after))]
    yield f"  only {which}: {shown(extra)}"
