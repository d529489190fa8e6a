"""`sapwood env`: what a bug report needs of the machine, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sapwood.srt.cli.arguments import Parser, parse
from sapwood.srt.cli.probes import collect

HELP = """\
Print versions, platform, instruction sets, memory, devices and SAPWOOD_ variables, for bug reports. Keys are
not shown, nor the name of your home folder. Loads no model and no GPU library.
"""


def run(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    args = parse(parser, arguments)
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for title, values in found.items():
        show(title, values or {"none": ""})
    return 0


def show(title: str, values: Mapping[str, str]) -> None:
    """Print a title, and below it a line for each value, names in one column."""
    print(title)
    width = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"  {name:<{width}}  {value}".rstrip())
