"""docs/flags.md, made from the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sapwood.srt import config
from sapwood.srt.flags.entry import ANY, FALSE, TRUE, Entry
from sapwood.srt.flags.table import TABLE

_WHOSE = {"sglang": "SGLang", "vllm": "vLLM", "both": "both"}
_PREFACE = """\
# The flags of SGLang and vLLM

What each flag of `sglang.launch_server` and `vllm serve` does as a flag of `sapwood serve`, made by
`python -m sapwood.srt.flags` from the table in srt/flags. As Python keywords (`tensor_parallel_size=1`) the
same names work for `Engine`, `LLM` and `Runtime`. Nothing is accepted and ignored: a flag does its work,
asks for what happens anyway, or is refused with the reason. `_` counts as `-`; a switch may be followed by
true or false, and has a `--no-` form; a switch that is refused may be switched off. Two flags that set one
field to different values are an error. Only our own environment variables are read.
"""


def markdown() -> str:
    """The page: counts, what does its work, what is so anyway, and what is refused, by its reason."""
    counts = Counter(entry.action for entry in TABLE)
    lines = [
        *_PREFACE.splitlines(),
        "",
        f"{len(TABLE)} names: {counts['same']} do their work, {counts['anyway']} ask for what is so anyway, "
        f"{counts['refused']} are refused (many of them may be given with a value that asks for nothing).",
        "",
        "## Does its work",
        "",
        "| flag | of | here | |",
        "|---|---|---|---|",
        *(_working(entry) for entry in TABLE if entry.action == "same"),
        "",
        "## Is so anyway",
        "",
        "| flag | of | accepted | because |",
        "|---|---|---|---|",
        *(
            f"| `{entry.flag}` | {_WHOSE[entry.vocabulary]} | {_accepted(entry)} | {entry.reason} |"
            for entry in TABLE
            if entry.action == "anyway"
        ),
        "",
        "## Is refused",
        *_refused(entry for entry in TABLE if entry.action == "refused"),
    ]
    return "\n".join([*lines, ""])


def _working(entry: Entry) -> str:
    notes = [entry.reason] if entry.reason else []
    for text, value in entry.becomes.items():
        if value is not None and value != text:
            notes.append(f"`{text}` is `{str(value).lower() if isinstance(value, bool) else value}`")
    for text, (field, value) in entry.also.items():
        notes.append(f"`{text}` sets `{config.option(field)}` to {str(value).lower()} too")
    for text, (field, value) in entry.elsewhere.items():
        notes.append(f"`{text}` sets `{config.option(field)}` to {str(value).lower()} instead")
    wrong: dict[str, list[str]] = {}
    for text, reason in entry.wrong.items():
        wrong.setdefault(reason, []).append("all else" if text == ANY else f"`{text}`")
    notes += [f"refused: {', '.join(values)} ({reason})" for reason, values in wrong.items()]
    ours = config.option(entry.target)
    return f"| `{entry.flag}` | {_WHOSE[entry.vocabulary]} | `{ours}` | {'; '.join(notes)} |"


def _accepted(entry: Entry) -> str:
    if entry.accepts == (ANY,):
        return "any value" if not entry.switch else "on and off"
    if entry.switch:
        return {TRUE: "on", FALSE: "off"}[entry.accepts[0]]
    return ", ".join(f"`{value}`" for value in entry.accepts)


def _refused(entries: Iterable[Entry]) -> list[str]:
    """A section for each reason, in the table's order."""
    sections: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        only = f" (but {_accepted(entry)})" if entry.accepts and not entry.switch else ""
        sections.setdefault((entry.reason, entry.instead), []).append(f"`{entry.flag}`{only}")
    lines: list[str] = []
    for (reason, instead), flags in sections.items():
        lines += ["", f"**{reason[0].upper()}{reason[1:]}**{f': {instead}' if instead else ''}.", ""]
        lines += [", ".join(sorted(flags, key=lambda f: f.lstrip("`-"))) + "."]
    return lines
