"""The figures as a table, with shares of what was measured, goals, and whether they are met."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
OF = {"read": "of reading", "matmul": "of matmul"}


class Report:
    """Completes rows as they come; what is `dry` meets no goal, and fails none."""

    def __init__(self, dry: bool) -> None:
        self._dry = dry
        self._rooflines: dict[str, float] = {}
        self._part = ""

    def take(self, part: str, row: Row) -> str:
        """A row's line, once its share and whether its goal is met are in it."""
        unit = {"GB/s": 1e9, "TFLOP/s": 1e12}
        if "roofline" in row:
            self._rooflines[row["roofline"]] = row["value"] * unit[row["unit"]]
        if "rate" in row:
            best = self._rooflines.get(row["of"])
            row["share"] = None if best is None else row["rate"] / best
        met = None
        if row.get("goal") is not None and row["share"] is not None:
            met = row["share"] >= row["goal"]
        if "most" in row:
            met = row["value"] <= row["most"]
        if "goal" in row or "most" in row:
            row["met"] = None if self._dry else met
        line = f"{'' if part == self._part else part:<14}{_line(row)}"
        self._part = part
        return line.rstrip()

    def over(self, part: str, status: str, reason: str | None, seconds: float) -> str:
        """The line at the end of a part."""
        line = f"{'' if part == self._part else part:<14}-- {status} in {seconds:.1f} s"
        self._part = part
        return f"{line}: {reason}" if reason else line


def _line(row: Row) -> str:
    value = row["value"]
    figure = f"{_number(value)} {row['unit']}" if value is not None and row["unit"] else _number(value)
    notes = []
    if row.get("share") is not None:
        notes.append(f"{row['share']:.0%} {OF[row['of']]}")
    if "ratio" in row:
        notes.append(f"{row['ratio']:.2f} times as long")
    if row.get("seconds"):
        notes.append(f"{row['seconds'] * 1e6:.0f} us in all")
    goal = ""
    if "goal" in row:
        goal = f"goal >= {row['goal']:.0%}"
    elif "most" in row:
        goal = f"goal {row['most'] or 'none'}"
    if row.get("met") is not None:
        goal += ", met" if row["met"] else ", NOT MET"
    if len(row["what"]) > 48 and not figure:
        return str(row["what"])
    return f"{row['what']:<50}{figure:>18}  {', '.join(notes):<18}{goal}"


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
