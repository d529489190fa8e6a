"""bench.serve: answers are read right, numbers are what they are called, and wrong answers are told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from bench.process_cost import Meter, cpu_seconds, pss_bytes
from bench.serve_metrics import percentile, speeds
from bench.serve_report import ratios, report
from bench.serve_targets import QUESTIONS, Target, parse_target, request, same_share, says
from bench.sse_client import Answer, is_whole, read_answer
from bench.workloads import Conversation, Workload
from tests.unit.test_bench_workloads import ENGLISH, tokenizer

# the client


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENTS = [
    event(choices=[{"delta": {"role": "assistant", "content": ""}}], usage=None),
    event(choices=[{"delta": {"content": "Grüße"}, "finish_reason": None}]),
    event(choices=[{"delta": {"content": " 0\r\n\r\n"}, "finish_reason": "length"}]),
    event(
        choices=[],
        usage={"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
    ),
    b"data: [DONE]\n\n",
]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
RAW = HEAD + b"".join(chunk(e) for e in EVENTS) + b"0\r\n\r\n"


def test_an_answer_reads_the_same_however_it_is_cut() -> None:
    for size in (1, 2, 3, 7, 64, len(RAW)):
        pieces = [(float(i), RAW[i : i + size]) for i in range(0, len(RAW), size)]
        answer = read_answer(pieces, 0.0)
        assert (answer.error, answer.text) == (None, "Grüße 0\r\n\r\n")
        assert (answer.tokens, answer.counted, answer.prompt_tokens, answer.cached) == (7, True, 9, 4)
    assert [i for i in range(len(HEAD), len(RAW) + 1) if is_whole(RAW[:i])] == [len(RAW)]
    assert not is_whole(HEAD + b"zz\r\n0\r\n\r\n")


def test_text_has_the_time_of_the_piece_that_made_it_whole() -> None:
    late = chunk(EVENTS[1])
    pieces = [
        (10.0, HEAD + chunk(EVENTS[0])),
        (11.0, late[:20]),
        (12.5, late[20:]),
        (14.0, b"".join(chunk(e) for e in EVENTS[2:])),
        (15.0, b"0\r\n\r\n"),
    ]
    answer = read_answer(pieces, 9.0)
    assert (answer.times, answer.first, answer.end) == ([3.5, 5.0], 3.5, 5.0)


def test_events_across_chunks_without_counts_and_without_chunks() -> None:
    body = EVENTS[1] + EVENTS[2]
    cut = HEAD + chunk(body[:15]) + chunk(body[15:]) + b"0\r\n\r\n"
    plain = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body.replace(b"\n\n", b"\r\n\r\n")
    for raw in (cut, plain):
        answer = read_answer([(1.0, raw)], 0.0)
        assert (answer.error, answer.tokens, answer.counted, answer.cached) == (None, 2, False, None)
    own = event(choices=[{"text": "a", "finish_reason": "stop"}], timings={"cache_n": 5})
    assert read_answer([(1.0, HEAD + chunk(own))], 0.0).cached == 5


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "status 429: full"),
        (HEAD + chunk(EVENTS[1]), "broke off"),
        (HEAD + b"zz\r\n", "malformed chunked"),
        (b"HTTP/1.1\r\n\r\n", "malformed status line"),
        (b"HTTP/1.1 \xff\r\n\r\n", "malformed status line"),
        (b"220 mail ready\r\n\r\n", "malformed status line"),
        (HEAD + chunk(b"data: {oops\n\n"), "malformed event"),
        (HEAD + chunk(b"data: \xff\n\n"), "malformed event"),
        (HEAD + chunk(b"data: [1]\n\n"), "malformed event"),
        (HEAD + chunk(event(choices=[7])), "malformed event"),
        (HEAD + chunk(event(choices=[{"text": 7}])), "malformed event"),
        (HEAD + chunk(event(error={"message": "out of slots"})), "out of slots"),
    ],
)
def test_faults_are_told(raw: bytes, error: str) -> None:
    assert error in str(read_answer([(1.0, raw)] if raw else [], 0.0).error)


# numbers


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([float(i) for i in range(101)], 0.99) == 99.0


def test_speeds() -> None:
    fast = Answer(times=[1.0, 1.5, 2.0], end=2.0, counted=True, tokens=3, prompt_tokens=10, cached=4)
    slow = Answer(times=[3.0, 7.0], end=7.0, counted=True, tokens=2, prompt_tokens=10)
    row = speeds([fast, slow, Answer(error="x")], asked=4, output=3, seconds=10.0)
    assert (row["failed"], row["short"], row["errors"], row["cached_tokens"]) == (2, 1, ["x"], 4)
    assert (row["output_per_s"], row["total_per_s"]) == (0.5, 2.5)
    assert (row["ttft_p50_s"], row["tpot_p50_s"], row["itl_p50_s"]) == (2.0, (0.5 + 4.0) / 2, 0.5)
    nothing = speeds([], asked=1, output=3, seconds=1.0)
    assert (nothing["failed"], nothing["output_per_s"], nothing["ttft_p99_s"]) == (1, 0.0, None)


def test_cost_of_a_process_and_its_children() -> None:
    code = "import time, sys\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\nsys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=-1) as process:
        with Meter(process.pid) as meter:
            assert process.stdout is not None
            process.stdout.readline()
        assert pss_bytes(process.pid) > 2_000_000
        process.communicate(b"")
    assert meter.server_cpu is not None
    assert 0.4 <= meter.server_cpu <= 3.0
    assert meter.client_cpu < meter.server_cpu <= 2 * meter.wall
    assert meter.peak_pss is not None
    assert meter.peak_pss > 2_000_000
    assert meter.foreign is not None
    assert 0.0 <= meter.foreign <= 1.0
    assert (cpu_seconds(process.pid), pss_bytes(process.pid)) == (0.0, 0)


# targets and answers


def target(name: str = "a", **fields: Any) -> Target:
    return Target(name=name, url="http://h:1", model="m", version="1", **fields)


def test_targets_in_turn() -> None:
    names = [[t.name for t in serve.in_turn([target(n) for n in "abc"], r)] for r in range(4)]
    assert names == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_targets_are_parsed() -> None:
    assert parse_target("a=http://h:1/,model=m,pid=7,version=b1,fixed=hf") == {
        "name": "a", "url": "http://h:1", "model": "m", "pid": "7", "version": "b1", "fixed": "hf"
    }  # fmt: skip
    for wrong in (
        "a",
        "a=https://h",
        "a=http://h,x=1",
        "a=http://h,pid=x",
        "a=http://h,fixed=no",
        "=http://h",
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            parse_target(wrong)


def test_how_a_length_is_fixed() -> None:
    extra = {}
    for how in ("ignore_eos", "min_tokens", "hf", "none"):
        path, body = request(target(fixed=how), True, [], 5)
        assert (path, body["messages"], body["max_tokens"]) == ("/v1/chat/completions", [], 5)
        extra[how] = body
    plain = request(target(), False, "p", 5, fixed=False)[1]
    assert plain["prompt"] == "p"
    assert "ignore_eos" not in plain
    assert extra["ignore_eos"]["ignore_eos"] is True
    assert extra["min_tokens"]["min_tokens"] == 5
    assert json.loads(extra["hf"]["generation_config"])["max_new_tokens"] == 5
    assert extra["none"].keys() == plain.keys() - {"prompt"} | {"messages"}


def test_right_words_and_same_texts() -> None:
    assert says("The symbol is Au.", "au")
    assert not says("Because of that", "au")
    assert same_share(["abcd", "", "x"], ["abxy", "", "y"]) == (0.5 + 1.0 + 0.0) / 3
    assert same_share(["ab"], ["abcd"]) == 0.5


# whole runs


class Scripted(BaseHTTPRequestHandler):
    """Answers with `max_tokens` words; knows every answer, or on /wrong servers none."""

    protocol_version = "HTTP/1.1"
    right = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = {"/v1/models": {"data": [{"id": "tiny"}]}, "/props": {"build_info": "b9"}}
        body = json.dumps(known.get(self.path, {})).encode()
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        first = dict(QUESTIONS).get(asked, "w") if self.right else "v"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(body["max_tokens"]):
            text = first if i == 0 else " w"
            choice: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
            self.wfile.write(chunk(event(choices=[choice])))
        usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}
        done = event(choices=[{"delta": {}, "finish_reason": "length"}]) + event(choices=[], usage=usage)
        self.wfile.write(chunk(done + b"data: [DONE]\n\n") + b"0\r\n\r\n")


class Wrong(Scripted):
    right = False


class Backlog(ThreadingHTTPServer):
    request_queue_size = 256


@pytest.fixture
def urls() -> Iterator[list[str]]:
    servers = [Backlog(("127.0.0.1", 0), handler) for handler in (Scripted, Wrong)]
    threads = [threading.Thread(target=s.serve_forever, args=(0.01,)) for s in servers]
    for thread in threads:
        thread.start()
    yield [f"http://127.0.0.1:{s.server_port}" for s in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: object) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.serve", *map(str, argv)])
    assert serve.main() == 0


def test_a_wrong_server_is_shown_as_wrong(
    urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, vocabulary, file = tmp_path / "t.txt", tmp_path / "tokenizer.json", tmp_path / "r.json"
    text.write_text("\n\n".join(ENGLISH))
    tokenizer().save(str(vocabulary))
    run_main(
        monkeypatch, "run", "--target", f"good={urls[0]}", "--target", f"bad={urls[1]},version=x",
        "--text", text, "--tokenizer", vocabulary, "--workload", "batch,multi_turn", "--repeats", 2,
        "--json", file,
    )  # fmt: skip
    told = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [t["version"] for t in result["targets"]] == ["b9", "x"]
    assert [(t["check"]["right"], t["check"]["asked"]) for t in result["targets"]] == [(8, 8), (0, 8)]
    runs = {(r["workload"], r["target"], r["repeat"]): r for r in result["runs"]}
    assert len(runs) == 8
    assert all(r["failed"] == 0 and r["short"] == 0 and r["server_cpu_s"] is None for r in runs.values())
    assert [runs["batch", "good", i]["order"] for i in range(2)] == [0, 1]
    assert runs["batch", "good", 0]["output_tokens"] == 32 * 64
    assert runs["multi_turn", "bad", 1]["output_tokens"] == 48 * 64
    assert runs["batch", "bad", 0]["same_text"] == 0.0
    assert [r["faulty"] for r in result["ratios"]] == [["bad"], ["bad"]]
    assert "0/8 WRONG" in told
    assert "bad answered wrongly: 'What is the capital of France?' -> 'v w" in told
    run_main(monkeypatch, "report", file, "--markdown")
    again = capsys.readouterr().out
    assert "| batch | good b9 / bad x |" in again
    assert "0/8 WRONG" in again


def test_requests_that_fail_or_hang_have_no_answer() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def both() -> None:
        work = Workload("w", tuple(Conversation(("a", "b")) for _ in range(3)), at_once=2, output=4)
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            where = dataclasses.replace(target(), url=f"http://127.0.0.1:{port}")
            answers, meter = await serve.run_workload(where, work, timeout=0.2)
            assert answers == [[], [], []]
            assert 0.2 <= meter.wall < 10
        answers, _ = await serve.run_workload(where, work, timeout=10)
        assert [len(part) for part in answers] == [1, 1, 1]
        assert all("no connection" in str(part[0].error) for part in answers)

    asyncio.run(both())


def test_ratios_are_of_medians() -> None:
    def row(name: str, repeat: int, rate: float, ttft: float) -> dict[str, Any]:
        return {
            **speeds([], 0, 0, 1.0), "foreign_share": 0.02, "workload": "w", "target": name, "repeat": repeat,
            "output_per_s": rate, "ttft_p50_s": ttft, "server_cpu_s": None, "peak_pss_bytes": 100 * ord(name),
        }  # fmt: skip

    check = {"right": 8, "asked": 8, "answers": []}
    shown = [{"name": n, "version": "1", "model": "m", "url": "u", "check": check} for n in "ab"]
    rates = [
        ("a", 0, 30.0, 1.0),
        ("a", 1, 10.0, 3.0),
        ("a", 2, 20.0, 2.0),
        ("b", 0, 5.0, 9.0),
        ("b", 1, 10.0, 8.0),
    ]
    result: dict[str, Any] = {
        "machine": "x",
        "seed": 1,
        "date": "d",
        "targets": shown,
        "runs": [row(*r) for r in rates],
    }
    [ratio] = ratios(result)
    assert (ratio["output_per_s"], ratio["ttft_p50_s"]) == (20 / 7.5, 8.5 / 2)
    assert (ratio["pairs"], ratio["server_cpu_s"], ratio["faulty"]) == ([1.0, 6.0], None, [])
    assert ratio["peak_pss_bytes"] == ord("b") / ord("a")
    assert "2.67 (1.00-6.00)" in report(result)
    assert "others took" not in report(result)
    result["runs"][4]["failed"] = 1
    assert ratios(result)[0]["faulty"] == ["b"]
    result["runs"][0]["foreign_share"] = 0.3
    assert "In 1 of 5 runs others took more than 10% of the machine." in report(result)
