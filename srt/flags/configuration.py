"""docs/configuration.md, made from the fields: `python -m sapwood.srt.flags.configuration`."""

from __future__ import annotations

from sapwood.srt.config import choices, default, fields, option

_PREFACE = (
    "# Configuration",
    "",
    "Every flag of `sapwood serve`, made by `python -m sapwood.srt.flags.configuration` from the fields of",
    "srt/config.py. `--chunked-prefill-size 512` is `SAPWOOD_CHUNKED_PREFILL_SIZE=512` as an environment",
    "variable, and `sapwood.Engine(chunked_prefill_size=512)` in Python. A flag wins over its variable; a",
    "switch has a `--no-` form too. Lengths are in tokens, times in seconds. A flag that is given twice",
    "must say the same; `_` counts as `-`; `8k` is 8000 and `8K` is 8192. What the flags of SGLang and vLLM",
    "do here is in [flags.md](flags.md).",
)


def markdown() -> str:
    """The page: one row for each field."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for name, kind, flag in fields():
        listed = ", ".join(f"`{choice}`" for choice in choices(kind))
        limits = f" ({listed})" if listed else ""
        value = "" if default(name) is None else f"`{default(name)}`"
        lines.append(f"| `{option(name)}` | {value} | {flag.help}{limits} |")
    return "\n".join([*_PREFACE, "", *lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
