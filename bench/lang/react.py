"""An agent that reasons and acts (ReAct, arXiv 2210.03629), with a local calculator."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lang.data import gsm8k
from sapwood import State, function, gen, select

COUNT = 8
STEPS = 3

INSTRUCTIONS = """Answer questions by thinking, acting and observing in turn.
Calculate[expression] works out a sum. Finish[number] ends with the answer.

Question: Tom has 3 boxes with 12 pens each and gives 5 pens away. How many are left?
Thought 1: I need the number of pens in all boxes, less 5.
Action 1: Calculate[3 * 12 - 5]
Observation 1: 31
Thought 2: I know the answer.
Action 2: Finish[31]

"""


@function
def program(s: State, question: str) -> None:
    s += INSTRUCTIONS
    s += "Question: " + question
    for step in range(1, STEPS + 1):
        s += f"\nThought {step}:"
        s += gen(f"thought {step}", max_tokens=48, temperature=0, stop="\n")
        s += f"\nAction {step}: "
        s += select(f"action {step}", choices=["Calculate", "Finish"])
        s += "["
        s += gen(f"argument {step}", max_tokens=24, temperature=0, regex=r"[0-9 .+*/()\-]{1,24}")
        s += "]"
        if s[f"action {step}"] == "Finish":
            break
        s += f"\nObservation {step}: " + calculate(s[f"argument {step}"])
    s["answer"] = s[f"argument {step}"].strip()


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """The value of a sum, or what is wrong with it."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                result: float = _OPERATORS[type(op)](value(left), value(right))
                return result
        raise ValueError("only numbers, + - * / and brackets are known")

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (ValueError, SyntaxError, ArithmeticError) as e:
        return f"error: {e.args[0] if e.args else type(e).__name__}"


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"question": row["question"]} for row in gsm8k(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    rows = gsm8k(data)
    found = sum(s["answer"] == row["final"] for s, row in zip(states, rows, strict=False))
    return f"{found} of {len(states)} answers right"
