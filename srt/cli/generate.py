"""`sapwood generate`: one prompt, answered on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import msgspec

from sapwood.srt import requirements
from sapwood.srt.cli.arguments import Parser, parse_configured, refuse_served
from sapwood.srt.cli.ends import terminable
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags.values import load

HELP = """\
Answer one prompt on this machine, without a server, and print the answer as it comes. `-` reads the prompt
from standard input. The prompt is a chat message of the user; with --raw the model goes on with the bare
text.
"""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
OWN = ("--seed",)
"""Here it is the request's; of the runtime it is --random-seed."""


def run(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt, or - for standard input")
    parser.add_argument("--raw", action="store_true", help="no chat template: go on with the bare text")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--no-stream", action="store_true", help="print the answer when it is complete, not as it comes"
    )
    add_sampling_flags(parser)
    args, values = parse_configured(parser, arguments, OWN)
    refuse_served(values)
    if args.raw and args.system is not None:
        raise ConfigError("--system needs the chat template, which --raw switches off", param="system")
    return _generate(args, values)


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int = 256) -> None:
    """Flags for how an answer is drawn; those that are not given are None."""
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"longest answer (default: {max_tokens})"
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    parser.add_argument("--top-p", type=float, help="nucleus sampling (default: the model's)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens (default: the model's)")
    parser.add_argument("--seed", type=int, help="makes a drawn answer repeatable")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def quiet(values: dict[str, Any]) -> dict[str, Any]:
    """The fields with a log that does not disturb an answer on the terminal, unless one is asked for."""
    asked = "log_level" in values or "SAPWOOD_LOG_LEVEL" in os.environ
    return values if asked else {**values, "log_level": "warning"}


def _generate(args: argparse.Namespace, values: dict[str, Any]) -> int:
    chosen = load(quiet(values))
    requirements.check(http=False)

    from sapwood.srt.engine import Engine

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = sampling_of(args)
    with terminable(), Engine(**msgspec.structs.asdict(chosen)) as engine:
        if args.raw:
            pieces = engine.generate(prompt, params, stream=True)
        else:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            pieces = engine.chat([*system, {"role": "user", "content": prompt}], params, stream=True)
        _print(pieces, at_once=args.no_stream)
    return 0


def _print(pieces: Any, *, at_once: bool) -> None:
    """Print answers of the native shape, whose `text` is all of the text so far."""
    text = ""
    for piece in pieces:
        if not at_once:
            print(piece["text"][len(text) :], end="", flush=True)
        text = piece["text"]
    print(text if at_once else "", flush=True)
