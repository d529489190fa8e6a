"""What a program writes to: text, expressions, messages, variables, branches. None of it is waited for."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from sapwood.lang import ops
from sapwood.lang.errors import LangError, Unsupported
from sapwood.lang.feed import known
from sapwood.lang.ir import Concat, Expr, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, parts_of
from sapwood.lang.line import Line

if TYPE_CHECKING:
    from typing import Self

    from sapwood.lang.fork import Branches, Copy

W = TypeVar("W", bound="Writer")


class Writer:
    """The part of a state that is the same in `def` and `async def` programs."""

    def __init__(self, line: Line, outside: bool = False) -> None:
        self._line = line
        # Of a streamed run, for who reads it while the program runs elsewhere.
        self._outside = outside
        self.ret_value: Any = None

    def _add(self, value: Expr | str) -> None:
        line = self._line
        if line.closed:
            raise line.error or LangError("the program has ended: nothing can be added to its state")
        ops.add(line, value)

    def __iadd__(self, other: Expr | str) -> Self:
        """Add text or an expression. Raises TypeError for anything else, LangError for a message that cannot
        begin or end here, Unsupported for what the backend cannot do."""
        self._add(other)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        """Keep a value as a variable. The state's text stays as it is."""
        self._line.names[name] = known(value)

    set_var = __setitem__

    def __contains__(self, name: str) -> bool:
        """Whether the program has come to the variable; its value may still be on its way."""
        return name in self._line.names.cells

    def system(self, expr: Expr | str | None = None) -> Scope:
        """A system message: of `expr`, or of what a `with` block adds."""
        return self._role("system", expr)

    def user(self, expr: Expr | str | None = None) -> Scope:
        """A user's message: of `expr`, or of what a `with` block adds."""
        return self._role("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> Scope:
        """An assistant's message: of `expr`, or of what a `with` block adds."""
        return self._role("assistant", expr)

    def _role(self, role: str, expr: Expr | str | None) -> Scope:
        if expr is not None:
            self._add(Concat((RoleBegin(role), *parts_of(expr), RoleEnd(role))))
        return Scope(self, RoleBegin(role), RoleEnd(role), done=expr is not None)

    def var_scope(self, name: str) -> Scope:
        """What a `with` block adds is kept as the text of variable `name`, which is there after the block.

        >>> import sapwood as sgl
        >>> @sgl.function
        ... def program(s: sgl.State) -> None:
        ...     with s.var_scope("sum"):
        ...         s += "1 + 1 = " + sgl.gen("result")
        >>> program.run(backend=sgl.Echo(["2"]))["sum"]
        '1 + 1 = 2'
        """
        return Scope(self, ScopeBegin(name), ScopeEnd(name))

    def fork(self: W, size: int = 1, position_ids_offset: list[int] | None = None) -> Branches[W]:
        """`size` branches that go on from here side by side. Waits for nothing. What no model has seen yet is
        computed once, in one request, which starts at once if there are several branches.

        >>> import sapwood as sgl
        >>> @sgl.function
        ... def tips(s: sgl.State) -> list[str]:
        ...     s += "Tips:"
        ...     branches = s.fork(2)
        ...     branches += lambda i: f" {i + 1}." + sgl.gen("tip")
        ...     branches.join()
        ...     return s["tip"]
        >>> tips.run(backend=sgl.Echo()).ret_value
        [' 1.', ' 2.']
        """
        from sapwood.lang.fork import Branches

        if position_ids_offset is not None:
            raise Unsupported("position_ids_offset is not supported", "position_ids_offset")
        if self._line.closed:
            raise LangError("the program has ended: its state cannot be forked")
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        branches = self._line.fork(size)
        return Branches([type(self)(line) for line in branches], self)

    def copy(self: W, position_ids_offset: list[int] | None = None) -> Copy[W]:
        """One branch, in a `with` block; at its end new variables are gathered, each as a list of one."""
        from sapwood.lang.fork import Copy

        return Copy(self.fork(1, position_ids_offset))

    def report(self) -> dict[str, Any] | None:
        """What the run's requests used, as the backend counted it; None before the run's end, or if it does
        not count."""
        return self._line.run.report


class Scope:
    """A part of a program with a beginning and an end, as a `with` or an `async with` block."""

    def __init__(self, writer: Writer, begin: Expr, end: Expr, done: bool = False) -> None:
        self._writer = writer
        self._begin, self._end = begin, end
        self._done = done

    def __enter__(self) -> None:
        if self._done:
            raise LangError("a message that was given its text has no block")
        self._writer._add(self._begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error too: a program that goes on has a message that is complete.
        try:
            self._writer._add(self._end)
        except LangError:
            if error is None:
                raise

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
