"""Branches of a state, and how they come together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, cast, overload

from sapwood.lang import ops
from sapwood.lang.feed import Cell, Gathered, Names
from sapwood.lang.ir import Expr
from sapwood.lang.state import AsyncState, State, Value, value_of
from sapwood.lang.writer import Writer

W = TypeVar("W", bound=Writer)


class Branches(Generic[W]):
    """The branches of a fork, in order. As a `with` block they are joined at its end."""

    def __init__(self, states: list[W], source: W) -> None:
        self.states = states
        self._source = source
        self._before = dict(source._line.names.cells)
        self._joined = False

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[W]:
        return iter(self.states)

    @overload
    def __getitem__(self, which: int) -> W: ...
    @overload
    def __getitem__(self, which: str) -> Any: ...
    def __getitem__(self, which: int | str) -> Any:
        """A branch by its number; or the values that a variable has in all of them, a list in their order
        (to be awaited in an `async def` program)."""
        if isinstance(which, int):
            return self.states[which]
        cells = Gathered([state._line.names.cells[which] for state in self.states])
        line = self._source._line
        if isinstance(self._source, AsyncState):
            return Value(lambda: value_of(line, cells))
        return cast(State, self._source)._wait(value_of(line, cells))

    def __setitem__(self, which: int, value: W) -> None:
        if value is not self.states[which]:
            raise TypeError("a branch cannot be replaced; add to it with +=")

    def __iadd__(self, other: Expr | str | Callable[[int], Expr | str] | Sequence[Expr | str]) -> Branches[W]:
        """Add the same to each; or what a function makes of its number; or one item of a sequence to each."""
        if isinstance(other, (list, tuple)) and len(other) != len(self.states):
            raise ValueError(f"{len(self.states)} branches need as many items, got {len(other)}")
        for number, state in enumerate(self.states):
            if callable(other):
                state._add(other(number))
            elif isinstance(other, (Expr, str)):
                state._add(other)
            else:
                state._add(other[number])
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """The end of the branches; nothing can be added to them any more. Waits for nothing.

        `"gather_variable"`: each variable that branches have set becomes a list of their values in the source
        state, in the order of the branches (without those that have not set it).
        `"concate_and_append"`: what the branches have added is added to the source state, one after the
        other, with the tokens it has.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f'mode must be "gather_variable" or "concate_and_append", got {mode!r}')
        lines = [state._line for state in self.states]
        source = self._source._line
        if self._joined:
            return
        self._joined = True
        if mode == "concate_and_append":
            ops.append(source, lines)
        else:
            for name, cells in _set([line.names for line in lines], self._before).items():
                source.names[name] = Gathered(cells)
        for line in lines:
            line.closed = True

    def __enter__(self) -> Branches[W]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.join()

    async def __aenter__(self) -> Branches[W]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.join()


def _set(branches: list[Names], before: dict[str, Cell]) -> dict[str, list[Cell]]:
    """The variables that branches have set, anew or not."""
    found: dict[str, list[Cell]] = {}
    for names in branches:
        for name, cell in names.cells.items():
            if cell is not before.get(name):
                found.setdefault(name, []).append(cell)
    return found


class Copy(Generic[W]):
    """A branch for a `with` block."""

    def __init__(self, branches: Branches[W]) -> None:
        self._branches = branches

    def __enter__(self) -> W:
        return self._branches[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._branches.join()

    async def __aenter__(self) -> W:
        return self._branches[0]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._branches.join()
