"""What is installed: every subpackage, in a wheel and in place, and little needed for the language alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import sapwood

ROOT = Path(sapwood.__file__).resolve().parent.parent
ROLES = Path(__file__).parent.parent / "process" / "roles"
PARTS = ("sapwood", "srt", "lang", "kernels")
LANGUAGE_NEEDS = (
    "msgspec", "httpx", "httpcore", "anyio", "h11", "idna", "certifi", "sniffio", "typing_extensions.py",
)  # fmt: skip
OFFLINE_PIP = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    answer = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree, so that a build leaves nothing in the real one."""
    copy = tmp_path / "tree"
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without pip that sees this one's packages, but not an installed sapwood."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    packages = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # A .pth file adds a folder, but not what that folder's own .pth files add.
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def expected_files() -> set[str]:
    """Every Python file of the tree, as it must lie below site-packages."""
    found = set()
    for part in PARTS:
        prefix = "" if part == "sapwood" else "sapwood/"
        found |= {prefix + str(path.relative_to(ROOT)) for path in (ROOT / part).rglob("*.py")}
    return found


def test_a_wheel_holds_every_file(tree: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", *OFFLINE_PIP)
    run(*pip, "-w", tmp_path / "w", tree, cwd=tmp_path, SAPWOOD_NO_EXTENSION="1")
    (wheel,) = (tmp_path / "w").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        scripts = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {n for n in names if n.endswith(".py")} == expected_files()
    assert "sapwood/py.typed" in names
    assert {n for n in names if n.startswith("sapwood/kernels/csrc/")} == {
        f"sapwood/{path.relative_to(ROOT)}" for path in (ROOT / "kernels" / "csrc").glob("[!.]*")
    }
    assert any(n.endswith("LICENSE") for n in names)
    assert f"Version: {sapwood.__version__}\n" in metadata
    needed = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in needed) == ["httpx", "msgspec"]
    assert "sapwood = sapwood.srt.cli:main" in scripts


def install(how: str, tree: Path, environment: Path, cwd: Path) -> None:
    pip = (environment / "bin" / "python", "-m", "pip", "install", *OFFLINE_PIP)
    where = ("-e", tree) if how == "editable" else (tree,)
    run(*pip, *where, cwd=cwd, SAPWOOD_NO_EXTENSION="1")


SERVE_ONCE = """
import json, pathlib, signal, sys, threading, time
from sapwood.srt import child, config
from sapwood.srt.launch import Launcher
from launch_driver import SOURCE
print(sapwood_root := pathlib.Path(child.__file__).resolve().parent.parent)
print(child.environment().get("PYTHONPATH"))
roles = dict.fromkeys(("tokenizer", "scheduler", "worker"), "role_idle")
with Launcher(config.make(), SOURCE, roles) as launcher:
    print(sorted(launcher.start().facts))
"""


@pytest.mark.parametrize("how", ["editable", "wheel", "root"])
def test_processes_find_sapwood_as_their_launcher_did(
    how: str, tree: Path, environment: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how != "root":
        install(how, tree, environment, elsewhere)
    path = os.pathsep.join([str(ROLES), *([str(tree)] if how == "root" else [])])
    (elsewhere / "p.py").write_text(SERVE_ONCE)
    told = run(environment / "bin" / "python", "p.py", cwd=elsewhere, PYTHONPATH=path).splitlines()
    assert told[0] == str(
        {"editable": tree, "root": tree}.get(how, next(environment.glob("lib/*/site-packages")) / "sapwood")
    )
    assert told[1] == (os.pathsep.join([path, str(tree)]) if how == "root" else path)
    assert told[2] == "['device', 'scheduler 0', 'tokenizer 0', 'worker 0']"


def test_files_added_later_are_found(tree: Path, environment: Path, tmp_path: Path) -> None:
    install("editable", tree, environment, tmp_path)
    (tree / "srt" / "later.py").write_text("word = 'later'")
    (tree / "lang" / "more").mkdir()
    (tree / "lang" / "more" / "__init__.py").write_text("")
    (tree / "lang" / "more" / "still.py").write_text("word = 'still'")
    program = (
        "import sapwood.srt.later, sapwood.lang.more.still, sapwood.srt.cache.radix;"
        "print(sapwood.srt.later.word, sapwood.lang.more.still.word)"
    )
    assert run(environment / "bin" / "python", "-c", program, cwd=tmp_path) == "later still\n"
    assert run(environment / "bin" / "sapwood", "version", cwd=tmp_path).startswith("sapwood ")


@pytest.fixture
def bare(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a program that can import the standard library, sapwood, httpx and msgspec, and nothing else."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in LANGUAGE_NEEDS:
        source = Path(sysconfig.get_path("purelib")) / name
        if source.exists():
            (packages / name).symlink_to(source)
    path = os.pathsep.join([str(packages), str(ROOT)])

    def run_bare(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-P", "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_bare


def test_the_plain_install_is_enough_for_the_language(
    bare: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    program = """
import sapwood, sapwood.lang, httpx
assert sapwood.SamplingParams(temperature=0.0).temperature == 0.0
try:
    sapwood.SamplingParams(bad_words=["a"])
except sapwood.srt.errors.BadRequest as e:
    assert e.param == "bad_words"
assert set(sapwood.__all__) <= set(dir(sapwood))
try:
    import numpy
except ImportError:
    print("bare")
"""
    answer = bare(program)
    assert (answer.stdout, answer.returncode) == ("bare\n", 0), answer.stderr


def test_what_the_plain_install_lacks_is_told(
    bare: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    serve = bare("import sys; from sapwood.srt.cli import main; sys.exit(main(['serve']))")
    assert serve.returncode == 2
    assert serve.stderr.startswith("sapwood: error: the runtime needs numpy, torch, pyzmq, fastapi, uvicorn")
    assert "pip install 'sapwood[serve]'" in serve.stderr
    assert serve.stderr.count("\n") == 1
    for door in ("Engine", "LLM", "Runtime"):
        told = bare(f"import sapwood; sapwood.{door}()").stderr
        assert re.search(
            rf"ImportError: sapwood.{door} needs (numpy|zmq): pip install 'sapwood\[serve\]'", told
        )
    unknown = bare("import sapwood; sapwood.Motor")
    assert "module 'sapwood' has no attribute 'Motor'" in unknown.stderr


def test_what_serve_checks_for_is_what_its_extra_brings() -> None:
    from sapwood.srt.requirements import PACKAGES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {line.split(">")[0].split(";")[0].strip() for line in project["optional-dependencies"]["serve"]}
    assert set(PACKAGES.values()) <= brought
    assert brought - set(PACKAGES.values()) == {"uvloop", "rich", "h11"}  # uvicorn brings h11
    assert project["version"] == sapwood.__version__
