"""What each expression does to a state: to its shape on the program's side, then to the state itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import msgspec

from sapwood.lang.backend import Answer, Generate, Ids, Output, Piece, Score, Segments, Text
from sapwood.lang.context import Context
from sapwood.lang.errors import LangError
from sapwood.lang.feed import Cell, awaiting
from sapwood.lang.ir import (
    Constant,
    Expr,
    Generation,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Selection,
    Tokens,
    parts_of,
)
from sapwood.lang.line import Line, Op
from sapwood.lang.options import Defaults, merged
from sapwood.lang.where import Where, here

OUTPUT = Text("?")
"""Stands for an output where its text is not known yet."""


def add(line: Line, value: Expr | str) -> None:
    """Add an expression to a state. Raises TypeError for what is none, LangError for a message that does not
    begin or end here, and what the backend raises for a request that it cannot do."""
    where = here()
    for part in parts_of(value):
        plan = _PLANS.get(type(part))
        if plan is None:
            raise TypeError(f"{type(part).__name__} cannot be added to a state")
        plan(line, part, where)


def reasoning_name(name: str) -> str:
    """The variable that holds the reasoning before the output `name`."""
    return f"{name}_reasoning_content"


def _change(line: Line, where: Where, change: Callable[[Context], Context], shown: str) -> None:
    """A change that needs no request."""
    line.shadow = change(line.shadow)

    def do(line: Line) -> None:
        line.context = change(line.context)
        line.shown.add(shown)

    line.put(Op(do, where))


def _constant(line: Line, part: Constant, where: Where) -> None:
    if part.special:
        _change(line, where, lambda context: context.put(Text(part.text, special=True)), part.text)
    elif part.text:
        _change(line, where, lambda context: context.add(part.text), part.text)


def _tokens(line: Line, part: Tokens, where: Where) -> None:
    if part.ids:
        _change(line, where, lambda context: context.put(Ids(part.ids, "")), "")


def _role_begin(line: Line, part: RoleBegin, where: Where) -> None:
    _change(line, where, lambda context: context.begin(part.role), f"{part.role.upper()}:")


def _role_end(line: Line, part: RoleEnd, where: Where) -> None:
    _change(line, where, lambda context: context.end(part.role), "\n")


def _scope_begin(line: Line, part: ScopeBegin, where: Where) -> None:
    def do(line: Line) -> None:
        line.scopes.setdefault(part.name, []).append(len(line.shown.text()))

    line.put(Op(do, where))


def _scope_end(line: Line, part: ScopeEnd, where: Where) -> None:
    cell = line.names[part.name] = Cell()

    def do(line: Line) -> None:
        text = line.shown.text()[line.scopes[part.name].pop() :]
        cell.add(text)
        cell.set(text)

    line.put(Op(do, where, (cell,)))


def generate(part: Generation, segments: Segments, defaults: Defaults, program: str = "") -> Generate:
    """The request that a generation is."""
    return Generate(
        segments=segments,
        sampling=merged(part.sampling, defaults.sampling),
        logprobs=part.logprobs or defaults.logprobs,
        reasoning=part.reasoning,
        program=program,
    )


def score(part: Selection, segments: Segments, program: str = "") -> Score:
    """The request that a selection is."""
    return Score(
        segments=segments,
        choices=part.choices,
        unconditional=part.method.needs_unconditional,
        program=program,
    )


def _generation(line: Line, part: Generation, where: Where) -> None:
    run = line.run
    call = generate(part, line.shadow.sent(), run.defaults, run.program)
    run.backend.check(call)
    line.shadow = replace(line.shadow.put(OUTPUT), new=False)
    cell, reasoning = Cell(), Cell()
    if part.name is not None:
        line.names[part.name] = cell
        if part.reasoning:
            line.names[reasoning_name(part.name)] = reasoning

    async def do(line: Line) -> None:
        await line.resolve()
        run.asked = True
        now = msgspec.structs.replace(call, segments=line.context.sent())
        if run.streaming:
            answer = await _streamed(line, now, cell)
        else:
            answer = await run.backend.generate(now)
        first = answer.outputs[0]
        if not run.streaming:
            line.shown.add(first.text)
            cell.add(first.text)
        _go_on(line, answer, first.content)
        several = (now.sampling.n or 1) > 1
        reasoning.set(_told(answer.outputs, lambda o: o.meta.get("reasoning_content") or "", several))
        convert = part.convert or str
        value = _told(answer.outputs, lambda o: convert(o.text), several)
        cell.set(value, _told(answer.outputs, lambda o: o.meta, several))

    line.put(Op(do, where, (cell, reasoning)))


def _told(outputs: list[Output], what: Callable[[Output], Any], several: bool) -> Any:
    """Of each output if several were asked for, else of the one."""
    return [what(output) for output in outputs] if several else what(outputs[0])


async def _streamed(line: Line, call: Generate, cell: Cell) -> Answer:
    """The answer of a streamed call, the first output of which is shown as it comes."""
    outputs: dict[int, Output] = {}
    last: Piece | None = None
    stream = line.run.backend.stream(call)
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(stream, AsyncGenerator):
            await stack.enter_async_context(contextlib.aclosing(stream))
        async for piece in stream:
            if piece.choice == 0:
                line.shown.add(piece.text)
                cell.add(piece.text)
            if piece.output is not None:
                last = piece
                outputs[piece.choice] = piece.output
    if last is None:
        raise LangError("the backend's stream ended without an output")
    return Answer(
        outputs=[outputs[i] for i in sorted(outputs)], input_ids=last.input_ids, rewritten=last.rewritten
    )


def _go_on(line: Line, answer: Answer, content: tuple[Text | Ids, ...]) -> None:
    """The state goes on with `content`, which a model has seen."""
    line.context = replace(line.context.seen(answer.input_ids).put(*content), new=False)
    if answer.input_ids is None:
        line.ids = None
    else:
        drawn = tuple(i for part in content if isinstance(part, Ids) for i in part.ids)
        line.ids = answer.input_ids + drawn


def _selection(line: Line, part: Selection, where: Where) -> None:
    run = line.run
    call = score(part, line.shadow.sent(), run.program)
    run.backend.check(call)
    line.shadow = replace(line.shadow.put(OUTPUT), new=False)
    cell = Cell()
    if part.name is not None:
        line.names[part.name] = cell

    async def do(line: Line) -> None:
        await line.resolve()
        run.asked = True
        answer = await run.backend.score(msgspec.structs.replace(call, segments=line.context.sent()))
        decision = part.method(part.choices, answer.scored)
        text, ids = decision.decision, answer.scored[decision.index].ids
        line.shown.add(text)
        cell.add(text)
        _go_on(line, answer, (Ids(ids, text),) if ids else (Text(text),) if text else ())
        rewritten = {"rewritten": [*answer.rewritten]} if answer.rewritten else {}
        cell.set(text, answer.meta | decision.meta | rewritten)

    line.put(Op(do, where, (cell,)))


def append(line: Line, branches: list[Line]) -> None:
    """Add what branches have added to a copy of this state since its fork, one after the other."""
    line.shadow = line.shadow.joined([branch.shadow for branch in branches])
    # In the branches' own order of things, not of what is put there while this waits.
    seen = [branch.look(lambda one: (one.context, one.shown.text()[one.forked_at :])) for branch in branches]

    async def do(line: Line) -> None:
        for cell in seen:
            await awaiting(cell.over())
            if cell.error is not None:
                raise cell.error
        line.context = line.context.joined([cell.value[0] for cell in seen])
        line.shown.add("".join(cell.value[1] for cell in seen))

    line.put(Op(do, here()))


_PLANS: dict[type, Callable[[Line, Any, Where], None]] = {
    Constant: _constant,
    Tokens: _tokens,
    RoleBegin: _role_begin,
    RoleEnd: _role_end,
    ScopeBegin: _scope_begin,
    ScopeEnd: _scope_end,
    Generation: _generation,
    Selection: _selection,
}
