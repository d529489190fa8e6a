"""Programs: a function whose first argument is a state, and the ways to run it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack, cast, overload

from sapwood.lang import options as opt
from sapwood.lang.backend import Backend, Fill
from sapwood.lang.defaults import backend_of
from sapwood.lang.errors import LangError
from sapwood.lang.loop import Host, background, in_thread, running
from sapwood.lang.options import RunOptions
from sapwood.lang.run import Run
from sapwood.lang.state import AsyncState, State
from sapwood.lang.trace import prefix_of, refuse
from sapwood.lang.writer import Writer

P = ParamSpec("P")
R = TypeVar("R")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Program:
    """What `def` and `async def` programs have in common: their arguments and options."""

    def __init__(
        self, func: Callable[..., Any], bound: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(cast(Any, self), func)
        self.func = func
        self.bound = dict(bound)
        self.run_options = dict(options)
        first, *rest = inspect.signature(func).parameters.values() or (None,)
        if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"a program's first argument is its state; {func!r} has none")
        self._any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in rest)
        self.arg_names = [p.name for p in rest if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    def _rebound(self, values: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [name for name in values if name not in self.arg_names and not self._any_name]
        if unknown:
            raise TypeError(f"{self.func.__name__} has no argument {', '.join(unknown)}")
        return self.bound | dict(values)

    def split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options and the program's own arguments. A name that is both is the program's."""
        given = dict(self.run_options)
        own: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in opt.NAMES and name not in self.arg_names:
                given[name] = value
            else:
                own[name] = value
        return given, own

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """With what is bound. Raises TypeError, before anything runs, where they do not fit the function."""
        left = self.arg_names[: len(args)]
        full = {name: value for name, value in self.bound.items() if name not in left} | dict(kwargs)
        inspect.signature(self.func).bind(None, *args, **full)
        return args, full

    def within(self, kind: type[Writer], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The program's own code, in the state of another, which comes first."""
        state, *rest = args
        if not isinstance(state, kind):
            raise TypeError(
                f"{self.func.__name__} goes on in a state of {kind.__name__}, not of {type(state).__name__}"
            )
        given, full = self.arguments(tuple(rest), kwargs)
        return self.func(state, *given, **full)

    def cache(self, backend: Any = None, **kwargs: Any) -> None:
        """Have the program's constant prefix computed, as far as these arguments (or no argument) tell it."""
        refuse()
        found = backend_of(backend or self.run_options.get("backend"))
        prefix = prefix_of(self.func, [self.bound | kwargs])
        if prefix:
            background().wait(found.fill(Fill(segments=prefix)))

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = ...,
        concurrency: int | None = ...,
        progress_bar: bool = ...,
        generator_style: Literal[False] = ...,
        **options: Unpack[RunOptions],
    ) -> list[State]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = ...,
        concurrency: int | None = ...,
        progress_bar: bool = ...,
        generator_style: Literal[True],
        **options: Unpack[RunOptions],
    ) -> Iterator[State]: ...
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        concurrency: int | None = None,
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Unpack[RunOptions],
    ) -> Any:
        """A run for each item of `batch_kwargs` (a dict of arguments, or a sequence of them by position),
        their states in the order of the items: a list, or with `generator_style` an iterator.

        At most `concurrency` (also called `num_threads`) runs go on at a time. What the first and the last
        item begin with is computed first; to find it, the program's own code is run for both of them up to
        their first request. If items fail, the others finish, and the error of the first of them is raised;
        an iterator raises it in that item's place. Leaving the iterator early cancels the rest.
        """
        from sapwood.lang.batch import Batch

        limit = concurrency if concurrency is not None else num_threads
        batch = Batch(self, batch_kwargs, limit, progress_bar, self.run_options | dict(options))
        return batch.one_by_one() if generator_style else batch.all()

    def body(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, State]:
        """The whole run, on the run's loop, from which it is called."""
        raise NotImplementedError

    def opened(self, host: Host, options: Mapping[str, Any], stream: bool = False) -> Run:
        """A run that has not begun. Raises LangError or TypeError if it cannot."""
        refuse()
        backend: Backend = backend_of(options.get("backend"))
        return Run(host, backend, opt.defaults_of(options), stream)


class Function(_Program, Generic[P, R]):
    """A `def` program. Called with a state first, it goes on in that state; called without, it is run."""

    def bind(self, **values: Any) -> Function[..., R]:
        """The program with some of its arguments given. Raises TypeError for one that it does not have."""
        return Function(self.func, self._rebound(values), self.run_options)

    def options(self, **options: Unpack[RunOptions]) -> Function[P, R]:
        """The program with options of its own, where a run does not give others."""
        opt.defaults_of(options)
        return Function(self.func, self.bound, self.run_options | dict(options))

    @overload
    def __call__(  # type: ignore[overload-overlap]  # P may begin with a State: it is the program's own
        self, s: State, /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> State: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Writer):
            return self.within(State, args, kwargs)
        return self.run(*args, **kwargs)

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> State: ...
    @overload
    def run(self, *args: Any, **kwargs: Any) -> State: ...
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program in this thread. `kwargs` are its own arguments and RunOptions; with `stream=True`
        it runs in another thread, and the state is there at once, for `text_iter`.

        Raises what the program raises, and an error of a request that the program has not met itself, with a
        note of the line that had added the request.
        """
        if "stream" in kwargs and "stream" not in self.arg_names and kwargs.pop("stream"):
            return self.stream(*args, **kwargs)
        given, own = self.split(kwargs)
        args, own = self.arguments(args, own)
        host = background()
        host.may_wait()
        run = self.opened(host, given)
        state = State(run.main)
        with run:
            state.ret_value = self.func(state, *args, **own)
        return state

    def stream(self, *args: Any, **kwargs: Any) -> State:
        """Run the program in another thread, its outputs streamed. Takes what `run` takes."""
        given, own = self.split(kwargs)
        args, own = self.arguments(args, own)
        run = self.opened(background(), given, stream=True)
        state = State(run.main, outside=True)

        def work() -> None:
            with run:
                state.ret_value = self.func(State(run.main), *args, **own)

        # Its error ends the state's text, which is where it is raised.
        in_thread(work)
        return state

    async def run_async(self, *args: Any, **kwargs: Any) -> State:
        """Run the program in another thread, its requests on the running loop. Takes what `run` takes."""
        given, own = self.split(kwargs)
        args, own = self.arguments(args, own)
        return await self.body(self.opened(running(), given), args, own)

    async def body(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> State:
        state = State(run.main)
        work = functools.partial(self.func, state, *args, **kwargs)
        async with run:
            state.ret_value = await run.perform(lambda: asyncio.wrap_future(in_thread(work)))
        return state


class AsyncFunction(_Program, Generic[P, R]):
    """An `async def` program; as Function, on the event loop that runs it."""

    def bind(self, **values: Any) -> AsyncFunction[..., R]:
        """The program with some of its arguments given. Raises TypeError for one that it does not have."""
        return AsyncFunction(self.func, self._rebound(values), self.run_options)

    def options(self, **options: Unpack[RunOptions]) -> AsyncFunction[P, R]:
        """The program with options of its own, where a run does not give others."""
        opt.defaults_of(options)
        return AsyncFunction(self.func, self.bound, self.run_options | dict(options))

    @overload
    def __call__(  # type: ignore[overload-overlap]  # as in Function
        self, s: AsyncState, /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]: ...
    @overload
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[State]: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Writer):
            return self.within(AsyncState, args, kwargs)
        return self.run_async(*args, **kwargs)

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> State: ...
    @overload
    def run(self, *args: Any, **kwargs: Any) -> State: ...
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on the background loop and wait for it; with `stream=True` do not wait."""
        stream = "stream" in kwargs and "stream" not in self.arg_names and kwargs.pop("stream")
        given, own = self.split(kwargs)
        args, own = self.arguments(args, own)
        host = background()
        run = self.opened(host, given, stream=bool(stream))
        if not stream:
            return host.wait(self.body(run, args, own))
        state = State(run.main, outside=True)
        host.call(lambda: self._begin(run, state, args, own))
        return state

    def stream(self, *args: Any, **kwargs: Any) -> AsyncState:
        """Run the program on the running loop, its outputs streamed. Takes what `run` takes. Raises LangError
        if no loop runs: `run(stream=True)` needs none."""
        given, own = self.split(kwargs)
        args, own = self.arguments(args, own)
        try:
            host = running()
        except RuntimeError:
            raise LangError("stream needs a running event loop; run(stream=True) does not") from None
        run = self.opened(host, given, stream=True)
        state = AsyncState(run.main, outside=True)
        self._begin(run, state, args, own)
        return state

    def _begin(
        self, run: Run, state: State | AsyncState, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        work = functools.partial(self.func, AsyncState(run.main), *args, **kwargs)

        async def follow() -> None:
            async with run:
                state.ret_value = await run.perform(work)

        run.follow(run.host.loop.create_task(follow()))

    async def run_async(self, *args: Any, **kwargs: Any) -> State:
        """Run the program on the running loop. Takes what `run` takes; cancelled, it cancels its requests."""
        given, own = self.split(kwargs)
        args, own = self.arguments(args, own)
        return await self.body(self.opened(running(), given), args, own)

    async def body(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> State:
        state = State(run.main)
        work = functools.partial(self.func, AsyncState(run.main), *args, **kwargs)
        async with run:
            state.ret_value = await run.perform(work)
        return state


@overload
def function(
    func: Callable[Concatenate[AsyncState, P], Coroutine[Any, Any, R]], /
) -> AsyncFunction[P, R]: ...
@overload
def function(func: Callable[Concatenate[State, P], R], /) -> Function[P, R]: ...
@overload
def function(
    *, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[Concatenate[State, P], R]], Function[P, R]]: ...
def function(func: Any = None, /, *, num_api_spec_tokens: int | None = None) -> Any:
    """Makes a program of a `def` or an `async def` whose first argument is the state.

    `num_api_spec_tokens` is taken for SGLang's programs and changes nothing.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s, name):
    ...     s += "Hello " + name + sgl.gen("more")
    >>> state = program.run("Ada", backend=sgl.Echo([", how are you?"]))
    >>> state.text()
    'Hello Ada, how are you?'
    >>> [s["more"] for s in program.run_batch([("Ada",), ("Ben",)], backend=sgl.Echo(["!", "!"]))]
    ['!', '!']
    """
    if func is None:
        return function
    if inspect.iscoroutinefunction(func):
        return AsyncFunction(func, {}, {})
    return Function(func, {}, {})
