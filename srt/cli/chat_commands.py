"""The state of a conversation, and the commands that change it."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sapwood.srt.cli.chat_sources import Source, Usage
from sapwood.srt.errors import BadRequest
from sapwood.srt.params import SamplingParams

HELP = """\
/help              this list
/system [TEXT]     set the system message; without TEXT, remove it
/clear             forget the conversation, but not the system message
/undo              forget the last question and its answer
/retry             answer the last question anew
/set [NAME VALUE]  a sampling parameter, such as /set temperature 0.3; without a value: the default;
                   without a name: list them
/save FILE         write the conversation as JSON
/quit              leave, as Ctrl-D does
A message that begins with a slash is written with two."""
SETTABLE = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip
_VOCABULARY = 2**31
"""No id is given here that would have to be checked against a real one."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a command says and does: a text for the screen, a question to be asked, whether to leave."""

    text: str = ""
    question: str | None = None
    leave: bool = False


@dataclass(slots=True)
class Measures:
    """Times of a turn in seconds, its tokens, and the server's own counts once they are known."""

    began: float
    first: float | None = None
    ended: float = 0.0
    usage: Usage | None = None

    def line(self) -> str:
        """Tokens per second are those after the first, over the time since it."""
        if self.usage is None:
            return "no answer"
        usage = self.usage
        first = self.ended if self.first is None else self.first
        seconds = self.ended - first
        rate = f"{(usage.completion_tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 else "-"
        cached = "" if usage.cached_tokens is None else f", {usage.cached_tokens} cached"
        return (
            f"{rate if usage.completion_tokens > 1 else '-'} · {usage.completion_tokens} tokens · "
            f"prompt {usage.prompt_tokens}{cached} · first after {first - self.began:.2f} s"
        )


class Chat:
    """A conversation with `source`. `last` measures the latest turn."""

    def __init__(self, source: Source, system: str | None, params: dict[str, Any]) -> None:
        self.params = dict(params)
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last = Measures(0.0)
        self._source = source
        self._defaults = dict(params)

    def ask(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer as they come. The question and what came of its answer, even if it was cut
        short, stay in the conversation; after an error, or before the first piece, neither does."""
        text = ""
        self.messages.append({"role": "user", "content": question})
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        measures = self.last = Measures(time.monotonic())
        pieces = self._source.answer([*system, *self.messages], self.params)
        failed = True
        try:
            for piece in pieces:
                now = time.monotonic()
                if piece.text:  # a server's first event only says whose turn it is
                    measures.first = measures.first or now
                measures.ended, measures.usage = now, piece.usage or measures.usage
                text += piece.text
                if piece.text:
                    yield piece.text
            failed = False
        except (GeneratorExit, KeyboardInterrupt):
            failed = not text
            raise
        finally:
            pieces.close()
            if failed:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": text})

    def command(self, line: str) -> Told | None:
        """Carry out what begins with a slash; None if it does not. Raises BadRequest for what is wrong."""
        if not line.startswith("/"):
            return None
        if line.startswith("//"):
            return Told(question=line[1:])
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "help" | "?":
                return Told(HELP)
            case "quit" | "exit" | "q":
                return Told(leave=True)
            case "clear":
                self.messages.clear()
                return Told("the conversation is forgotten")
            case "system":
                self.system = rest or None
                return Told("system message set" if rest else "no system message")
            case "undo":
                self._forget()
                return Told(f"the last question is forgotten; {len(self.messages) // 2} are left")
            case "retry":
                return Told(question=self._forget())
            case "set":
                return Told(self._set(*rest.split(" ", 1)))
            case "save":
                return Told(self._save(rest))
        raise BadRequest(f"there is no command /{name}; /help lists them")

    def _forget(self) -> str:
        """Drop the last question and its answer; returns the question."""
        if len(self.messages) < 2:
            raise BadRequest("nothing has been asked yet")
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question

    def _set(self, name: str, value: str = "") -> str:
        if name and name not in SETTABLE:
            raise BadRequest(f"there is no parameter {name!r}; there are {', '.join(SETTABLE)}")
        if name and value:
            checked = msgspec.json.decode(msgspec.json.encode({**self.params, name: _value(name, value)}))
            try:
                msgspec.convert(checked, SamplingParams).check(_VOCABULARY)
            except msgspec.ValidationError as e:
                raise BadRequest(f"{name}: {e}") from None
            self.params[name] = checked[name]
        elif name:
            self.params.pop(name, None)
            if name in self._defaults:
                self.params[name] = self._defaults[name]
        listed = [f"{name} {json.dumps(value)}" for name, value in self.params.items()]
        return ", ".join(listed) or "every parameter is the model's own"

    def _save(self, name: str) -> str:
        if not name:
            raise BadRequest("/save needs the name of a file")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        saved = {"model": self._source.name, "params": self.params, "messages": [*system, *self.messages]}
        path = Path(name).expanduser()
        try:
            path.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as e:
            raise BadRequest(f"cannot write {path}: {e.strerror}") from None
        return f"{len(saved['messages'])} messages written to {path}"


def _value(name: str, text: str) -> Any:
    if name == "stop":
        return [text]
    try:
        return json.loads(text)
    except ValueError:
        raise BadRequest(f"{name} must be a number, true or false, got {text!r}") from None
