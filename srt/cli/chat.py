"""`sapwood chat`: a conversation in the terminal, with a model on this machine or behind a URL."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from sapwood.srt import requirements
from sapwood.srt.cli.arguments import Parser, add_url_flags, key_for_url, parse_configured, refuse_served
from sapwood.srt.cli.chat_commands import Chat
from sapwood.srt.cli.chat_screen import Screen, open_screen
from sapwood.srt.cli.chat_sources import EngineSource, Source
from sapwood.srt.cli.ends import terminable
from sapwood.srt.cli.generate import add_sampling_flags, quiet, sampling_of
from sapwood.srt.errors import ProcessDied, SapwoodError
from sapwood.srt.flags.values import load

HELP = """\
Talk with a model. Without --url it runs here: MODEL is a Hugging Face folder, a .gguf file, org/name on the
Hugging Face hub, or a name that `sapwood models` lists, by default SmolLM2-135M-Instruct. With --url it is
any OpenAI-compatible server's, and MODEL the server's name for it.

A line that ends in a backslash goes on; between two lines of \"\"\" there may be several. Ctrl-C stops the
answer, Ctrl-D leaves. /help lists what else can be said. After each answer: tokens per second, tokens of the
answer and of the prompt, how many of those were in the cache, and the time to the first token. When input or
output is a pipe, each line is a turn, answers go to standard output and the rest to standard error.
"""
OWN = ("--seed", "--api-key")


def run(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    add_url_flags(parser, "a server to talk with")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling_flags(parser, max_tokens=1024)
    args, values = parse_configured(parser, arguments, OWN)
    refuse_served(values)
    screen = open_screen()
    with terminable(), _source(args, values) as source:
        screen.hello(source.name)
        return _converse(Chat(source, args.system, sampling_of(args)), screen)


@contextlib.contextmanager
def _source(args: argparse.Namespace, values: dict[str, Any]) -> Iterator[Source]:
    key = key_for_url(args, values, ("model_path",))
    if args.url is None:
        chosen = load(quiet(values))
        requirements.check(http=False)
        with EngineSource(chosen) as engine:
            yield engine
        return
    from sapwood.srt.cli.chat_url import UrlSource

    with UrlSource(args.url, key, values.get("model_path")) as server:
        yield server


def _converse(chat: Chat, screen: Screen) -> int:
    """Read and answer until the input ends. A wrong request does not end the conversation; a death does.

    Without a terminal the exit code tells whether all were answered.
    """
    code = 0
    while (line := screen.read()) is not None:
        question = None
        try:
            command = chat.command(line)
            if command is not None and command.leave:
                return code
            if command is not None:
                screen.note(command.text)
            question = line if command is None else command.question
            if question is not None:
                _turn(chat, question, screen)
        except ProcessDied:
            raise
        except SapwoodError as e:
            screen.error(e.message)
            if question is not None and not screen.interactive:
                code = 1
                if e.status >= 500:
                    return code
    return code


def _turn(chat: Chat, question: str, screen: Screen) -> None:
    """One question and its answer; in a terminal Ctrl-C keeps what came so far."""
    turn = chat.ask(question)
    try:
        for piece in turn:
            screen.write(piece)
    except KeyboardInterrupt:
        screen.end("stopped")
        if not screen.interactive:
            raise
    else:
        screen.end("")
    finally:
        turn.close()
    screen.note(chat.last.line())
