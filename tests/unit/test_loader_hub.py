"""Models by hub id, tried with a small hub on this machine and the real hub library."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.hub import HubName, choose, parse
from tests.gguf_files import tiny_gguf
from tests.models import tiny_llama

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
ERRORS = {"gone": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "broken": (500, "")}


class Hub(ThreadingHTTPServer):
    """The routes of a hub that fetching needs, over folders `root/<repository name>`; `asked` logs paths."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.root = root
        self.asked: list[str] = []
        self.tokens: set[str] = set()

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        return {path.split("/", 5)[5] for path in self.asked if path.startswith("/org/")}


class Routes(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.tokens.add(self.headers.get("Authorization", ""))
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = parts[3] if parts[0] == "api" else parts[1]
        if name in ERRORS:
            return self.refuse(*ERRORS[name])
        folder = self.server.root / name
        if not folder.is_dir():
            return self.refuse(404, "RepoNotFound")
        revision = parts[5] if parts[0] == "api" and len(parts) > 5 else "main"
        if parts[0] != "api":
            return self.file(folder / "/".join(parts[4:]), parts[3])
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return self.refuse(404, "RevisionNotFound")
        files = sorted((str(p.relative_to(folder)), p) for p in folder.rglob("*") if p.is_file())
        if "tree" in parts:
            rows = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": digest(p)} for n, p in files]
            return self.answer(rows)
        siblings = [{"rfilename": n} for n, _ in files]
        return self.answer({"id": f"org/{name}", "sha": commit, "siblings": siblings})

    def file(self, path: Path, revision: str) -> None:
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{digest(path)}"')
        self.send_header("X-Repo-Commit", COMMITS.get(revision, revision))
        self.finish_with(data)

    def answer(self, value: Any) -> None:
        self.send_response(200)
        self.finish_with(json.dumps(value).encode())

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.finish_with(b"{}")

    def finish_with(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    server = Hub(tmp_path / "hub")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


_CHILD = """
import json, sys
import msgspec
from sapwood.srt.config import make
from sapwood.srt.errors import SapwoodError
from sapwood.srt.loader import sources
for config in json.loads(sys.argv[1]):
    try:
        print(json.dumps(msgspec.to_builtins(sources.resolve(make(**config)))))
    except SapwoodError as e:
        print(json.dumps({"error": type(e).__name__, "message": e.message}))
assert "torch" not in sys.modules
"""


def resolve_all(
    hub: Hub | None, home: Path, *configs: dict[str, Any], env: dict[str, str] | None = None
) -> list[Any]:
    """What `sources.resolve` says in a process of its own: the hub library reads its variables at import."""
    endpoint = f"http://127.0.0.1:{hub.server_port}" if hub else "http://127.0.0.1:9"
    plain = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    variables = {
        "HF_HOME": str(home / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "SAPWOOD_CACHE": str(home / "cache"),
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(configs)], env={**plain, **variables, **(env or {})},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return [json.loads(line) for line in ran.stdout.strip().splitlines()]


def resolve(
    hub: Hub | None, home: Path, name: str, *, env: dict[str, str] | None = None, **config: Any
) -> Any:
    return resolve_all(hub, home, {"model_path": name, **config}, env=env)[0]


def test_a_folder_is_fetched_and_then_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    folder = tiny_llama(hub.root / "tiny", shards=3)
    (folder / "pytorch_model.bin").write_bytes(b"never")
    (folder / "README.md").write_text("# Tiny")
    (folder / "chat_template.jinja").write_text("from the hub")
    (folder / "original").mkdir()
    (folder / "original/consolidated.safetensors").write_bytes(b"never")
    found = resolve(hub, tmp_path, "org/tiny")
    assert found["name"] == "org/tiny"
    assert found["format"] == "safetensors"
    assert found["chat_template"] == "from the hub"
    names = [Path(f).name for f in found["files"]]
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert hub.fetched() == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors.index.json", *names,
    }  # fmt: skip
    for file in found["files"]:
        assert Path(file).read_bytes() == (folder / Path(file).name).read_bytes()
    assert resolve(None, tmp_path, "org/tiny") == found, "the hub does not answer"
    assert resolve(None, tmp_path, "org/tiny", env={"HF_HUB_OFFLINE": "1"}) == found
    hub.asked.clear()
    assert resolve(hub, tmp_path, "org/tiny", env={"HF_HUB_OFFLINE": "1"}) == found
    assert hub.asked == []


def test_a_revision_is_another_model(hub: Hub, tmp_path: Path) -> None:
    tiny_llama(hub.root / "tiny")
    found, missing = resolve_all(hub, tmp_path, {"model_path": "org/tiny@v2"}, {"model_path": "org/tiny@v9"})
    assert f"snapshots/{COMMITS['v2']}" in found["path"]
    assert resolve(None, tmp_path, "org/tiny@v2") == found
    assert missing["error"] == "ModelError"
    assert missing["message"].startswith("org/tiny@v9 is no path here, and could not be fetched from the hub")
    assert "a local path works too" in missing["message"]


def test_a_dummy_needs_no_weights(hub: Hub, tmp_path: Path) -> None:
    tiny_llama(hub.root / "tiny")
    assert resolve(hub, tmp_path, "org/tiny", load_format="dummy")["format"] == "dummy"
    assert not any(f.endswith(".safetensors") for f in hub.fetched())


def test_a_repository_of_one_gguf(hub: Hub, tmp_path: Path) -> None:
    folder = hub.root / "quants"
    folder.mkdir()
    tiny_gguf(folder / "m.Q8_0.gguf", kind="q8_0")
    (folder / "mmproj-m.gguf").write_bytes(b"an image tower")
    found = resolve(hub, tmp_path, "org/quants")
    assert (found["format"], Path(found["path"]).name, found["name"]) == ("gguf", "m.Q8_0.gguf", "org/quants")
    assert hub.fetched() == {"m.Q8_0.gguf"}
    assert resolve(None, tmp_path, "org/quants") == found


def test_a_repository_of_several_ggufs(hub: Hub, tmp_path: Path) -> None:
    folder = hub.root / "quants"
    folder.mkdir()
    tiny_gguf(folder / "m.f16.gguf", kind="f16")
    tiny_gguf(folder / "m.Q8_0.gguf", kind="q8_0")
    tiny_gguf(folder / "big", parts=2)
    names = ["", ":m.q2.gguf", ":m.f16.gguf", ":big-00001-of-00002.gguf"]
    several, unknown, single, split = resolve_all(
        hub, tmp_path, *({"model_path": f"org/quants{name}"} for name in names)
    )
    assert (
        "org/quants holds several GGUF files: big-00001-of-00002.gguf, m.Q8_0.gguf, m.f16.gguf; name one, as "
        "in org/quants:big-00001-of-00002.gguf"
    ) in several["message"]
    assert "org/quants has no file m.q2.gguf; GGUF files there: big-00001" in unknown["message"]
    assert Path(single["path"]).name == "m.f16.gguf"
    assert [Path(f).name for f in split["files"]] == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    assert hub.fetched() == {"m.f16.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"}


def test_pickles_alone_are_refused(hub: Hub, tmp_path: Path) -> None:
    folder = tiny_llama(hub.root / "old", weights=False)
    (folder / "pytorch_model.bin").write_bytes(b"never")
    assert "only pickled weights (pytorch_model.bin)" in resolve(hub, tmp_path, "org/old")["message"]
    assert hub.fetched() == set()


def test_a_hub_that_refuses(hub: Hub, tmp_path: Path) -> None:
    answers = resolve_all(hub, tmp_path, *({"model_path": f"org/{name}"} for name in ERRORS))
    for name, answer in zip(ERRORS, answers, strict=True):
        message = answer["message"]
        assert answer["error"] == "ModelError"
        assert f"org/{name} is no path here, and could not be fetched from the hub http://127.0." in message
        assert message.endswith("a local path works too: a Hugging Face folder or a .gguf file")
        assert ("HF_TOKEN" in message) is (name == "gated")
        assert "\n" not in message


@pytest.mark.parametrize("env", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_no_network_and_nothing_cached(tmp_path: Path, env: dict[str, str]) -> None:
    message = resolve(None, tmp_path, "org/tiny", env=env)["message"]
    assert "could not be fetched from the hub http://127.0.0.1:9" in message
    assert f"it is not in the cache ({tmp_path}/hf/hub)" in message
    assert "a local path works too" in message


def test_the_token_is_sent(hub: Hub, tmp_path: Path) -> None:
    tiny_llama(hub.root / "tiny")
    resolve(hub, tmp_path, "org/tiny", env={"HF_TOKEN": "hf_secret"})
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/na.me_2", HubName("Org-1/na.me_2")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name:m-Q4_K_M.gguf", HubName("org/name", None, "m-Q4_K_M.gguf")),
        ("org/name@abc:sub/m.gguf", HubName("org/name", "abc", "sub/m.gguf")),
        ("name", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("../b", None),
        ("a/..", None),
        ("-a/b", None),
        ("org/name:m.bin", None),
        ("org/name@", None),
        ("org/na me", None),
        ("https://host/x", None),
    ],
)
def test_what_is_a_hub_id(text: str, name: HubName | None) -> None:
    assert parse(text) == name


def test_what_is_chosen() -> None:
    name = HubName("org/x")
    described = ["config.json", "tokenizer.json", "merges.txt", "tokenizer.model"]
    rest = ["model.pt", "onnx/model.onnx", "sub/model.safetensors", "run.py", "evil.pkl"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    both = [*described, *rest, *shards, index, "consolidated.safetensors"]
    assert set(choose(name, both, weights=True)) == {*described, *shards, index}
    assert set(choose(name, [*described, *rest, "model.safetensors"], weights=True)) == {
        *described,
        "model.safetensors",
    }
    assert set(choose(name, both, weights=False)) == {*described, index}
    with pytest.raises(ModelError, match=r"no safetensors with a config\.json and no GGUF"):
        choose(name, ["README.md", "model.safetensors"], weights=True)
