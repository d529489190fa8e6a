"""A server under mixed traffic for half an hour, from which clients hang up at random: does anything leak?

    python -m bench.soak --text FILE... [--guidellm VENV] [--minutes 30] [--json FILE] [MODEL]

Starts `sapwood serve` and keeps 12 clients of its own busy (chats of several turns, completions, several
choices, stop strings, prompts' logprobs, long prompts), of which one in ten hangs up midway, and beside them
guidellm, again and again, from the virtual environment VENV. Every 10 s the processes' memory, file
descriptors and threads are read. At the end, with nothing running: no 5xx, no row or private slot, as many
file descriptors and processes as before, and memory within 2 % of that after five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.process_cost import pss_bytes, tree
from bench.workloads import sentences
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from tests.serving import Server, serve

CLIENTS = 12
HANG_UP = 0.1
SETTLED_MINUTES = 5.0
LOOK_SECONDS = 10.0
GROWTH = 0.02
PIPES = 4
"""File descriptors that one more process takes, its own and its parent's."""


class Traffic:
    """What the clients did, by what came of it."""

    def __init__(self, url: str, texts: list[str], seed: int) -> None:
        self._url = url
        self._texts = texts
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, until: float) -> None:
        """Keep CLIENTS clients busy until that time."""
        limits = httpx.Limits(max_connections=4 * CLIENTS)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(self._client(client, until) for _ in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            path, body = self._request()
            hang_up = self._random.random() < HANG_UP
            try:
                await self._send(client, path, body, hang_up)
            except httpx.HTTPError as e:
                self._note("broken", f"{path}: {type(e).__name__} {e}")

    async def _send(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], hang_up: bool) -> None:
        if hang_up and not body.get("stream"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._random.uniform(0.01, 2.0)):
                    await client.post(path, json=body)
            self.outcomes["hung up"] += 1
            return
        async with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                said = (await answer.aread())[:200].decode(errors="replace")
                self._note(f"{answer.status_code // 100}xx", f"{path}: {answer.status_code} {said}")
                return
            left = self._random.randint(0, 12) if hang_up else -1
            whole = b""
            async for piece in answer.aiter_bytes():
                whole += piece
                left -= 1
                if left == 0:
                    self.outcomes["hung up"] += 1
                    return
        if body.get("stream") and not whole.rstrip().endswith(b"[DONE]"):
            self._note("unfinished", f"{path}: {whole[-100:]!r}")
        elif b'"error"' in whole[-400:]:
            self._note("error event", f"{path}: {whole[-300:]!r}")
        else:
            self.outcomes["whole"] += 1

    def _note(self, what: str, how: str) -> None:
        self.outcomes[what] += 1
        if len(self.failures) < 20:
            self.failures.append(how)

    def _request(self) -> tuple[str, dict[str, Any]]:
        rng = self._random
        system = f"You are assistant number {rng.randrange(4)}. " + " ".join(self._texts[:8])
        says = rng.choice(self._texts)
        common: dict[str, Any] = {
            "max_tokens": rng.choice([8, 16, 32, 64]), "temperature": rng.choice([0, 0.8]),
            "stream": rng.random() < 0.7,
        }  # fmt: skip
        kinds = ["chat", "completion", "choices", "stop", "logprobs", "long"]
        kind = rng.choices(kinds, [6, 4, 1, 2, 1, 1])[0]
        if kind == "chat":
            turns = [{"role": "system", "content": system}]
            for i in range(rng.randint(1, 4)):
                turns.append({"role": "user", "content": self._texts[i]})
                turns.append({"role": "assistant", "content": "Yes."})
            return "/v1/chat/completions", common | {"messages": [*turns, {"role": "user", "content": says}]}
        body = common | {"prompt": says}
        if kind == "choices":
            body |= {"n": 3, "temperature": 1.0}
        elif kind == "stop":
            body |= {"stop": ["the", "."]}
        elif kind == "logprobs":
            body |= {"echo": True, "logprobs": 2}
        elif kind == "long":
            body |= {"prompt": " ".join(rng.choices(self._texts, k=60))}
        return "/v1/completions", body


def look(pid: int) -> dict[str, float]:
    """Memory in bytes, file descriptors, threads and processes of the server."""
    members = tree(pid)
    files = threads = 0
    for member in members:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            files += len(os.listdir(f"/proc/{member}/fd"))
            threads += psutil.Process(member).num_threads()
    return {"pss": pss_bytes(pid), "files": files, "threads": threads, "processes": len(members)}


async def watch(pid: int, until: float, looks: list[dict[str, float]]) -> None:
    began = time.monotonic()
    while time.monotonic() < until:
        looks.append({"minute": (time.monotonic() - began) / 60, **look(pid)})
        await asyncio.sleep(LOOK_SECONDS)


async def guidellm(
    venv: Path, url: str, model: str, tokenizer: Path, until: float, outcomes: Counter[str]
) -> None:
    """guidellm, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until - 60:
            report = Path(folder) / "report.json"
            process = await asyncio.create_subprocess_exec(
                venv / "bin" / "guidellm", "run",
                "--backend", f"kind=openai_http,target={url},model={model}",
                "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=100",
                "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
                "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
                "--output", f"kind=json,path={report}", "--disable-console-interactive",
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            await process.wait()
            if not report.exists():
                outcomes["guidellm failed"] += 1
                return
            for benchmark in json.loads(report.read_text())["benchmarks"]:
                totals = benchmark["metrics"]["request_totals"]
                outcomes["guidellm"] += totals["successful"]
                outcomes["guidellm errors"] += totals["errored"]
            report.unlink()


async def traffic(server: Server, args: argparse.Namespace, texts: list[str]) -> tuple[Traffic, list[Any]]:
    until = time.monotonic() + 60 * args.minutes
    made = Traffic(server.url, texts, args.seed)
    looks: list[dict[str, float]] = []
    work = [made.run(until), watch(server.launcher.pid, until, looks)]
    if args.guidellm is not None:
        model = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
        work.append(guidellm(args.guidellm, server.url, model, args.tokenizer, until, made.outcomes))
    await asyncio.gather(*work)
    return made, looks


def books(server: Server) -> dict[str, Any]:
    """The scheduler's gauges, after it has checked itself."""
    stats: dict[str, Any] = httpx.get(server.url + "/server_info", timeout=30).json()["stats"]
    return stats


def judge(
    before: dict[str, float], after: dict[str, float], looks: list[Any], made: Traffic, stats: dict[str, Any]
) -> dict[str, Any]:
    """What was found, and what of it is wrong."""
    settled = [each["pss"] for each in looks if SETTLED_MINUTES <= each["minute"] < SETTLED_MINUTES + 2]
    last = [each["pss"] for each in looks if each["minute"] > looks[-1]["minute"] - 2]
    growth = statistics.median(last) / statistics.median(settled) - 1 if settled else float("nan")
    wrong = []
    for bad in ("5xx", "4xx", "broken", "unfinished", "error event", "guidellm errors", "guidellm failed"):
        if made.outcomes[bad]:
            wrong.append(f"{bad}: {made.outcomes[bad]}")
    if not growth < GROWTH:
        wrong.append(f"memory grew by {growth:.1%} after the first {SETTLED_MINUTES:g} minutes")
    # Processes that render chats start when they are needed, up to two.
    early = max(each["processes"] for each in looks if each["minute"] <= SETTLED_MINUTES)
    if after["processes"] > early:
        wrong.append(f"processes: {early:g} at first, {after['processes']:g} after")
    if after["files"] > before["files"] + PIPES * (after["processes"] - before["processes"]):
        wrong.append(f"files: {before['files']:g} before, {after['files']:g} after")
    for what in ("running", "waiting", "slots_used"):
        if stats.get(what):
            wrong.append(f"{what}: {stats[what]}")
    return {
        "outcomes": dict(made.outcomes), "failures": made.failures, "growth": growth, "before": before,
        "after": after, "stats": stats, "wrong": wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--guidellm", type=Path, help="a virtual environment with guidellm")
    parser.add_argument("--tokenizer", type=Path, help="a folder with the model's tokenizer, for guidellm")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--slots", type=int, default=8192, help="few enough that much is evicted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve(make(model_path=args.model))
    texts = [text for text in sentences(args.text) if 20 < len(text) < 300]
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(source.path, Path(folder), num_threads=None, max_total_tokens=args.slots) as server,
    ):
        # The process that renders chats starts with the first one.
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        httpx.post(server.url + "/v1/chat/completions", json=chat, timeout=60).raise_for_status()
        before = look(server.launcher.pid)
        made, looks = asyncio.run(traffic(server, args, texts))
        time.sleep(10)
        found = judge(before, look(server.launcher.pid), looks, made, books(server))
    print(json.dumps(found, indent=1))
    print("nothing wrong" if not found["wrong"] else "WRONG: " + "; ".join(found["wrong"]))
    if args.json:
        args.json.write_text(json.dumps({"minutes": args.minutes, **found, "looks": looks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
