"""Tables and ratios of what `bench.serve` measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

WRONG = "WRONG"
QUIET = 0.1
"""Above this share of the machine taken by others a run is called disturbed."""
COLUMNS = (
    "workload", "server", "runs", "out tok/s (min-max)", "total tok/s", "TTFT p50/p99 ms", "TPOT p50/p99 ms",
    "ITL p50/p99 ms", "cached/prompt", "CPU s", "peak MB", "failed", "others %", "answers", "same text",
)  # fmt: skip
RATIOS = ("workload", "ratio", "output tokens/s (pairs)", "TTFT p50", "TPOT p50", "CPU", "memory", "answers")


def median(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    """Of the rows that have it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def report(result: dict[str, Any], markdown: bool = False) -> str:
    """Versions, the tables of all workloads and the ratios, as text."""
    targets = {t["name"]: t for t in result["targets"]}
    workloads = list(dict.fromkeys(row["workload"] for row in result["runs"]))
    rows = [_row(result, w, t) for w in workloads for t in targets.values() if _runs(result, w, t["name"])]
    head = [f"{result['machine']}; seed {result['seed']}, {result['date']}"]
    head += [f"{t['name']}: version {t['version']}, model {t['model']}, {t['url']}" for t in targets.values()]
    parts = ["\n".join(f"- {line}" for line in head), table(COLUMNS, rows, markdown)]
    ratio_rows = [_ratio_row(r) for r in ratios(result)]
    if ratio_rows:
        parts.append("Ratios of medians, above 1 the first server is better:")
        parts.append(table(RATIOS, ratio_rows, markdown))
    parts += [f"{t['name']} answered wrongly: {a['question']!r} -> {a['answer']!r}"
              for t in targets.values() for a in t["check"]["answers"] if not a["right"]]  # fmt: skip
    loud = sum((r["foreign_share"] or 0.0) > QUIET for r in result["runs"])
    if loud:
        parts.append(
            f"In {loud} of {len(result['runs'])} runs others took more than {QUIET:.0%} of the machine."
        )
    errors = {(r["target"], r["workload"], e) for r in result["runs"] for e in r["errors"]}
    parts += [f"{target}, {workload}: {error}" for target, workload, error in sorted(errors)]
    return "\n\n".join(parts)


def ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Per workload the first target over each other; `faulty` are those that failed or answered wrongly."""
    first, *others = result["targets"]
    found = []
    for workload in dict.fromkeys(row["workload"] for row in result["runs"]):
        ours = _runs(result, workload, first["name"])
        for other in others:
            theirs = _runs(result, workload, other["name"])
            speed = _over(median(ours, "output_per_s"), median(theirs, "output_per_s"))
            if speed is None:
                continue
            found.append({
                "workload": workload,
                "first": first["name"],
                "other": other["name"],
                "versions": [first["version"], other["version"]],
                "output_per_s": speed,
                "pairs": sorted(_pairs(ours, theirs)),
                **{key: _over(median(theirs, key), median(ours, key))
                   for key in ("ttft_p50_s", "tpot_p50_s", "server_cpu_s", "peak_pss_bytes")},
                "faulty": [t["name"] for t, runs in ((first, ours), (other, theirs)) if _faulty(t, runs)],
            })  # fmt: skip
    return found


def table(columns: Sequence[str], rows: list[list[str]], markdown: bool) -> str:
    if markdown:
        lines = [list(columns), ["---"] * len(columns), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in [list(columns), *rows]) for i in range(len(columns))]
    lines = [list(columns), *rows]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _runs(result: dict[str, Any], workload: str, target: str) -> list[dict[str, Any]]:
    return [r for r in result["runs"] if r["workload"] == workload and r["target"] == target]


def _faulty(target: dict[str, Any], runs: list[dict[str, Any]]) -> bool:
    check = target["check"]
    return check["right"] < check["asked"] or any(r["failed"] or r["short"] for r in runs)


def _pairs(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    others = {r["repeat"]: r["output_per_s"] for r in theirs}
    pairs = [_over(r["output_per_s"], others.get(r["repeat"])) for r in ours]
    return [p for p in pairs if p is not None]


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _ms(rows: list[dict[str, Any]], name: str) -> str:
    values = [median(rows, f"{name}_{p}_s") for p in ("p50", "p99")]
    return " / ".join(
        "-" if v is None else f"{1000 * v:.1f}" if v < 0.1 else f"{1000 * v:.0f}" for v in values
    )


def _number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _answers(target: dict[str, Any]) -> str:
    check = target["check"]
    right = f"{check['right']}/{check['asked']}"
    return right if check["right"] == check["asked"] else f"{right} {WRONG}"


def _row(result: dict[str, Any], workload: str, target: dict[str, Any]) -> list[str]:
    rows = _runs(result, workload, target["name"])
    rates = [r["output_per_s"] for r in rows]
    failed, short = sum(r["failed"] for r in rows), sum(r["short"] for r in rows)
    prompt = _number(median(rows, "prompt_tokens"))
    return [
        workload,
        target["name"],
        str(len(rows)),
        f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})",
        _number(median(rows, "total_per_s")),
        _ms(rows, "ttft"),
        _ms(rows, "tpot"),
        _ms(rows, "itl"),
        f"{_number(median(rows, 'cached_tokens'))} / {prompt}",
        _number(median(rows, "server_cpu_s"), 1),
        _number(max((r["peak_pss_bytes"] for r in rows if r["peak_pss_bytes"]), default=None), 0, 1e-6),
        f"{failed}" + (f", {short} short" if short else ""),
        _number(median(rows, "foreign_share"), 0, 100),
        _answers(target),
        _number(median(rows, "same_text"), 2),
    ]


def _ratio_row(ratio: dict[str, Any]) -> list[str]:
    pairs = ratio["pairs"]
    spread = f" ({pairs[0]:.2f}-{pairs[-1]:.2f})" if pairs else ""
    return [
        ratio["workload"],
        " / ".join(
            f"{name} {v}" for name, v in zip((ratio["first"], ratio["other"]), ratio["versions"], strict=True)
        ),
        f"{ratio['output_per_s']:.2f}{spread}",
        *(_number(ratio[key], 2) for key in ("ttft_p50_s", "tpot_p50_s", "server_cpu_s", "peak_pss_bytes")),
        f"{WRONG} or failed: {', '.join(ratio['faulty'])}" if ratio["faulty"] else "right",
    ]
