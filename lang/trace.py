"""What a program begins with before it asks the model anything: found by running it on a state that sends
nothing and knows no output.

The run stops at the first generation, selection or branch, where the program reads from its state, where it
looks at an argument that is not known, and where it raises or waits for anything. Until there its own code is
run, with what that code does, on copies of its arguments. It is run in a thread of its own, so that a program
which never lets itself be stopped can be left behind.
"""

from __future__ import annotations

import contextvars
import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from sapwood.lang import ops
from sapwood.lang.backend import Content, Segment, Segments, Text, Turn
from sapwood.lang.context import Context
from sapwood.lang.errors import Unsupported
from sapwood.lang.ir import Expr, Generation, Selection, Variable, parts_of
from sapwood.lang.line import Op
from sapwood.lang.state import AsyncState, State

MOST_STOPS = 100
"""So often a program may swallow the end of its trace; then its thread stays where it is."""

UNWIND_SECONDS = 1.0
"""How long a program that is stopped has for its own handlers before others go on beside it."""

MOST_PARTS = 10_000
"""An argument of more values, all lists and dicts in it counted through, is not copied for a trace."""

_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_GROUPS = (list, tuple, set, frozenset, dict)

_tracing: contextvars.ContextVar[_Line | None] = contextvars.ContextVar("sapwood_tracing", default=None)

# Each of them has left a thread behind, and is not to leave another.
_unstoppable: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class Stop(BaseException):
    """The trace ends here. No Exception: a program's own handlers shall let it pass."""


def refuse() -> None:
    """Ends the trace, if there is one: for whatever would send something."""
    line = _tracing.get()
    if line is not None:
        line.stop(sealed=False)


Check = Callable[[Generation | Selection, Segments], None]


def prefix_of(
    function: Callable[..., Any], arguments: Sequence[Mapping[str, Any]], check: Check | None = None
) -> Segments:
    """What all runs of `function(s, **arguments[i])` begin with; nothing is sent.

    With `check` the first request of each run is shown to it; an Unsupported that it raises is raised.

    A run gets copies of its arguments and defaults as far as they are plain data: text, numbers, None, and
    lists, tuples, sets and dicts of such. Others are not known, nor are those without a value and a default;
    without any set of arguments none is. Text that only begins alike is cut where the tokens of what is left
    stay the same: before a space or after a new line.
    """
    every: list[Mapping[str, Any] | None] = [*arguments] or [None]
    traces = (_trace(function, kwargs, check) for kwargs in every)
    found: _Traced | None = None
    for trace in traces:
        found = trace if found is None else _common(found, trace)
        if not _stable(found):
            break
    return _stable(found) if found is not None else ()


class Unknown(Variable):
    """An argument that is not known. It can be added to text and to a state; anything else reads it."""

    __slots__ = ()

    def _read(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse()
        raise Stop

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._read()

    __repr__ = __str__ = __format__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _read
    __call__ = __int__ = __float__ = __index__ = __eq__ = __ne__ = __hash__ = __await__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = __sub__ = __mul__ = __mod__ = __rmul__ = __rmod__ = _read


class _Traced(NamedTuple):
    """What a run begins with. `sealed`: its last text has ended; else what comes next may join with it."""

    segments: Segments
    sealed: bool


class _Line:
    """The line of a traced state: it keeps what is added until something is asked for, and tells nothing."""

    closed = False  # for Writer: nothing is refused, the trace stops instead

    def __init__(self, check: Check | None) -> None:
        self.check = check
        self.shadow = Context()
        self.sealed = False
        self.ended = threading.Event()
        self.refused: Unsupported | None = None
        self.names = _Names()
        self.stops = 0

    def put(self, op: Op) -> None:
        """What an operation is to do later is never done; it has changed the shadow."""

    def fork(self, size: int) -> NoReturn:
        self.stop(sealed=True)

    def ask(self, part: Generation | Selection) -> NoReturn:
        """What comes before the first request is all that a trace is for."""
        if self.check is not None:
            self.check(part, self.shadow.sent())
        self.stop(sealed=True)

    def end(self, sealed: bool) -> None:
        """Nothing is added any more. A request or a fork seals the text before it; unknown text does not."""
        if not self.ended.is_set():
            self.sealed = sealed
            self.ended.set()

    def stop(self, sealed: bool) -> NoReturn:
        """Also for a program that has caught it before, and goes on."""
        self.end(sealed)
        self.stops += 1
        thread = threading.current_thread()
        if self.stops > MOST_STOPS and isinstance(thread, _Tracer) and thread.line is self:
            thread.give_up()
        raise Stop

    def __getattr__(self, name: str) -> NoReturn:
        """Whatever else a line has tells something of it."""
        self.stop(sealed=False)


class _Names:
    """Variables: they are set, but not read."""

    def __setitem__(self, name: str, cell: Any) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        refuse()
        raise Stop


def _add(line: Any, value: Expr | str) -> None:
    for part in parts_of(value):
        if line.ended.is_set():
            line.stop(sealed=False)
        if isinstance(part, (Generation, Selection)):
            line.ask(part)
        elif isinstance(part, Variable):
            line.stop(sealed=False)
        else:
            ops.add(line, part)


class TracedState(State):
    """For a `def` program. Its line is none of a run."""

    def _add(self, value: Expr | str) -> None:
        _add(self._line, value)


class TracedAsyncState(AsyncState):
    """The same for an `async def` program."""

    def _add(self, value: Expr | str) -> None:
        _add(self._line, value)


class _Tracer(threading.Thread):
    """One run, in a thread that keeps nothing from ending."""

    def __init__(
        self, function: Callable[..., Any], kwargs: Mapping[str, Any] | None, check: Check | None
    ) -> None:
        super().__init__(name="sapwood-trace", daemon=True)
        self.line = _Line(check)
        self._function = function
        self._kwargs = kwargs
        self._context = contextvars.copy_context()

    def run(self) -> None:
        self._context.run(self._traced)

    def _traced(self) -> None:
        _tracing.set(self.line)
        try:
            _run(self._function, self.line, _arguments(self._function, self._kwargs))
            self.line.end(sealed=True)
        except Unsupported as e:
            if self.line.check is not None and not self.line.ended.is_set():
                self.line.refused = e
        # Whatever the program's own code raises, its run will raise it too, where it can be told of.
        except BaseException:
            pass
        finally:
            self.line.end(sealed=False)

    def give_up(self) -> NoReturn:
        """A program that catches every Stop, as a loop with a bare `except` does, would never end."""
        _unstoppable.add(self._function)
        while True:
            threading.Event().wait()


def _trace(function: Callable[..., Any], kwargs: Mapping[str, Any] | None, check: Check | None) -> _Traced:
    if function in _unstoppable:
        return _Traced((), sealed=False)
    tracer = _Tracer(function, kwargs, check)
    tracer.start()
    line = tracer.line
    line.ended.wait()
    tracer.join(UNWIND_SECONDS)
    if line.refused is not None:
        raise line.refused
    return _Traced(line.shadow.sent(), line.sealed)


def _arguments(function: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    _state, *parameters = inspect.signature(function).parameters.values()
    known = {name: _known(name, value) for name, value in (kwargs or {}).items()}
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in known:
            continue
        given = kwargs is not None and default is not parameter.empty
        known[name] = _known(name, default) if given else Unknown(name)
    return known


def _known(name: str, value: Any) -> Any:
    """An argument as a trace gets it: what the real run could miss afterwards, or has other effects when it
    is used, is not known."""
    left, count = [value], 0
    while left:
        one = left.pop()
        count += 1
        if type(one) in _GROUPS:
            left.extend(one.items() if type(one) is dict else one)
        elif type(one) not in _PLAIN:
            return Unknown(name)
        if count > MOST_PARTS:
            return Unknown(name)
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return Unknown(name)


def _run(function: Callable[..., Any], line: _Line, arguments: dict[str, Any]) -> None:
    kind = TracedAsyncState if inspect.iscoroutinefunction(function) else TracedState
    result = function(kind(cast(Any, line)), **arguments)
    if isinstance(result, Coroutine):
        try:
            # It runs until it waits for something, which nothing here does.
            result.send(None)
        except StopIteration:
            return
        line.end(sealed=False)
        result.close()


def _common(one: _Traced, other: _Traced) -> _Traced:
    """What both begin with."""
    segments, sealed = _common_parts(one.segments, other.segments)
    if (
        len(segments) == len(one.segments) == len(other.segments)
        and segments == one.segments == other.segments
    ):
        return _Traced(segments, one.sealed and other.sealed)
    ends = [trace for trace in (one, other) if trace.segments == segments]
    return _Traced(segments, sealed and all(trace.sealed for trace in ends))


def _common_parts(one: Sequence[Any], other: Sequence[Any]) -> tuple[tuple[Any, ...], bool]:
    """The parts, and whether the last of them is whole."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    head = tuple(one[:same])
    if same == min(len(one), len(other)):
        return head, True
    partial = _common_part(one[same], other[same])
    return (head, True) if partial is None else ((*head, partial), False)


def _common_part(one: Segment, other: Segment) -> Segment | None:
    """What two parts that differ begin with, if that is anything."""
    if isinstance(one, Text) and isinstance(other, Text) and not (one.special or other.special):
        length = next((i for i, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), None)
        shorter = min(one.text, other.text, key=len)
        text = shorter if length is None else shorter[:length]
        return Text(text) if text else None
    if isinstance(one, Turn) and isinstance(other, Turn) and one.role == other.role:
        content: Content = _common_parts(one.content, other.content)[0]
        return Turn(one.role, content, open=True) if content else None
    return None


def _stable(traced: _Traced) -> Segments:
    """Its segments, the last text of which is cut if it may go on."""
    if traced.sealed or not traced.segments:
        return traced.segments
    *head, last = traced.segments
    if isinstance(last, Text) and not last.special:
        text = stable_prefix(last.text)
        return (*head, Text(text)) if text else tuple(head)
    if isinstance(last, Turn) and last.open:
        content: Any = _stable(_Traced(last.content, sealed=False))
        return (*head, Turn(last.role, content, open=True)) if content else tuple(head)
    return traced.segments


def stable_prefix(text: str) -> str:
    """The longest beginning of a text that may go on whose tokens stay the same then.

    Tokenizers split text into words before they look for tokens, and white space begins a word. So a border
    is before the first of some spaces, and after a new line that stands alone.
    """
    for end in range(len(text) - 1, 0, -1):
        before, after = text[end - 1], text[end]
        if after == " " and not before.isspace():
            return text[:end]
        if before == "\n" and not after.isspace() and not text[end - 2 : end - 1].isspace():
            return text[:end]
    return ""
