"""A chat template that renders in processes of its own, so that none can stop, stall or flood this one.

A template comes with a model, from anywhere, and a step of it can take for ever or all memory (`~` doubles, a
format has a width, filters loop inside): only the kernel can bound that. A rendering has 2 s of CPU time and
512 MiB; a process that goes beyond is gone, its request is answered 400, and the next one gets a new process.
All renderings of one prompt have 16 s.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from sapwood.srt.bounded import BoundedProcess, no_process
from sapwood.srt.errors import BadRequest, ErrorInfo, ModelError, from_info, lone_surrogate
from sapwood.srt.tokenizer import render_child, templates
from sapwood.srt.tokenizer.render_child import Job, Result, Setup, View, Views

CPU_SECONDS = 2.0
OF_PROMPT = 8
"""So many times as long all of a prompt's renderings may take: those of a thousand messages, each by itself,
take about 10 s with the slowest of the models' templates."""
WALL_SECONDS = 20.0
"""Much more than the CPU time, which is what counts: the machine may be busy."""
GRACE_SECONDS = 0.1
"""What is not wanted any more may still go on for so long: nearly all of it is through by then, and another
process takes a tenth of a second of a core to start, for which others would pay."""
PURPOSE = "the chat template"


class Work:
    """What is done for one prompt, of which `owner` can be told to stop, within `seconds` of renderings."""

    def __init__(self, owner: object, seconds: float) -> None:
        self.owner = owner
        self.stopped = False
        self.spent = 0.0
        self._seconds = seconds

    def check(self) -> None:
        """Raises BadRequest if nobody waits for it any more."""
        if self.stopped:
            raise BadRequest("the prompt is not wanted any more", code="aborted")

    def check_time(self) -> None:
        """Raises BadRequest if nothing more may be rendered."""
        if self.spent > self._seconds:
            raise _too_long(f"{self._seconds:g} s of computing")


class IsolatedTemplate:
    """A ChatTemplate elsewhere: `render` promises what its own does, from any thread.

    There are as many processes as threads that render at once; one ends with the thread that has started it.
    Raises ModelError if the template is none, and
    Unavailable if no process can be started.
    """

    def __init__(self, source: str, variables: dict[str, str], cpu_seconds: float = CPU_SECONDS) -> None:
        self._setup = Setup(source, variables, cpu_seconds)
        self._lock = threading.Lock()
        self._closed = False
        self._busy: dict[_Process, Work] = {}
        self._works: set[Work] = set()
        first = _Process(self._setup)
        self._idle = [first]
        self._wants_parts = first.wants_parts
        self.changes = first.changes

    def prepare(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in the shape that the template expects (see templates.prepare)."""
        return templates.prepare(messages, wants_parts=self._wants_parts)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        owner: object = None,
    ) -> str:
        """As ChatTemplate.render; BadRequest too if the template takes too much time or memory, or `owner`
        is told to `stop`; Unavailable if no process is idle and none can be started, or after `close`."""
        job = Job(messages, add_generation_prompt, continue_final, kwargs or {}, tools)
        with self.work(owner) as work:
            return self._result(job, work).text.decode("utf-8", "surrogatepass")

    @contextlib.contextmanager
    def work(self, owner: object) -> Iterator[Work]:
        """While it lasts `owner` can be told to `stop`, whether something renders or not."""
        work = Work(owner, OF_PROMPT * self._setup.cpu_seconds)
        with self._lock:
            self._works.add(work)
        try:
            yield work
        finally:
            with self._lock:
                self._works.discard(work)

    def views(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any], views: list[View], work: Work
    ) -> Iterator[str | ErrorInfo]:
        """Several renderings of the same messages, each with the error that `render` would raise for it; all
        of them have the time and the memory of one. Raises what `render` raises for that."""
        text = ""
        for viewed in self._result(Views(messages, kwargs, views), work).views:
            if viewed.error is not None:
                yield viewed.error
            else:
                text = text[: viewed.kept] + viewed.rest.decode("utf-8", "surrogatepass")
                yield text

    def _result(self, job: Job | Views, work: Work) -> Result:
        try:
            frame = msgspec.msgpack.encode(job)
        except UnicodeEncodeError as e:
            raise lone_surrogate(e, "messages") from None
        except OverflowError:
            raise BadRequest("messages hold an integer beyond 64 bits", param="messages") from None
        process = self._take(work)
        result = None
        try:
            result = process.render(frame)
        finally:
            self._give_back(process, result is not None and not result.last)
        work.spent += result.cpu_seconds
        if result.error is not None:
            raise from_info(result.error)
        return result

    def stop(self, owner: object) -> None:
        """Let nothing more be done for this very owner now, and break off what renders, unless it is through
        in a moment: it raises BadRequest."""
        with self._lock:
            for work in self._works:
                work.stopped |= work.owner is owner
            theirs = [(process, work) for process, work in self._busy.items() if work.owner is owner]
        for each in theirs:
            timer = threading.Timer(GRACE_SECONDS, self._break_off, each)
            timer.daemon = True
            timer.start()

    def _break_off(self, process: _Process, work: Work) -> None:
        with self._lock:
            if self._busy.get(process) is work:
                process.break_off()

    def close(self) -> None:
        """End the processes; what renders now raises BadRequest."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
            for process in self._busy:
                process.break_off()
        for process in idle:
            process.kill()

    def _take(self, work: Work) -> _Process:
        work.check()
        work.check_time()
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.alive:
            process.kill()
            process = None
        try:
            process = process or _Process(self._setup)
        except ModelError as e:  # the first one could use the template: this one lacks something
            raise no_process(PURPOSE, e.message) from None
        with self._lock:
            if not self._closed and not work.stopped:
                self._busy[process] = work
                return process
        process.kill()
        work.check()
        raise no_process(PURPOSE, "the tokenizer ends")

    def _give_back(self, process: _Process, usable: bool) -> None:
        with self._lock:
            del self._busy[process]
            if usable and not process.broken_off:
                self._idle.append(process)
                return
        process.kill()


class _Process:
    def __init__(self, setup: Setup) -> None:
        self._cpu_seconds = setup.cpu_seconds
        self.broken_off = False
        self.process = BoundedProcess(render_child.__name__, PURPOSE, WALL_SECONDS)
        try:
            result = self._ask(msgspec.msgpack.encode(setup))
            if result.error is not None:
                raise ModelError(result.error.message)
        except BadRequest as e:
            self.kill()
            raise ModelError(f"the model's chat template cannot be used: {e.message}") from None
        except BaseException:
            self.kill()
            raise
        self.wants_parts = result.wants_parts
        self.changes = result.changes

    @property
    def alive(self) -> bool:
        return self.process.alive

    def render(self, frame: bytes) -> Result:
        """What came of the Job; BadRequest if the process has not survived it."""
        return self._ask(frame)

    def break_off(self) -> None:
        """Have a `render` in another thread fail at once."""
        self.broken_off = True
        self.process.break_off()

    def kill(self) -> None:
        self.process.kill()

    def _ask(self, frame: bytes) -> Result:
        answer = None
        try:
            self.process.send(frame)
            answer = self.process.read()
        except TimeoutError:
            raise _too_long(f"{WALL_SECONDS:g} s") from None
        except OSError:
            pass  # it is gone, for the reason that its exit tells
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Result)
        if self.process.exit_code() == -signal.SIGPROF:
            raise _too_long(f"{self._cpu_seconds:g} s of computing")
        raise BadRequest("the chat template fails on these messages: its process has ended", param="messages")


def _too_long(limit: str) -> BadRequest:
    return BadRequest(f"the chat template took more than {limit} on these messages", param="messages")
