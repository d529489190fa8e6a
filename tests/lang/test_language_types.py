"""Types: a user's file passes mypy --strict, and the mistakes in it are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sapwood

pytest.importorskip("mypy")
ROOT = Path(sapwood.__file__).resolve().parent.parent

GOOD = """
import asyncio
from dataclasses import dataclass

import sapwood as sgl


@dataclass
class Point:
    x: int


@sgl.function
def ask(s: sgl.State, question: str, hops: int = 1) -> int:
    s += sgl.system("Be brief.") + sgl.user(question)
    with s.assistant():
        s += "So: " + sgl.gen("answer", max_tokens=16, temperature=0.0, stop=["\\n"]) + "."
    forks = s.fork(2)
    forks += lambda i: f"{i}" + sgl.gen("tip", json_schema=Point)
    for f in forks:
        f += sgl.select("kind", choices=["a", "b"])
    forks.join()
    return hops


@sgl.function
async def ask_async(s: sgl.AsyncState, question: str) -> str:
    s += question + sgl.gen("answer")
    async with s.user():
        s += "more"
    text: str = await s.text()
    return text


@sgl.function
def outer(s: sgl.State) -> int:
    return ask(s, "inner", hops=2)


async def main() -> None:
    state = await ask_async.run_async("q", temperature=1.0)
    print(state["answer"], await ask_async("q"))
    async for piece in ask_async.stream("q").text_async_iter("answer"):
        print(piece)


sgl.set_default_backend(sgl.Echo())
state: sgl.State = ask.run(question="q", temperature=0.5)
state = ask("q", hops=3)
states: list[sgl.State] = ask.run_batch([{"question": "q"}], num_threads=4, temperature=0.1)
for one in ask.run_batch([{"question": "q"}], generator_style=True):
    print(one.text(), one.ids(), one.messages())
state = ask.options(temperature=0).bind(question="q").run()
for piece in ask.run("q", stream=True).text_iter("answer"):
    print(piece.upper())
asyncio.run(main())
"""

BAD = [
    ("ask(5)", "call-overload"),
    ('ask("q", hop=2)', "call-overload"),
    ("ask()", "call-overload"),
    ("x: str = ask.run('q')", "Incompatible types"),
    ('sgl.gen("a", max_tokens="x")', "incompatible type"),
    ('sgl.gen("a", temprature=0)', "Unexpected keyword"),
    ('ask.run_batch([{"question": "q"}], treads=3)', "call-overload"),
    ("ask.options(temprature=0)", "Unexpected keyword"),
]


def test_a_users_program_is_typed(tmp_path: Path) -> None:
    package = tmp_path / "path" / "sapwood"
    package.mkdir(parents=True)
    for file in (ROOT / "sapwood").iterdir():
        if file.is_file():
            (package / file.name).symlink_to(file)
    for folder in ("srt", "lang", "kernels"):
        (package / folder).symlink_to(ROOT / folder)
    user = tmp_path / "user.py"
    lines = GOOD.splitlines() + [bad for bad, _ in BAD]
    user.write_text("\n".join(lines) + "\n")
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports",
         "--cache-dir", str(tmp_path / "cache"), str(user)],
        env={"MYPYPATH": str(tmp_path / "path"), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    first = len(GOOD.splitlines()) + 1
    found: dict[int, str] = {}
    for line in answer.stdout.splitlines():
        if ": error:" in line:
            number = int(line.split(":")[1])
            found[number] = found.get(number, "") + line
    assert sorted(found) == list(range(first, first + len(BAD))), answer.stdout + answer.stderr
    for number, (bad, message) in enumerate(BAD, first):
        assert message in found[number], (bad, found[number])


def test_the_users_program_runs(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text(
        GOOD.replace("sgl.Echo()", "sgl.Echo(lambda c: '{\"x\": 1}' if hasattr(c, 'sampling') else None)")
    )
    answer = subprocess.run(
        [sys.executable, "-W", "error", str(user)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (answer.stderr, answer.returncode) == ("", 0)
    assert answer.stdout
