"""The servers that `bench.serve` compares: how they are named, asked, and checked for right answers."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from bench.sse_client import Answer, ask

FIXED = ("ignore_eos", "min_tokens", "hf", "none")
"""How a server is told to answer with exactly `max_tokens` tokens."""

QUESTIONS = (
    ("What is the capital of France?", "paris"),
    ("What is the capital of Japan?", "tokyo"),
    ("What is the capital of Germany?", "berlin"),
    ("What is the chemical symbol for gold?", "au"),
    ("What is the largest ocean on Earth?", "pacific"),
    ("What is the opposite of hot?", "cold"),
    ("What is the chemical formula of water?", "h2o"),
    ("What star is at the center of our solar system?", "sun"),
)
"""Questions that SmolLM2-135M-Instruct answers with this word, at temperature 0 in float32."""


@dataclass(frozen=True)
class Target:
    """A running server. `pid` is the root of its processes, on this machine."""

    name: str
    url: str
    model: str
    version: str
    pid: int | None = None
    fixed: str = "ignore_eos"


class Checked(NamedTuple):
    """How many of the questions were answered with the known word, and all answers."""

    right: int
    asked: int
    answers: list[dict[str, Any]]


def parse_target(given: str) -> dict[str, str]:
    """NAME=URL[,model=M][,pid=PID][,version=V][,fixed=HOW] as a dictionary. Raises ValueError."""
    first, *rest = given.split(",")
    name, equals, url = first.partition("=")
    if not equals or not name or not url.startswith("http://"):
        raise ValueError(f"--target {given!r}: expected NAME=http://HOST:PORT[,key=value]...")
    found = {"name": name, "url": url.rstrip("/")}
    for part in rest:
        key, equals, value = part.partition("=")
        if key not in ("model", "pid", "version", "fixed") or not value:
            raise ValueError(f"--target {given!r}: {part!r} is not model=, pid=, version= or fixed=")
        found[key] = value
    if found.get("fixed", "none") not in FIXED:
        raise ValueError(f"--target {given!r}: fixed={found['fixed']} is not one of {', '.join(FIXED)}")
    if not found.get("pid", "1").isdecimal():
        raise ValueError(f"--target {given!r}: pid={found['pid']} is not a number")
    return found


def discover(given: dict[str, str]) -> Target:
    """The target, with the model and version that the server itself names where none is given.

    Raises ValueError if it does not answer.
    """
    url = given["url"]
    model = given.get("model")
    if model is None:
        try:
            model = str(httpx.get(url + "/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as e:
            raise ValueError(f"--target {given['name']}: {url}/v1/models names no model: {e}") from None
    return Target(
        name=given["name"],
        url=url,
        model=model,
        version=given.get("version") or _version(url),
        pid=int(given["pid"]) if "pid" in given else None,
        fixed=given.get("fixed", "ignore_eos"),
    )


def _version(url: str) -> str:
    for path, key in (("/version", "version"), ("/props", "build_info")):
        try:
            answer = httpx.get(url + path, timeout=30)
            if answer.status_code == 200 and (found := answer.json().get(key)):
                return str(found)
        except (httpx.HTTPError, ValueError, AttributeError):
            continue
    return "unknown"


def request(
    target: Target, chat: bool, content: Any, output: int, fixed: bool = True
) -> tuple[str, dict[str, Any]]:
    """(path, body) of a streamed greedy request for `output` tokens; at most as many if not `fixed`."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body["messages" if chat else "prompt"] = content
    if fixed and target.fixed == "ignore_eos":
        body["ignore_eos"] = True
    elif fixed and target.fixed == "min_tokens":
        body["min_tokens"] = output
    elif fixed and target.fixed == "hf":
        # transformers serve refuses both, but takes a whole generation_config; no token has the id -1
        body["generation_config"] = f'{{"max_new_tokens": {output}, "do_sample": false, "eos_token_id": -1}}'
    return "/v1/chat/completions" if chat else "/v1/completions", body


async def send(target: Target, chat: bool, content: Any, output: int, fixed: bool = True) -> Answer:
    path, body = request(target, chat, content, output, fixed)
    try:
        return (await ask(target.url, path, body)).answer()
    except OSError as e:
        return Answer(error=f"no connection: {e}")


def says(answer: str, word: str) -> bool:
    """Is `word` one of the answer's words?"""
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None


async def check_answers(target: Target, timeout: float) -> Checked:
    """Ask each question once, one after the other. A failed request is a wrong answer."""
    answers = []
    for question, word in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        try:
            async with asyncio.timeout(timeout):
                answer = await send(target, True, messages, 32, fixed=False)
        except TimeoutError:
            answer = Answer(error=f"no answer in {timeout:g} s")
        right = answer.error is None and says(answer.text, word)
        answers.append({"question": question, "right": right, "answer": answer.error or answer.text})
    return Checked(sum(a["right"] for a in answers), len(answers), answers)


def same_share(answers: list[str], reference: list[str]) -> float:
    """The mean share of the longer text that two answers have in common from their beginning on."""
    shares = []
    for a, b in zip(answers, reference, strict=True):
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        shares.append(n / max(len(a), len(b)) if a or b else 1.0)
    return sum(shares) / len(shares)
