"""Known failures of like systems, tried on a server that is busy: cache and robustness, one line a case.

    python -m bench.cases [--json FILE] [MODEL]

Each server gets a load of its own (short streams, of which one in five hangs up) all the while. The cases are
those of other systems' bug reports: leaks after plain requests, retraction, prompts that can never fit, whole
prompts in the cache, usage with n > 1, unknown fields, long prompts without chunks, equal names, a death, a
SIGKILL of the launcher, SIGTERM, lengths at the limit, broken bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from tests.serving import Server, serve

CLIENTS = 6
HANG_UP = 0.2
WORDS = ["river", "stone", "cloud", "tree", "house", "light", "water", "wind", "road", "bird", "fire", "snow"]


class Load:
    """Short streams from a thread of its own until `stop`; `outcomes` counts statuses, "broken" and "cut"."""

    def __init__(self, url: str, max_tokens: int = 24) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> Counter[str]:
        self._stop.set()
        self._thread.join()
        return self.outcomes

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            await asyncio.gather(*(self._client(client, random.Random(i)) for i in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._stop.is_set():
            body = {
                "prompt": " ".join(rng.choices(WORDS, k=rng.randint(3, 40))),
                "max_tokens": self._max_tokens, "stream": True, "temperature": rng.choice([0, 1]),
            }  # fmt: skip
            left = rng.randint(0, 8) if rng.random() < HANG_UP else -1
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    whole = b""
                    async for piece in answer.aiter_bytes():
                        whole += piece
                        if (left := left - 1) == 0:
                            break
            except httpx.HTTPError:
                self.outcomes["broken"] += 1
                await asyncio.sleep(0.2)
                continue
            cut = left != 0 and answer.status_code == 200 and not whole.rstrip().endswith(b"[DONE]")
            self.outcomes["cut" if cut else str(answer.status_code)] += 1


def greedy(server: Server, text: str, tokens: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post("/v1/completions", body, 120)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def same_thrice(server: Server) -> None:
    """P01, P04: the same request again and again, a whole prompt in the cache included."""
    texts = {text_of(greedy(server, "The old river runs", 200)) for _ in range(3)}
    assert len(texts) == 1, texts
    greedy(server, "The old river runs", 1)
    turns = [
        {"role": "user", "content": "Tell me about rivers"},
        {"role": "assistant", "content": "A river is"},
    ]
    body = {
        "messages": turns, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 32,
        "temperature": 0,
    }  # fmt: skip
    answers = [server.post("/v1/chat/completions", body).json()["choices"][0] for _ in range(2)]
    assert answers[0] == answers[1], answers


def usage_with_choices(server: Server) -> None:
    """P05: siblings of one request are not counted as cached."""
    prompt = " ".join(WORDS * 3)
    body = {"prompt": prompt, "n": 4, "max_tokens": 8, "cache_salt": f"case {time.time()}"}
    first, second = (server.post("/v1/completions", body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0, first
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1, second


def unknown_fields(server: Server) -> None:
    """P06: internal keys of other systems are refused or do nothing."""
    prompt = " ".join(WORDS * 40)
    for key in (
        "session_params",
        "bootstrap_room",
        "skip_radix_cache_insert",
        "priority",
        "extra_key",
        "lora_path",
    ):
        status = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, key: 1}).status_code
        assert status == 400, (key, status)
    greedy(server, prompt, 4)


def equal_names(server: Server) -> None:
    """P42: a second request of a live name is refused, the first goes on, and the name is free after it."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(greedy, server, "Once upon a time", 300, rid="case-name")
        time.sleep(0.3)
        second = server.post("/v1/completions", {"prompt": "x", "rid": "case-name"})
        assert second.status_code == 409, second.text
        assert first.result()["usage"]["completion_tokens"] == 300
    greedy(server, "again", 4, rid="case-name")


def broken_bodies(server: Server) -> None:
    """P47: never a 500, never a traceback."""
    bodies = {
        b'{"prompt": "\\ud800", "max_tokens": 2}': (400,),
        b'{"prompt": "a\\udfffb", "max_tokens": 2}': (400,),
        b'{"prompt": "\\ud83d\\ude42", "max_tokens": 2}': (200,),
        b'{"prompt": "a\\u0000b", "max_tokens": 2}': (200,),
        b'{"prompt": "\xff\xfe", "max_tokens": 2}': (400,),
        b"[]": (400,),
        b'{"prompt": "' + b"a" * 5_000_000 + b'"}': (413,),
    }
    for body, allowed in bodies.items():
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=60)
        assert answer.status_code in allowed, (body[:60], answer.status_code, answer.text[:200])
        assert "Traceback" not in answer.text
    wrong = httpx.post(server.url + "/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert wrong.status_code == 415, wrong.status_code


def at_the_limit(server: Server) -> None:
    """P46: prompt and output together exactly the context."""
    ids = list(range(100, 150))
    answer = server.generate(ids, max_new_tokens=10_000, timeout=120)
    assert answer["meta_info"]["finish_reason"]["type"] == "length", answer["meta_info"]
    assert answer["meta_info"]["completion_tokens"] == 512 - len(ids), answer["meta_info"]


def retraction(server: Server) -> None:
    """P02: eight long answers in a pool for three; each as if alone."""
    prompts = [f"{word} and {word} went to the {word}" for word in WORDS[:8]]
    with ThreadPoolExecutor(8) as pool:
        together = [text_of(a) for a in pool.map(lambda p: greedy(server, p, 200), prompts)]
    alone = [text_of(greedy(server, p, 200)) for p in prompts]
    assert together == alone


def never_fits(server: Server) -> None:
    """P03: refused with both numbers; who comes after it is served."""
    long = server.post("/v1/completions", {"prompt": [5] * 800, "max_tokens": 4})
    assert long.status_code == 400, long.text
    assert "800" in long.text, long.text
    assert "600" in long.text, long.text
    for word in WORDS[:5]:
        greedy(server, word, 4)


def without_chunks(server: Server) -> None:
    """P07: a prompt longer than any step's budget would be."""
    assert greedy(server, " ".join(WORDS * 50), 8)["usage"]["prompt_tokens"] > 500


def books_balance(server: Server) -> None:
    """With nothing running: no row, no waiting request, no slot that is nobody's."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        stats = httpx.get(server.url + "/server_info", timeout=30).json()["stats"]
        if not (stats["running"] or stats["waiting"] or stats["slots_used"]):
            break
        time.sleep(0.3)
    else:
        raise AssertionError(stats)
    assert httpx.get(server.url + "/health", timeout=10).status_code == 200


def unharmed(outcomes: Counter[str]) -> None:
    """The others' requests were all answered, whatever the cases did."""
    print(dict(outcomes))
    assert set(outcomes) == {"200"}, outcomes


def death(server: Server, load: Load) -> None:
    """P43: the worker dies under load; health turns red, and nothing hangs."""
    server.children()["worker"].kill()
    began = time.monotonic()
    with contextlib.suppress(httpx.TransportError):
        while httpx.get(server.url + "/health", timeout=5).status_code == 200:
            assert time.monotonic() - began < 5
            time.sleep(0.1)
    assert server.launcher.wait(20) != 0
    assert load.stop()["cut"] == 0
    assert time.monotonic() - began < 30


def orphans(server: Server, load: Load) -> None:
    """P44: the launcher is killed under load; no child is left, and the port is free."""
    children = server.children()
    server.launcher.send_signal(signal.SIGKILL)
    server.launcher.wait(5)
    _gone, alive = psutil.wait_procs(children.values(), timeout=5)
    assert not alive, alive
    load.stop()


def drain(server: Server, load: Load) -> None:
    """P45: SIGTERM under load: what runs is finished, the code is 0, nobody is left."""
    children = server.children()
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(greedy, server, f"{word} begins", 150) for word in WORDS[:3]]
        time.sleep(0.5)
        server.launcher.send_signal(signal.SIGTERM)
        assert server.launcher.wait(60) == 0
        assert all(each.result()["usage"]["completion_tokens"] == 150 for each in long)
    assert load.stop()["cut"] == 0
    _gone, alive = psutil.wait_procs(children.values(), timeout=5)
    assert not alive, alive


Case = Callable[[Server], None]
Ending = Callable[[Server, Load], None]

SERVERS: list[tuple[dict[str, Any], list[Case]]] = [
    (
        {"chunked_prefill_size": 4, "max_total_tokens": 4096},
        [same_thrice, usage_with_choices, unknown_fields, equal_names, broken_bodies],
    ),
    ({"max_total_tokens": 600, "context_length": 600}, [retraction, never_fits]),
    ({"context_length": 512, "max_total_tokens": 2048}, [at_the_limit]),
    ({"chunked_prefill_size": -1, "max_total_tokens": 4096}, [without_chunks]),
]
ENDINGS: list[Ending] = [death, orphans, drain]


def tried(name: str, work: Callable[[], object]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        work()
        wrong = ""
    except (AssertionError, httpx.HTTPError, psutil.Error, OSError) as e:
        wrong = f"{type(e).__name__}: {e}"[:500]
    seconds = time.monotonic() - began
    print(f"{name:20} {'ok' if not wrong else 'WRONG ' + wrong} ({seconds:.1f} s)", flush=True)
    return {"case": name, "wrong": wrong, "seconds": seconds}


def run(path: str, folder: Path) -> Iterator[dict[str, Any]]:
    for flags, cases in SERVERS:
        with serve(path, folder, num_threads=None, **flags) as server:
            load = Load(server.url)
            for case in cases:
                yield tried(case.__name__, lambda case=case, server=server: case(server))
            outcomes = load.stop()
            yield tried("books_balance", lambda server=server: books_balance(server))
            yield tried("load", lambda outcomes=outcomes: unharmed(outcomes))
    for ending in ENDINGS:
        with serve(path, folder, num_threads=None) as server:
            load = Load(server.url)
            time.sleep(2)
            yield tried(ending.__name__, lambda e=ending, s=server, d=load: e(s, d))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve(make(model_path=args.model))
    with tempfile.TemporaryDirectory() as folder:
        found = list(run(source.path, Path(folder)))
    wrong = [each["case"] for each in found if each["wrong"]]
    print("nothing wrong" if not wrong else f"WRONG: {wrong}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
