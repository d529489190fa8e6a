"""The `sapwood` command: which subcommands there are, and what comes of their errors."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import sapwood
from sapwood.srt.cli.arguments import Parser, refuse_unknown
from sapwood.srt.cli.ends import ending_with_0
from sapwood.srt.errors import BadRequest, ConfigError, ModelError, ProcessDied, SapwoodError

DESCRIPTION = "Sapwood: a serving runtime for large language models with an exact prefix cache."
COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk with a model in the terminal",
    "generate": "answer one prompt",
    "batch": "work through a file of requests",
    "models": "what models there are, and what can be served",
    "env": "versions, instruction sets and devices, for bug reports",
    "version": "print the version",
}
"""Name of a subcommand: what it is for. Each but `version` has its module in this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 after a failure, 2 after a wrong flag or model."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SapwoodError as e:
        print(f"sapwood: error: {e.message}", file=sys.stderr)
        mendable = isinstance(e, ConfigError | ModelError | BadRequest)
        return 2 if mendable or (isinstance(e, ProcessDied) and e.expected) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone away; the interpreter must not try to write it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["version"]:
        arguments = ["--version", *arguments[1:]]
    if not arguments or arguments[0] not in COMMANDS:
        _overview(arguments)
    name, *rest = arguments
    # First of all: what is imported now takes a second.
    with ending_with_0() if name == "serve" else contextlib.nullcontext():
        module: Any = importlib.import_module(f"sapwood.srt.cli.{name}")
        parser = Parser(
            prog=f"sapwood {name}",
            description=module.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return int(module.run(parser, rest))


def _overview(arguments: list[str]) -> NoReturn:
    """What the command itself answers: its help, its version, or an error."""
    parser = Parser(
        prog="sapwood",
        description=DESCRIPTION,
        usage="sapwood [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["commands:", *(f"  {name:<10} {what}" for name, what in COMMANDS.items()), "",
             "sapwood COMMAND --help tells more of each."]
        ),
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"sapwood {sapwood.__version__}")
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(2)
    _, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, COMMANDS, what="command")
    parser.error("a command is needed: " + ", ".join(COMMANDS))
