"""`sapwood batch`: every custom_id exactly once, whatever ends a run in the middle."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import sapwood
from sapwood.srt.cli.batch_files import Results, read_requests
from sapwood.srt.cli.batch_run import run_on_url
from sapwood.srt.cli.batch_tally import Tally
from sapwood.srt.errors import ConfigError, SapwoodError, Unavailable
from tests.models import tiny_llama
from tests.serving import serve

ROOT = Path(sapwood.__file__).resolve().parent.parent
SMALL = ("--max-total-tokens", "1024", "--num-threads", "1", "--speculative-algorithm", "none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")))


def start(*arguments: Any, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "sapwood", "batch", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def batch(*arguments: Any, **env: str) -> tuple[int, str]:
    """Exit code and standard error of a whole run."""
    process = start(*arguments, **env)
    out, err = process.communicate(timeout=120)
    assert out == ""
    assert "Traceback" not in err, err
    return process.returncode, err


def completion(name: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {"model": "default", "prompt": name, "max_tokens": tokens, "temperature": 0, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    counts = Counter(line["custom_id"] for line in lines)
    assert set(counts.values()) <= {1}, counts
    return {line["custom_id"]: line for line in lines}


def texts(path: Path) -> dict[str, str]:
    return {name: line["response"]["body"]["choices"][0]["text"] for name, line in results(path).items()}


def test_every_kind_of_request_and_an_error_of_one(model: str, tmp_path: Path) -> None:
    chat = {"model": "default", "messages": [{"role": "user", "content": "A river"}], "max_tokens": 3}
    lines = [
        completion("text"),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings",
         "body": {"model": "default", "input": ["A river", "A tree"]}},
        completion("wrong", temperature=-1),
        completion("unknown", model="gpt-4o"),
    ]  # fmt: skip
    source, out = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code, said = batch(source, out, "--model", model, *SMALL, SAPWOOD_API_KEY="unused")
    assert code == 1
    assert "5 requests: 3 answered" in said
    assert "2 failed" in said
    found = results(out)
    assert set(found) == {"text", "chat", "vector", "wrong", "unknown"}
    assert {name: line["response"]["status_code"] for name, line in found.items()} == {
        "text": 200, "chat": 200, "vector": 200, "wrong": 400, "unknown": 404,
    }  # fmt: skip
    for line in found.values():
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert line["response"]["request_id"]
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert len(found["vector"]["response"]["body"]["data"]) == 2
    assert "temperature" in found["wrong"]["response"]["body"]["error"]["message"]

    before = out.read_bytes()
    code, said = batch(source, out, "--model", model)
    assert code == 1
    assert "0 answered" in said
    assert "5 were there before, 2 failed" in said
    assert out.read_bytes() == before

    lines[3] = completion("wrong")
    lines[4] = completion("unknown")
    written(source, lines)
    code, said = batch(source, out, "--model", model, *SMALL, "--retry-failed")
    assert code == 0
    assert "2 answered" in said
    assert {line["response"]["status_code"] for line in results(out).values()} == {200}


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> int:
    end = time.monotonic() + 60
    while not path.exists() or (found := path.read_bytes().count(b"\n")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


NAMES = [f"request {i}" for i in range(40)]
# The last ones take so long that a run is in the midst of them, however late a test comes to end it.
MANY = [completion(name, 60 if i < 8 else 440, ignore_eos=True) for i, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run that nothing ends writes."""
    folder = tmp_path_factory.mktemp("whole")
    source = written(folder / "in.jsonl", MANY)
    code, said = batch(source, folder / "out.jsonl", "--model", model, *SMALL)
    assert code == 0, said
    return texts(folder / "out.jsonl")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_goes_on_where_it_was(
    model: str, whole: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    source, out = written(tmp_path / "in.jsonl", MANY), tmp_path / "out.jsonl"
    process = start(source, out, "--model", model, *SMALL, "--concurrency", 3)
    done = wait_for_lines(out, 5, process)
    assert done < len(NAMES)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number]
    assert "Traceback" not in said
    if number != signal.SIGKILL:
        assert "left: run again to go on" in said
    _gone, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    kept = results(out)
    assert 5 <= len(kept) < len(NAMES)
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_torn", "custom_id": "request 39", "resp')
    code, said = batch(source, out, "--model", model, *SMALL)
    assert code == 0, said
    assert f"{len(NAMES) - len(kept)} answered" in said
    found = results(out)
    assert set(found) == set(NAMES)
    assert all(found[name] == line for name, line in kept.items())
    assert texts(out) == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{nonsense\n", "line 1: "),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}\n', "line 1: .*body"),
        ('{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}\n', "custom_id is empty"),
        (
            '{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}\n',
            "method must be POST",
        ),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/images", "body": {}}\n', "url must be"),
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": 5}\n',
            "body must be an object",
        ),
        (json.dumps(completion("a", stream=True)) + "\n", "stream is not for a batch"),
        (f"{json.dumps(completion('a'))}\n\n{json.dumps(completion('a'))}\n", "line 3: .*that of line 1 too"),
        ('{"custom_id": "a", "body": ' + "[" * 100_000 + "\n", "line 1: maximum recursion depth"),
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x": '
            + "[" * 100_000
            + "]" * 100_000
            + "}}\n",
            "line 1: maximum recursion depth",
        ),
        ("5\n" * 9, r"line 3: .*\(and 6 more\)"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_with_its_lines(tmp_path: Path, text: str, said: str) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    code, told = batch(source, out)
    assert code == 2
    assert told.count("\n") == 1
    assert told.startswith(f"sapwood: error: {source} is no batch of requests: line ")
    assert re.search(said, told)
    assert not out.exists()


def test_files_that_cannot_be(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [completion("a")])
    for arguments, said in (
        ((tmp_path / "none", tmp_path / "o"), "cannot read"),
        ((source, source), "are the same file"),
        ((source, tmp_path / "no" / "o"), "cannot write"),
        ((source, "/dev/full"), "/dev/full is no regular file"),
        (("/dev/zero", tmp_path / "o"), "/dev/zero is no regular file"),
        ((source, tmp_path / "o", "--concurrency", 0), "--concurrency must be from 1 to 4096, got 0"),
        ((source, tmp_path / "o", "--url", "http://x", "--num-threads", 1), "--num-threads is the server's"),
    ):
        code, told = batch(*arguments)
        assert (code, told.count("\n")) == (2, 1)
        assert said in told
    other = tmp_path / "other.txt"
    other.write_text("precious\n")
    code, told = batch(source, other)
    assert (code, "line 1, is no result" in told) == (2, True)
    assert other.read_text() == "precious\n"


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out.jsonl"
    with out.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, told = batch(source, out)
    assert (code, "another batch writes" in told) == (2, True)


def test_a_server_does_the_work_and_may_go_away(model: str, tmp_path: Path) -> None:
    names = [f"request {i}" for i in range(12)]
    source = written(tmp_path / "in.jsonl", [completion(name) for name in names])
    there, here = tmp_path / "there.jsonl", tmp_path / "here.jsonl"
    with serve(model, tmp_path, max_total_tokens=1024, api_key="batch-key") as server:
        code, told = batch(
            source, there, "--url", server.url, "--concurrency", 4, SAPWOOD_API_KEY="batch-key,second"
        )
        assert code == 0, told
        code, told = batch(source, tmp_path / "wrong.jsonl", "--url", server.url, "--api-key", "no")
        assert code == 1
        assert {r["response"]["status_code"] for r in results(tmp_path / "wrong.jsonl").values()} == {401}
    assert batch(source, here, "--model", model, *SMALL)[0] == 0
    assert texts(there) == texts(here)
    began = time.monotonic()
    code, told = batch(source, tmp_path / "gone.jsonl", "--url", server.url)
    assert (code, "cannot talk with" in told) == (1, True)
    assert time.monotonic() - began < 20


def test_a_worker_that_dies_ends_the_run_which_can_go_on(model: str, tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", MANY), tmp_path / "out.jsonl"
    process = start(source, out, "--model", model, *SMALL, "--concurrency", 3)
    wait_for_lines(out, 2, process)
    (worker,) = [p for p in psutil.Process(process.pid).children(recursive=True) if "worker" in p.cmdline()]
    worker.kill()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search(r"^sapwood: error: worker died: killed by signal 9", said, re.M), said
    assert "Traceback" not in said
    assert {line["response"]["status_code"] for line in results(out).values()} == {200}


Answers = Iterator[httpx.Response | httpx.HTTPError]


def asked(
    monkeypatch: pytest.MonkeyPatch, folder: Path, answers: Answers
) -> tuple[dict[str, Any], list[float]]:
    """The results after a server gave `answers`, and how long was waited between them."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    def answer(request: httpx.Request) -> httpx.Response:
        found = httpx.Response(200) if request.method == "GET" else next(answers)
        if isinstance(found, httpx.HTTPError):
            raise found
        return found

    client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("sapwood.srt.cli.batch_run.asyncio.sleep", sleep)
    monkeypatch.setattr("sapwood.srt.cli.batch_run.httpx.AsyncClient", client)
    source = written(folder / "in.jsonl", [completion("a"), completion("b")])
    with Results(folder / "out.jsonl", source) as there:
        run_on_url("http://x", None, read_requests(source), there, Tally(), lambda: None, 1)
    return results(folder / "out.jsonl"), waits


def status(code: int, after: str | None = None) -> httpx.Response:
    return httpx.Response(code, json={}, headers={} if after is None else {"retry-after": after})


def test_a_full_queue_is_asked_until_it_has_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = [*(status(429, "1") for _ in range(9)), status(429, "7"), status(200), status(200)]
    found, waits = asked(monkeypatch, tmp_path, iter(answers))
    assert {line["response"]["status_code"] for line in found.values()} == {200}
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]


def test_a_wait_is_at_least_what_the_server_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = [status(429, "9"), status(503, "nonsense"), status(200), status(429, "99"), status(200)]
    _, waits = asked(monkeypatch, tmp_path, iter(answers))
    assert waits == [9, 18, 30]


def test_a_request_that_is_always_unavailable_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, waits = asked(monkeypatch, tmp_path, iter([*(status(503) for _ in range(6)), status(200)]))
    assert {name: line["response"]["status_code"] for name, line in found.items()} == {"a": 503, "b": 200}
    assert len(waits) == 5


def test_nobody_who_answers_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer after 6 tries: gone"):
        asked(monkeypatch, tmp_path, iter([httpx.ReadError("gone") for _ in range(6)]))
    assert results(tmp_path / "out.jsonl") == {}


def test_a_full_disk_is_one_line_and_can_be_gone_on_from(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", [completion("a"), completion("b")]), tmp_path / "out.jsonl"
    first, second = read_requests(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Results(out, source) as there:
        there.write(first, 200, "r", b"{}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (out.stat().st_size + 20, hard))
        try:
            with pytest.raises(
                SapwoodError, match=r"cannot write .*out.jsonl: File too large; run again"
            ) as e:
                there.write(second, 200, "r", b"{}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not isinstance(e.value, ConfigError)
        assert there.there == {"a": True}
    with Results(out, source) as there:
        assert there.there == {"a": True}
        there.write(second, 200, "r", b"[" * 100_000)
    assert set(results(out)) == {"a", "b"}
