"""The process in which one chat template renders; the kernel bounds what it may use of time and memory.

Started by isolation.py (see bounded_child.py): reads a Setup and then Jobs, answers each. It renders one chat
after another: what keeps them apart is the template's sandbox.
"""

from __future__ import annotations

import resource
import socket
import sys
import time
from typing import Any

import msgspec

from sapwood.srt import bounded_child
from sapwood.srt.bounded_child import limited, memory, read, send
from sapwood.srt.errors import BadRequest, ErrorInfo, ModelError, SapwoodError
from sapwood.srt.tokenizer.templates import Changes, ChatTemplate

MEMORY_BYTES = 512 * 2**20
BLOCK_CHARS = 2**14
VIEWS_BYTES = 64 * 2**20
"""Of text that the Views of one Job may have; what they have in common counts once."""
KEEP_BYTES = 128 * 2**20
"""A process that holds more than this after a rendering ends, so that the memory goes back."""


class Setup(msgspec.Struct, array_like=True):
    source: str
    variables: dict[str, str]
    cpu_seconds: float


class Job(msgspec.Struct, array_like=True, tag=True):
    """The arguments of ChatTemplate.render."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final: bool
    kwargs: dict[str, Any]
    tools: list[dict[str, Any]] | None


class View(msgspec.Struct, array_like=True):
    """A rendering of the first `count` messages, the last of them with another `content` (if not None)."""

    count: int
    add_generation_prompt: bool = False
    content: Any = None


class Views(msgspec.Struct, array_like=True, tag=True):
    """Several renderings of the same messages, within the limits of one."""

    messages: list[dict[str, Any]]
    kwargs: dict[str, Any]
    views: list[View]


class Viewed(msgspec.Struct, array_like=True):
    """A View's text: `kept` characters of the one before it (of those that have no error), and `rest`."""

    kept: int = 0
    rest: bytes = b""
    error: ErrorInfo | None = None


class Result(msgspec.Struct, array_like=True):
    """`text` is UTF-8 (with surrogates, which the caller refuses). `last`: this process ends now.
    `wants_parts` and `changes` are the template's, told once."""

    text: bytes = b""
    error: ErrorInfo | None = None
    wants_parts: bool = False
    changes: Changes = "never"
    last: bool = False
    views: list[Viewed] = []
    cpu_seconds: float = 0.0


def _serve(sock: socket.socket) -> None:
    bounded_child.limit(resource.RLIMIT_AS, MEMORY_BYTES)
    setup = read(sock)
    if setup is None:
        return
    decoded = msgspec.msgpack.decode(setup, type=Setup)
    template, result = _compile(decoded)
    send(sock, msgspec.msgpack.encode(result))
    if template is None:
        return
    while (frame := read(sock)) is not None:
        begin = time.process_time()
        result = _render(template, frame, decoded.cpu_seconds)
        result.cpu_seconds = time.process_time() - begin
        result.last = result.last or memory()[1] > KEEP_BYTES
        send(sock, msgspec.msgpack.encode(result))
        if result.last:
            return


def _compile(setup: Setup) -> tuple[ChatTemplate | None, Result]:
    # Filters of constants run already here.
    with limited(setup.cpu_seconds):
        try:
            template = ChatTemplate(setup.source, setup.variables)
        except ModelError as e:
            return None, Result(error=e.info())
        except MemoryError:
            return None, Result(error=_too_much().info())
    return template, Result(wants_parts=template.wants_parts, changes=template.changes)


def _render(template: ChatTemplate, frame: bytes, cpu_seconds: float) -> Result:
    with limited(cpu_seconds):
        try:
            job = msgspec.msgpack.decode(frame, type=Job | Views)
            if isinstance(job, Views):
                return Result(views=_views(template, job))
            text = template.render(
                job.messages, job.add_generation_prompt, job.continue_final, job.kwargs, job.tools
            )
            return Result(text.encode("utf-8", "surrogatepass"))
        except SapwoodError as e:
            return Result(error=e.info())
        except MemoryError:
            return Result(error=_too_much().info(), last=True)
        except Exception as e:
            error = BadRequest(f"the chat template fails on these messages: {type(e).__name__}")
            return Result(error=error.info())


def _views(template: ChatTemplate, job: Views) -> list[Viewed]:
    found, before, held = [], "", 0
    for view in job.views:
        messages = job.messages[: view.count]
        if view.content is not None:
            messages[-1] = messages[-1] | {"content": view.content}
        try:
            text = template.render(messages, view.add_generation_prompt, False, job.kwargs)
        except BadRequest as e:
            found.append(Viewed(error=e.info()))
            continue
        kept = _in_common(before, text)
        found.append(Viewed(kept, text[kept:].encode("utf-8", "surrogatepass")))
        before, held = text, held + len(found[-1].rest)
        if held > VIEWS_BYTES:
            raise MemoryError
    return found


def _in_common(before: str, text: str) -> int:
    """How many characters both begin with."""
    if text.startswith(before):  # nearly always
        return len(before)
    at = 0
    while text.startswith(block := before[at : at + BLOCK_CHARS], at):
        at += len(block)
    low, high = 0, len(block) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(block[:middle], at):
            low = middle
        else:
            high = middle - 1
    return at + low


def _too_much() -> BadRequest:
    return BadRequest(
        f"the chat template needs more than {MEMORY_BYTES // 2**20} MiB on these messages", param="messages"
    )


if __name__ == "__main__":
    bounded_child.main(int(sys.argv[1]), _serve)
