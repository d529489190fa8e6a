"""`sapwood chat`: over pipes and in a terminal, with an engine of its own and with a server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sapwood
from sapwood.srt.cli.chat_commands import Chat, Measures
from sapwood.srt.cli.chat_screen import printable
from sapwood.srt.cli.chat_sources import Messages, Piece, Usage
from sapwood.srt.cli.chat_url import _lines, _piece
from tests.models import tiny_llama
from tests.serving import Server, serve

ROOT = Path(sapwood.__file__).resolve().parent.parent
SMALL = ("--max-total-tokens", "1024", "--num-threads", "1", "--temperature", "0", "--max-tokens", "6")
MEASURES = re.compile(
    r"^(?:[\d.]+ tokens/s|-) · (\d+) tokens · prompt (\d+), (\d+) cached · first after [\d.]+ s$", re.M
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(model, tmp_path_factory.mktemp("serve"), max_total_tokens=1024, api_key="chat-key") as running:
        yield running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "sapwood", "chat", *arguments]


def chat(said: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        input=said,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_each_line_is_a_turn_that_finds_the_last_ones_in_the_cache(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    answer = chat(f"A river\nAnd now?\n/save {saved}\n", model, *SMALL)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(saved.read_text())
    assert [m["role"] for m in told["messages"]] == ["user", "assistant"] * 2
    assert [m["content"] for m in told["messages"][::2]] == ["A river", "And now?"]
    first, second = (m["content"] for m in told["messages"][1::2])
    assert answer.stdout == f"{first}\n{second}\n"
    measures = [tuple(map(int, found)) for found in MEASURES.findall(answer.stderr)]
    (out1, prompt1, cached1), (out2, prompt2, cached2) = measures
    assert (out1, out2, cached1) == (6, 6, 0)
    assert prompt1 <= cached2 < prompt2
    assert "\x1b" not in answer.stdout + answer.stderr


def test_the_commands(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "/help", "/undo", "A river", "/retry", "//slash", "/undo", "/system Be kind.",
        "/set temperature 9999", "/set top_k 5", "/set bogus 1", "/set seed x", '/set stop "', "/nonsense",
        f"/save {saved}", "/save /no/such/folder/x", "/set top_k", "/set", "/clear", "/system",
        f"/save {saved}2", "/quit", "unread",
    ]  # fmt: skip
    answer = chat("\n".join(lines) + "\n", model, *SMALL)
    assert answer.returncode == 0, answer.stderr
    river, again, slash = answer.stdout.splitlines()
    assert river == again
    assert slash != river
    told = json.loads(saved.read_text())
    assert told["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "A river"},
        {"role": "assistant", "content": river},
    ]
    assert told["params"] == {"max_tokens": 6, "temperature": 0.0, "top_k": 5, "stop": ['"']}
    assert json.loads((tmp_path / "chat.json2").read_text())["messages"] == []
    for said in (
        "forget the last question", "error: nothing has been asked yet", "system message set",
        "error: temperature must be from 0.0 to 100.0, got 9999", "error: there is no parameter 'bogus'",
        "error: seed must be a number", "error: there is no command /nonsense",
            "error: cannot write /no/such",
    ):  # fmt: skip
        assert said in answer.stderr
    assert 'max_tokens 6, temperature 0.0, stop ["\\""]' in answer.stderr.splitlines()


def test_messages_of_several_lines(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    answer = chat(f'one \\\ntwo\n"""\nthree\n\nfour\n"""\n\n  \n/save {saved}\n', model, *SMALL)
    assert answer.returncode == 0, answer.stderr
    questions = [m["content"] for m in json.loads(saved.read_text())["messages"][::2]]
    assert questions == ["one \ntwo", "three\n\nfour"]


def test_a_request_that_is_wrong_does_not_end_the_chat(model: str) -> None:
    answer = chat("A river\n" + "word " * 900 + "\nA river\n", model, *SMALL)
    assert answer.returncode == 1, answer.stderr
    assert len(answer.stdout.splitlines()) == 2
    assert len(MEASURES.findall(answer.stderr)) == 2
    assert re.search(r"^error: .*\d+ tokens", answer.stderr, re.M)


def test_a_server_answers_as_an_engine_does(server: Server, model: str) -> None:
    said = "A river\nAnd now?\n"
    here = chat(said, model, *SMALL)
    sampling = SMALL[4:]
    there = chat(said, "--url", server.url, "--api-key", "chat-key", *sampling)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout
    assert len(MEASURES.findall(there.stderr)) == 2
    variable = chat(said, "--url", f"{server.url}/v1/", *sampling, SAPWOOD_API_KEY="chat-key,second")
    assert variable.stdout == here.stdout


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot talk with http://127.0.0.1:9", 1),
        (["--url", "ftp://x"], "cannot talk with ftp://x", 1),
        (["--url", "http://x", "--num-threads", "2"], "--num-threads is the server's to choose", 2),
        (["--api-key", "k"], "--api-key is a server's: it needs --url", 2),
        (["--port", "1"], "--port is for sapwood serve: nothing listens here", 2),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], said: str, code: int) -> None:
    answer = chat("hi\n", *arguments)
    assert answer.returncode == code
    assert answer.stderr.startswith("sapwood: error: ")
    assert said in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_wrong_key_is_told(server: Server) -> None:
    answer = chat("hi\n", "--url", server.url, "--api-key", "wrong")
    assert answer.returncode in (1, 2)
    assert "401" in answer.stderr
    assert "Traceback" not in answer.stderr


@contextlib.contextmanager
def terminal(model: str, folder: Path, *arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A chat whose three streams are a terminal: its other end, and the process."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        command(model, "--num-threads", "1", "--temperature", "0", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SAPWOOD_CACHE": str(folder), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield mine, process
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def until(end: int, wanted: Callable[[str], bool], seconds: float = 60.0) -> str:
    """What the terminal shows, once `wanted` holds for it."""
    shown = b""
    deadline = time.monotonic() + seconds
    while not wanted(shown.decode("utf-8", "replace")):
        assert time.monotonic() < deadline, shown
        if select.select([end], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # the other side has gone
                shown += os.read(end, 65536)
    return shown.decode("utf-8", "replace")


def await_reading(pid: int) -> None:
    """Return once the process, whose prompt is shown, sleeps until a key comes.

    Python's readline loses a signal that comes between its prompt and its `select`, until the next key or
    signal: nobody types so fast, a test does.
    """
    deadline = time.monotonic() + 60
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tmp_path: Path) -> None:
    model = str(tiny_llama(tmp_path / "model", max_position_embeddings=32768))
    # An answer that is not over before it is stopped.
    endless = ("--max-tokens", "20000", "--max-total-tokens", "30000", "--speculative-algorithm", "none")
    with terminal(model, tmp_path, *endless) as (end, process):
        until(end, lambda text: "/help for help" in text and "> " in text)
        os.write(end, b"/set ignore_eos true\n")
        until(
            end,
            lambda text: "ignore_eos true" in text.partition("\n")[2] and "> " in text.rpartition("\n")[2],
        )
        os.write(end, b"A river\n")
        until(end, lambda text: len(text) > 60)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        shown = until(end, lambda text: "tokens ·" in text and "> " in text.rpartition("cached")[2])
        assert "[stopped]" in shown
        assert "\x1b[2m" in shown  # dim
        assert process.poll() is None
        assert all(child.is_running() for child in children)
        await_reading(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        until(end, lambda text: "Ctrl-D or /quit" in text)
        os.write(end, b"/set max_tokens 3\nAgain\n")
        until(end, lambda text: " 3 tokens ·" in text and "> " in text.rpartition("cached")[2])
        os.write(end, b"\x04")
        assert process.wait(20) == 0
    assert not psutil.wait_procs(children, timeout=20)[1]
    history = tmp_path / "chat_history"
    assert "A river" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o077 == 0


def test_the_first_token_is_the_first_text() -> None:
    class Server:
        name = "slow"

        def answer(self, messages: Messages, params: dict[str, Any]) -> Generator[Piece, None, None]:
            yield Piece("", None)  # whose turn it is, said at once
            time.sleep(0.2)
            yield Piece("A", None)
            yield Piece(" tree", Usage(3, 2, None))

    chat = Chat(Server(), None, {})
    assert list(chat.ask("hi")) == ["A", " tree"]
    assert chat.last.first is not None
    assert chat.last.first - chat.last.began >= 0.2


def test_an_answer_without_text_is_measured_too() -> None:
    assert Measures(1.0, None, 1.5, Usage(3, 1, 0)).line() == (
        "- · 1 tokens · prompt 3, 0 cached · first after 0.50 s"
    )
    assert Measures(1.0).line() == "no answer"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("\x1b[2Jred\x9b0m\r\x07\tand\n\U0001f468\u200d\U0001f469") == (
        "[2Jred0m\tand\n\U0001f468\u200d\U0001f469"
    )


def test_an_answer_of_a_server_may_have_any_line_ends() -> None:
    pieces = [b'data: {"choices":[{"delta":{"content":"a\xe2\x80', b'\xa8b"}}]}\r\n\ndata: [DONE]\n\n']
    first, *rest = [line for line in _lines(iter(pieces)) if line.strip()]
    assert _piece(first[5:].strip()).text == "a\u2028b"
    assert rest == [b"data: [DONE]"]
