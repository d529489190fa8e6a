"""Dependencies point one way (docs/architecture.md), files stay small, and nothing is pickled."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sapwood

ROOT = Path(sapwood.__file__).resolve().parent.parent
FOLDERS = ("srt", "lang", "kernels", "sapwood")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

LEAVES = {"errors", "params", "config", "messages", "names", "steps", "orders", "log", "namespaces"}
WIRED = LEAVES | {"channel", "lifeline"}

MAY_IMPORT: dict[str, set[str]] = {
    "lang": set(),
    "kernels": set(),
    "errors": set(),
    "log": set(),
    "namespaces": set(),
    "names": {"errors"},
    "params": {"errors"},
    "config": {"errors"},
    "steps": {"config", "errors", "params"},
    "messages": {"errors", "params", "steps"},
    "orders": {"config", "messages"},
    "requirements": {"errors"},
    "metrics": LEAVES | {"client"},
    "channel": {"messages"},
    "lifeline": {"config", "errors", "messages", "orders"},
    "client": LEAVES | {"channel"},
    "cache": LEAVES,
    "models": {"kernels", "errors"},
    "loader": {"models", "kernels", "errors", "params", "config"},
    "bounded": {"bounded_child", "errors"},
    "bounded_child": set(),
    "grammar": WIRED | {"bounded", "bounded_child"},
    "tokenizer": WIRED | {"bounded", "bounded_child", "grammar"},
    "server": WIRED | {"client", "grammar", "metrics", "sapwood"},
    "scheduler": WIRED | {"cache"},
    "worker": WIRED | {"models", "loader", "kernels", "grammar"},
    "child": LEAVES | {"lifeline"},
    "socket_folder": {"errors"},
    "launch": LEAVES | {"lifeline", "child", "socket_folder"},
    "serve": LEAVES | {"lifeline", "launch"},
    "launch_thread": LEAVES | {"launch"},
    "progress": set(),
    "offline": LEAVES
    | {"client", "launch", "launch_thread", "offline_work", "progress", "server", "tokenizer"},
    "offline_work": LEAVES | {"client", "server"},
    "offline_requests": LEAVES | {"client", "llm_params", "offline_work", "server"},
    "offline_door": LEAVES | {"offline_requests", "offline_work", "server"},
    "engine": LEAVES
    | {
        "flags",
        "loader",
        "offline",
        "offline_door",
        "offline_requests",
        "offline_work",
        "progress",
        "requirements",
        "server",
    },
    "llm_params": LEAVES,
    "llm_outputs": LEAVES | {"llm_params", "server"},
    "llm": LEAVES
    | {"client", "engine", "llm_outputs", "llm_params", "offline_requests", "offline_work", "server"},
    "runtime": LEAVES
    | {
        "flags",
        "launch_thread",
        "lifeline",
        "loader",
        "offline",
        "offline_requests",
        "requirements",
        "serve",
    },
    "flags": {"config", "errors"},
    "cli": LEAVES
    | {
        "engine",
        "flags",
        "kernels",
        "loader",
        "metrics",
        "models",
        "offline",
        "progress",
        "requirements",
        "serve",
        "server",
    },
    "sapwood": {"lang", "engine", "llm", "llm_params", "runtime"},
    "__main__": {"cli"},
}
"""Room: the other rooms that its files may import. A room is lang, kernels, or a folder or file of srt."""

MAY_NEED: dict[str, set[str]] = {
    "lang": {"httpx", "msgspec"},
    "kernels": {"torch", "numpy"},
    "cache": {"numpy", "msgspec"},
    "models": {"torch"},
    "loader": {"torch", "numpy", "msgspec", "safetensors", "tokenizers", "huggingface_hub"},
    "tokenizer": {"tokenizers", "jinja2", "numpy", "msgspec", "zmq"},
    "server": {
        "fastapi",
        "starlette",
        "uvicorn",
        "h11",
        "uvloop",
        "prometheus_client",
        "msgspec",
        "numpy",
        "zmq",
    },
    "scheduler": {"numpy", "msgspec"},
    "worker": {"torch", "numpy", "msgspec"},
    "metrics": {"prometheus_client"},
    "channel": {"zmq"},
    "engine": {"msgspec"},
    "llm_outputs": {"numpy"},
    "llm_params": {"msgspec"},
    "offline_door": {"msgspec"},
    "offline_requests": {"msgspec"},
    "offline_work": {"msgspec"},
    "progress": {"rich"},
    "runtime": {"httpx", "msgspec"},
    "flags": {"msgspec"},
    "cli": {"httpx", "msgspec", "rich"},
    "config": {"msgspec"},
    "messages": {"msgspec"},
    "steps": {"msgspec", "numpy"},
    "grammar": {"llguidance", "msgspec", "numpy"},
    "orders": {"msgspec"},
    "params": {"msgspec"},
    "errors": {"msgspec"},
    "child": {"msgspec"},
}
"""Room: the packages of others that its files may import. Nobody needs transformers; few need torch."""


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module path like ("srt", "cache", "radix"), without its leading "sapwood"."""
    if not parts:
        return "sapwood"
    return parts[1] if parts[0] == "srt" and len(parts) > 1 else parts[0]


def own_room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return room_of(tuple(p for p in parts if p not in ("__init__", "sapwood")))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, wherever it stands in it."""
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check() -> None:
    rooms = {own_room(path) for path in FILES}
    assert {"lang", "kernels", "cache", "scheduler", "worker", "messages", "launch"} <= rooms
    assert room_of(("srt", "cache", "radix", "RadixTree")) == "cache"
    assert room_of(("srt", "errors", "BadRequest")) == "errors"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_dependencies_point_one_way(path: Path) -> None:
    room = own_room(path)
    if room == "srt":
        assert not list(imports(path)), "srt/__init__.py must load nothing"
        return
    assert room in MAY_IMPORT, f"a new room: give {room!r} its rule in {Path(__file__).name}"
    for line, name in imports(path):
        top, *rest = name.split(".")
        where = f"{named(path)}:{line} imports {name}"
        if top == "sapwood":
            # The package itself holds the version and lazy names; lang, which stands alone, needs neither.
            other = room_of(tuple(rest)) if rest and rest[0] in FOLDERS else "sapwood"
            assert (
                other == room
                or (other == "sapwood" and room not in ("lang", "kernels"))
                or other in MAY_IMPORT[room]
            ), f"{where}, which {room} may not"
        elif top not in sys.stdlib_module_names:
            assert top in MAY_NEED.get(room, set()), f"{where}, which {room} may not need"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_nothing_is_pickled(path: Path) -> None:
    banned = {
        "pickle",
        "_pickle",
        "cPickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "multiprocessing",
    }
    for line, name in imports(path):
        assert name.split(".")[0] not in banned, f"{named(path)}:{line} imports {name}"
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            what = ast.unparse(node.func)
            assert what not in ("torch.load", "torch.save"), f"{named(path)}:{node.lineno} calls {what}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_are_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 450, f"{named(path)} has {lines} lines"


def run(program: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "module",
    [
        "sapwood.srt.scheduler.loop",
        "sapwood.srt.tokenizer.process",
        "sapwood.srt.grammar.process",
        "sapwood.srt.server.process",
        "sapwood.srt.loader.sources",
        "sapwood.srt.serve",
        "sapwood.srt.engine",
        "sapwood.srt.llm",
        "sapwood.srt.runtime",
        "sapwood.srt.cli",
        "sapwood.lang",
    ],
)
def test_a_process_without_the_model_loads_no_torch(module: str) -> None:
    heavy = {"torch", "transformers", "xgrammar", "triton", "llguidance"}
    if module != "sapwood.srt.server.process":
        heavy |= {"fastapi", "starlette", "uvicorn"}
    if module.split(".")[-2] in ("scheduler", "tokenizer", "grammar"):
        heavy |= {"asyncio"}  # 4 MB a process
    program = f"import sys, {module}; print(*(m for m in {sorted(heavy)} if m in sys.modules))"
    answer = run(program)
    assert (answer.stdout.strip(), answer.returncode) == ("", 0), answer.stderr


def test_the_worker_loads_torch_but_not_what_torch_loads_on_use() -> None:
    heavy = ("transformers", "xgrammar", "triton", "fastapi", "sympy", "torch._dynamo", "torch._inductor")
    program = f"import sys, sapwood.srt.worker.loop; print(*(m for m in {heavy} if m in sys.modules))"
    answer = run(program)
    assert (answer.stdout.strip(), answer.returncode) == ("", 0), answer.stderr


def test_importing_sapwood_loads_next_to_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import sapwood; print(*sorted(set(sys.modules) - before))"
    )
    answer = run(program)
    loaded = {name.partition(".")[0] for name in answer.stdout.split()}
    assert loaded - set(sys.stdlib_module_names) - {"__future__"} == {"sapwood"}, answer.stderr
