"""Where the device had nothing to do, from a profile of decode steps."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_GAP = 20e-6
"""Seconds: a gap that is shorter is a kernel's launch or its end."""
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Event:
    """What ran on a stream, in seconds."""

    stream: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Those of LEAST_GAP or more: how many, and their seconds together."""

    count: int
    seconds: float


def events_of(trace: dict[str, Any]) -> list[Event]:
    """The device's events of a Chrome trace, as torch's profiler writes it."""
    return [
        Event(int(e["args"]["stream"]), e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6)
        for e in trace["traceEvents"]
        if e.get("cat") in WORK and "stream" in e.get("args", {})
    ]


def exported(profile: Any) -> list[Event]:
    """The events of a torch.profiler.profile that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text(encoding="utf-8")))


def busiest(events: Sequence[Event]) -> int:
    """The stream on which the most time was spent: the compute stream."""
    spent: Counter[int] = Counter()
    for event in events:
        spent[event.stream] += round((event.end - event.begin) * 1e9)
    return spent.most_common(1)[0][0]


def gaps(events: Sequence[Event], begin: float, end: float) -> Gaps:
    """Between one event's end and the next one's begin, from `begin` to `end`."""
    found, reached = [], begin
    for event in sorted(events, key=lambda e: e.begin):
        if event.begin >= end:
            break
        if event.end <= begin:
            continue
        if event.begin - reached >= LEAST_GAP:
            found.append(event.begin - reached)
        reached = max(reached, event.end)
    if end - reached >= LEAST_GAP:
        found.append(end - reached)
    return Gaps(len(found), sum(found))


def window(events: Sequence[Event], step_s: float, steps: int, after: int) -> tuple[float, float]:
    """So many steps that end `after` steps before the last event: the last ones have none behind them."""
    end = max(event.end for event in events) - after * step_s
    return end - steps * step_s, end
