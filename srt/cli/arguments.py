"""How a subcommand reads its arguments: its own with argparse, those of the runtime by the table of flags."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from sapwood.srt import config
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags import command_line, table

FLAGS_HELP = "The flags of SGLang and vLLM work too, or are refused with the reason: docs/flags.md."


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors: one line each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def parse(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """The arguments of a subcommand without configuration. Raises ConfigError for one that is unknown."""
    args, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, parser_options(parser))
    return args


def parse_configured(
    parser: Parser, arguments: list[str], own: Collection[str] = ()
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments of a subcommand that starts a runtime, and the fields of the configuration they set.

    `own` are flags of the subcommand that the configuration, or SGLang, or vLLM have too. An argument `model`
    is one more way to give the model. At log level debug tells on stderr what was accepted because it is so
    anyway.
    """
    command_line.add_flags(parser.add_argument_group("runtime", FLAGS_HELP), own)
    read = command_line.read(arguments, own)
    args, unknown = parser.parse_known_args(read.rest)
    refuse_unknown(unknown, parser_options(parser))
    model = getattr(args, "model", None)
    if model is not None and read.values.setdefault("model_path", model) != model:
        raise ConfigError(
            f"two models: {model!r} and --model-path {read.values['model_path']!r}", param="model_path"
        )
    if read.values.get("log_level", os.environ.get("SAPWOOD_LOG_LEVEL")) == "debug":
        for note in read.notes:
            print(f"sapwood: debug: {note}", file=sys.stderr)
    return args, read.values


def refuse_served(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for what only a server obeys: nobody listens here."""
    for name in ("host", "port", "drain_timeout"):
        if name in values:
            raise ConfigError(f"{config.option(name)} is for sapwood serve: nothing listens here", param=name)


def add_url_flags(parser: Parser, url_help: str) -> None:
    """Flags for asking a server that runs already instead of starting a runtime."""
    parser.add_argument("--url", help=f"{url_help}, such as http://127.0.0.1:30000")
    parser.add_argument("--api-key", help="the server's key (default: SAPWOOD_API_KEY)")


def key_for_url(args: argparse.Namespace, values: Mapping[str, Any], but: Collection[str] = ()) -> str | None:
    """The key for the server at `args.url`, the first if there are several; None without a server or key.

    Raises ConfigError for a key without a server, and for a field in `values` that is the server's to choose,
    as all are except those in `but`.
    """
    if args.url is None:
        if args.api_key is not None:
            raise ConfigError("--api-key is a server's: it needs --url", param="api_key")
        return None
    others = [config.option(name) for name in values if name not in ("log_level", *but)]
    if others:
        raise ConfigError(f"{others[0]} is the server's to choose: it does not go with --url")
    keys = config.split_keys(args.api_key or os.environ.get("SAPWOOD_API_KEY"))
    return keys[0] if keys else None


def parser_options(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag of a parser."""
    return [name for action in parser._actions for name in action.option_strings]


def refuse_unknown(arguments: list[str], known: Collection[str], what: str = "argument") -> None:
    """Raise ConfigError for what no command takes, with what looks most like it."""
    if not arguments:
        return
    written = arguments[0].partition("=")[0]
    if what == "command":
        close = difflib.get_close_matches(written, list(known), n=2)
    else:
        close = table.suggestions(written, known) if written.startswith("-") else []
    hint = f"; did you mean {' or '.join(close)}?" if close else "; --help lists what there is"
    raise ConfigError(f"unknown {what} {written}{hint}")
