"""Types: a user's file passes mypy --strict, and the mistakes in it are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sapwood

pytest.importorskip("mypy")
ROOT = Path(sapwood.__file__).resolve().parent.parent

GOOD = (Path(__file__).parent / "user_program.py").read_text()

BAD = [
    ("ask(5)", "call-overload"),
    ('ask("q", hop=2)', "call-overload"),
    ("ask()", "call-overload"),
    ("x: str = ask.run('q')", "Incompatible types"),
    ('assert_type(ask.run("q"), int)', "assert-type"),
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
    user.write_text(GOOD)
    answer = subprocess.run(
        [sys.executable, "-W", "error", str(user)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (answer.stderr, answer.returncode) == ("", 0)
    assert answer.stdout
