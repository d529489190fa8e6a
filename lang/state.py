"""The state of a program: what it writes to (`Writer`) and reads from, in a thread or on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from sapwood.lang.context import messages_of
from sapwood.lang.errors import LangError, Unsupported
from sapwood.lang.feed import (
    Cell,
    Feed,
    Waiting,
    awaiting,
    blocking,
    reading,
    reading_async,
)
from sapwood.lang.line import Line
from sapwood.lang.writer import Writer

T = TypeVar("T")


def value_of(line: Line, cell: Cell) -> Waiting[Any]:
    yield from cell.over()
    for error in cell.errors():
        line.run.told(error)
    if cell.error is not None:
        raise cell.error
    return cell.value


def _find(line: Line, name: str, outside: bool) -> Waiting[Cell]:
    if outside:
        return (yield from line.names.expect(name))
    return line.names.cells[name]


def _variable(line: Line, name: str, outside: bool) -> Waiting[Any]:
    cell = yield from _find(line, name, outside)
    return (yield from value_of(line, cell))


def _meta(line: Line, name: str, outside: bool) -> Waiting[Any]:
    cell = yield from _find(line, name, outside)
    yield from value_of(line, cell)
    return cell.meta


def _seen(line: Line, what: Callable[[Line], T], outside: bool) -> Waiting[T]:
    """What a line has when all that the program has added is done; from outside, when the program is over."""
    if outside:
        yield from line.shown.over()
        if line.shown.error is not None:
            line.run.told(line.shown.error)
            raise line.shown.error
        return what(line)
    value: T = yield from value_of(line, line.look(what))
    return value


def _error(line: Line, outside: bool) -> Waiting[BaseException | None]:
    feed: Feed = line.shown if outside else line.look(lambda line: None)
    yield from feed.over()
    if feed.error is not None:
        line.run.told(feed.error)
    return feed.error


def _text(line: Line) -> str:
    return line.shown.text()


def _messages(line: Line) -> list[dict[str, str]]:
    return messages_of(line.context.segments)


def _ids(line: Line) -> list[int]:
    if line.ids is None:
        raise Unsupported("the backend does not tell token ids", "ids")
    return list(line.ids)


def _end(line: Line, feed: Feed) -> None:
    """At the end of a feed that is read: its error."""
    if feed.error is not None:
        line.run.told(feed.error)
        raise feed.error


class State(Writer):
    """A `def` program's state. What reads it waits, in the program's thread.

    An operation's error is raised by what reads its variable; and by `text`, `messages`, `ids` and `sync`.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s: sgl.State):
    ...     s += "Tips: "
    ...     forks = s.fork(2)
    ...     forks += lambda i: f"{i + 1}. " + sgl.gen("tip")
    ...     forks.join()
    ...     return " and ".join(s["tip"])
    >>> program.run(backend=sgl.Echo(lambda call: call.segments[-1].text + "Sleep")).ret_value
    '1. Sleep and 2. Sleep'
    """

    def _wait(self, waiting: Waiting[T]) -> T:
        return blocking(waiting, self._line.run.host.may_wait)

    def __getitem__(self, name: str) -> Any:
        """A variable's value; waits for it. Raises KeyError if the program has none of this name."""
        return self._wait(_variable(self._line, name, self._outside))

    get_var = __getitem__

    def get_meta_info(self, name: str) -> Any:
        """What the backend tells of a variable's output; a list, if there are several outputs. None for a
        variable that is no output."""
        return self._wait(_meta(self._line, name, self._outside))

    def text(self) -> str:
        """All text so far. A message is shown as `ROLE:`, its text and a new line, whatever the model's chat
        template makes of it. Token ids without text are not shown."""
        return self._wait(_seen(self._line, _text, self._outside))

    def messages(self) -> list[dict[str, str]]:
        """The complete messages so far, as `{"role": ..., "content": ...}`."""
        return self._wait(_seen(self._line, _messages, self._outside))

    def ids(self) -> list[int]:
        """The token ids of the last answer: of all that was sent, and of the output. Empty before the first.
        Raises Unsupported if the backend does not tell them."""
        return _ids(self._wait(_seen(self._line, lambda line: line, self._outside)))

    def sync(self) -> None:
        """Wait until all that was added is done."""
        self._wait(_seen(self._line, lambda line: None, self._outside))

    def error(self) -> BaseException | None:
        """The error that stopped the state, if one did; waits like `sync`. The run does not raise it then."""
        return self._wait(_error(self._line, self._outside))

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable's, as it comes; joined it is the whole.

        Raises the error that ends it. Leaving it early cancels a streamed run.
        """
        line = self._line
        if var_name is None and not self._outside:
            yield self.text()
            return
        feed = line.shown if var_name is None else self._wait(_find(line, var_name, self._outside))
        try:
            yield from reading(feed.read(), line.run.host.may_wait)
        finally:
            if self._outside and not feed.ended:
                line.run.cancel()
        _end(line, feed)

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """As `text_iter`, on any event loop; with `return_meta_data` pairs of a variable's text and its meta
        information, which is None until the output is complete: the last pair, of no text, has it."""
        async for piece in _text_async(self._line, self._outside, var_name, return_meta_data):
            yield piece

    def cancel(self) -> None:
        """Stop a run: its requests are cancelled, what waits for them gets an error."""
        self._line.run.cancel()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._line.shown.text()!r})"


async def _text_async(line: Line, outside: bool, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
    if name is None and not outside:
        yield await awaiting(_seen(line, _text, outside))
        return
    feed = line.shown if name is None else await awaiting(_find(line, name, outside))
    try:
        async for piece in reading_async(feed.read()):
            yield (piece, None) if with_meta else piece
    finally:
        if outside and not feed.ended:
            line.run.cancel()
    _end(line, feed)
    if with_meta and isinstance(feed, Cell):
        yield "", feed.meta


class Value(Generic[T]):
    """What an AsyncState is asked for: `await` it, now, later, or never."""

    def __init__(self, ask: Callable[[], Waiting[T]]) -> None:
        self._ask = ask

    def __await__(self) -> Generator[Any, None, T]:
        return awaiting(self._ask()).__await__()

    def _early(self, *_: object) -> NoReturn:
        raise LangError("this is a value that comes later: await it before it is used, as in await s['x']")

    # Else a forgotten await would put the text of this object into a prompt, or be true.
    __str__ = __format__ = __bool__ = __len__ = __iter__ = __eq__ = __add__ = __radd__ = _early
    __hash__ = object.__hash__


class AsyncState(Writer):
    """An `async def` program's state: as State, but what reads it is awaited.

    >>> import asyncio
    >>> import sapwood as sgl
    >>> @sgl.function
    ... async def program(s: sgl.AsyncState, question: str):
    ...     s += sgl.user(question) + sgl.assistant(sgl.gen("answer"))
    ...     return (await s["answer"]).upper()
    >>> async def many():
    ...     runs = (program.run_async(q, backend=sgl.Echo()) for q in ("a", "b"))
    ...     return [state.ret_value for state in await asyncio.gather(*runs)]
    >>> asyncio.run(many())
    ['A', 'B']
    """

    def __getitem__(self, name: str) -> Awaitable[Any]:
        """A variable's value. Raises KeyError if the program has none of this name."""
        if not self._outside and name not in self._line.names.cells:
            raise KeyError(name)
        return Value(lambda: _variable(self._line, name, self._outside))

    get_var = __getitem__

    def get_meta_info(self, name: str) -> Awaitable[Any]:
        """What the backend tells of a variable's output; a list, if there are several outputs."""
        return Value(lambda: _meta(self._line, name, self._outside))

    def text(self) -> Awaitable[str]:
        """All text so far; see State.text."""
        return Value(lambda: _seen(self._line, _text, self._outside))

    def messages(self) -> Awaitable[list[dict[str, str]]]:
        """The complete messages so far, as `{"role": ..., "content": ...}`."""
        return Value(lambda: _seen(self._line, _messages, self._outside))

    async def ids(self) -> list[int]:
        """The token ids of the last answer; see State.ids."""
        return _ids(await awaiting(_seen(self._line, lambda line: line, self._outside)))

    def sync(self) -> Awaitable[None]:
        """Until all that was added is done."""
        return Value(lambda: _seen(self._line, lambda line: None, self._outside))

    def error(self) -> Awaitable[BaseException | None]:
        """The error that stopped the state, if one did. The run does not raise it any more."""
        return Value(lambda: _error(self._line, self._outside))

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """The text, or a variable's, as it comes; see State.text_async_iter."""
        async for piece in _text_async(self._line, self._outside, var_name, return_meta_data):
            yield piece

    def cancel(self) -> None:
        """Stop a run: its requests are cancelled, what waits for them gets an error."""
        self._line.run.cancel()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._line.shown.text()!r})"
