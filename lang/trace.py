"""What a program begins with before it asks the model anything: found by running it on a state that sends
nothing and knows no output.

The run stops at the first generation, selection or branch, where the program reads from its state, where it
looks at an argument that is not known, and where it raises or waits for anything. Until there its own code is
run, with what that code does.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from sapwood.lang import ops
from sapwood.lang.backend import Content, Segment, Segments, Text, Turn
from sapwood.lang.context import Context
from sapwood.lang.errors import Unsupported
from sapwood.lang.ir import Expr, Generation, Selection, Variable, parts_of
from sapwood.lang.line import Op
from sapwood.lang.state import AsyncState, State

_tracing: contextvars.ContextVar[bool] = contextvars.ContextVar("sapwood_tracing", default=False)


class Stop(BaseException):
    """The trace ends here. No Exception: a program's own handlers shall let it pass."""


def refuse() -> None:
    """Ends the trace, if there is one: for whatever would send something."""
    if _tracing.get():
        raise Stop


Check = Callable[[Generation | Selection, Segments], None]


def prefix_of(
    function: Callable[..., Any], arguments: Sequence[Mapping[str, Any]], check: Check | None = None
) -> Segments:
    """What all runs of `function(s, **arguments[i])` begin with; nothing is sent.

    With `check` the requests that a program makes before it reads anything are shown to it, and the trace
    goes on behind them; an Unsupported that it raises is raised.

    Arguments without a value and a default are not known; without any set of arguments none is. Text that
    only begins alike is cut where the tokens of what is left stay the same: before a space or after a new
    line.
    """
    every: list[Mapping[str, Any] | None] = [*arguments] or [None]
    traces = (_trace(function, kwargs, check) for kwargs in every)
    found: _Traced | None = None
    for trace in traces:
        found = trace if found is None else _common(found, trace)
        if not found.segments:
            break
    return _stable(found) if found is not None else ()


class Unknown(Variable):
    """An argument that is not known. It can be added to text and to a state; anything else reads it."""

    __slots__ = ()

    def _read(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise Stop

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Stop

    __repr__ = __str__ = __format__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _read
    __call__ = __int__ = __float__ = __index__ = __eq__ = __ne__ = __hash__ = __await__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = __sub__ = __mul__ = __mod__ = __rmul__ = __rmod__ = _read


class _Traced(NamedTuple):
    """What a run begins with. `sealed`: its last text has ended; else what comes next may join with it."""

    segments: Segments
    sealed: bool


class _Line:
    """The line of a traced state: it keeps what is added until something is asked for, and tells nothing."""

    def __init__(self, check: Check | None) -> None:
        self.check = check
        self.shadow = Context()
        self.before: Segments | None = None
        self.sealed = False
        self.closed = False
        self.names = _Names()

    def put(self, op: Op) -> None:
        """What an operation is to do later is never done; it has changed the shadow."""

    def fork(self, size: int) -> NoReturn:
        self.stop(sealed=True)

    def ask(self, part: Generation | Selection) -> None:
        """What comes before the first request is all that a trace is for, but for its `check`."""
        if self.check is None:
            self.stop(sealed=True)
        if self.before is None:
            self.before = self.shadow.sent()
        self.check(part, self.shadow.sent())
        self.shadow = self.shadow.put(ops.OUTPUT)

    def traced(self) -> _Traced:
        """What was there before anything was asked for."""
        if self.before is not None:
            return _Traced(self.before, True)
        return _Traced(self.shadow.sent(), self.sealed)

    def stop(self, sealed: bool) -> NoReturn:
        """Nothing is added any more. A request or a fork seals the text before it; unknown text does not."""
        self.sealed, self.closed = sealed, True
        raise Stop

    def __getattr__(self, name: str) -> NoReturn:
        """Whatever else a line has tells something of it."""
        self.stop(sealed=False)


class _Names:
    """Variables: they are set, but not read."""

    def __setitem__(self, name: str, cell: Any) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise Stop


def _add(line: Any, value: Expr | str) -> None:
    for part in parts_of(value):
        if line.closed:
            raise Stop
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


def _trace(function: Callable[..., Any], kwargs: Mapping[str, Any] | None, check: Check | None) -> _Traced:
    line = _Line(check)
    kind = TracedAsyncState if inspect.iscoroutinefunction(function) else TracedState
    token = _tracing.set(True)
    try:
        _run(function, kind(cast(Any, line)), _arguments(function, kwargs))
        line.sealed = True
    except Stop:
        pass
    except Unsupported:
        if check is not None:
            raise
    # Whatever the program's own code raises, its run will raise it too, where it can be told of.
    except Exception:
        pass
    finally:
        _tracing.reset(token)
        line.closed = True
    return line.traced()


def _arguments(function: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    _state, *parameters = inspect.signature(function).parameters.values()
    known = dict(kwargs or {})
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in known:
            continue
        if kwargs is None or parameter.default is parameter.empty:
            known[parameter.name] = Unknown(parameter.name)
    return known


def _run(
    function: Callable[..., Any], state: TracedState | TracedAsyncState, arguments: dict[str, Any]
) -> None:
    result = function(state, **arguments)
    if isinstance(result, Coroutine):
        try:
            # It runs until it waits for something, which nothing here does.
            result.send(None)
        except StopIteration:
            return
        finally:
            state._line.closed = True
            result.close()
        raise Stop


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
