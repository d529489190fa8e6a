"""Constrained generation on a real server: what comes out, what it costs, what an attacker can do.

    python -m bench.structured generate --jsonschemabench FILE [--schemas 100] [--seeds 3]
    python -m bench.structured cost --jsonschemabench FILE
    python -m bench.structured attack [--seconds 60]
    python -m bench.structured tools --bfcl FOLDER
    python -m bench.structured repeats --text FILE...

All take `--json FILE` and a MODEL. `generate`: documents at temperatures 1 and 2 under real schemas, each
checked with jsonschema. `cost`: mask fills, and tokens per second with and without drafts against the same
prompts unconstrained. `attack`: inter-token latency of eight streams beside clients that post bad schemas.
`tools`: calls with tool_choice "required", through the openai client. `repeats`: documents asked for again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai

from bench.workloads import sentences
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from tests.serving import Server, serve

ASK = "Write a JSON document that describes an example."
STREAMS = 8


def schemas(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body)


async def together(url: str, bodies: list[dict[str, Any]], at_once: int) -> list[httpx.Response]:
    """The answers, in order; so many are under way at any time."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(
        base_url=url, timeout=600, limits=httpx.Limits(max_connections=64)
    ) as client:

        async def one(body: dict[str, Any]) -> httpx.Response:
            async with gate:
                return await ask(client, body)

        return await asyncio.gather(*map(one, bodies))


def chat(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


def under(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "document", "schema": schema, "strict": True}}


def outcome(answer: httpx.Response, schema: Any) -> str:
    """What became of one document."""
    if answer.status_code != 200:
        return f"{answer.status_code}"
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "length":
        return "length" if choice.get("incomplete") else "length, without a note"
    try:
        document = json.loads(choice["message"]["content"])
        jsonschema.validators.validator_for(schema)(schema).validate(document)
    except (ValueError, jsonschema.ValidationError) as e:
        return f"INVALID {type(e).__name__}: {str(e)[:200]}"
    return "valid"


def generate(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    known = [each["schema"] for each in schemas(args.jsonschemabench)]
    picked: list[Any] = []
    for schema in known:  # the first ones that are not refused
        if len(picked) == args.schemas:
            break
        answer = server.post("/v1/chat/completions", chat(ASK, 1, response_format=under(schema)))
        if answer.status_code == 200:
            picked.append(schema)
    found: dict[str, Any] = {"schemas": len(picked)}
    for temperature in (1.0, 2.0):
        bodies = [
            chat(ASK, args.max_tokens, temperature=temperature, seed=seed, response_format=under(schema))
            for schema in picked
            for seed in range(args.seeds)
        ]
        began = time.perf_counter()
        answers = asyncio.run(together(server.url, bodies, 16))
        seconds = time.perf_counter() - began
        asked = [schema for schema in picked for _ in range(args.seeds)]
        outcomes = Counter(map(outcome, answers, asked))
        tokens = sum(a.json()["usage"]["completion_tokens"] for a in answers if a.status_code == 200)
        found[f"temperature {temperature:g}"] = {
            "outcomes": dict(outcomes), "tokens": tokens, "tokens_per_second": tokens / seconds,
        }  # fmt: skip
        print(temperature, dict(outcomes), f"{tokens / seconds:.0f} tokens/s")
    return found


def rate(server: Server, bodies: list[dict[str, Any]], at_once: int) -> tuple[float, float, int]:
    """Output tokens per second, steps taken, and tokens."""
    before = server.state()["steps"]
    began = time.perf_counter()
    answers = asyncio.run(together(server.url, bodies, at_once))
    seconds = time.perf_counter() - began
    tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    return tokens / seconds, server.state()["steps"] - before, tokens


def cost(path: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Constrained over unconstrained tokens per second, drafts on and off, alternating."""
    bench = schemas(args.jsonschemabench)
    found: dict[str, Any] = {"masks": mask_costs(path, bench)}
    with (
        serve(path, folder, num_threads=None) as drafting,
        serve(path, folder, num_threads=None, speculative_algorithm="none") as plain,
    ):
        usable = []
        for each in bench:
            answer = drafting.post(
                "/v1/chat/completions", chat(ASK, 200, response_format=under(each["schema"]))
            )
            if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 40:
                usable.append(each["schema"])
            if len(usable) == 16:
                break
        for at_once in (1, 16):
            rows: dict[str, list[float]] = {"drafts": [], "no drafts": [], "unconstrained": []}
            steps: dict[str, float] = {}
            for repeat in range(args.repeats):
                constrained = [
                    chat(f"{ASK} Number {repeat}.", 200, temperature=0, response_format=under(s))
                    for s in usable
                ]
                for name, server in (("drafts", drafting), ("no drafts", plain)):
                    server.post("/flush_cache", {})
                    speed, taken, tokens = rate(server, constrained, at_once)
                    rows[name].append(speed)
                    steps[name] = taken / tokens
                free = [
                    chat(
                        f"{ASK} Number {repeat}.",
                        max(1, tokens // len(usable)),
                        temperature=0,
                        ignore_eos=True,
                    )
                ] * len(usable)
                plain.post("/flush_cache", {})
                rows["unconstrained"].append(rate(plain, free, at_once)[0])
            medians = {name: statistics.median(values) for name, values in rows.items()}
            found[f"batch {at_once}"] = {
                "tokens_per_second": medians,
                "drafts / unconstrained": medians["drafts"] / medians["unconstrained"],
                "no drafts / unconstrained": medians["no drafts"] / medians["unconstrained"],
                "steps per token": steps,
            }
            print(at_once, json.dumps(found[f"batch {at_once}"], indent=1))
    return found


def mask_costs(path: str, bench: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of a mask fill at each token of the valid instances, and of compiling."""
    from sapwood.srt.errors import BadRequest
    from sapwood.srt.grammar.compile import compile_constraint
    from sapwood.srt.grammar.engine import Engine
    from sapwood.srt.params import Constraint

    source = resolve(make(model_path=path))
    assert source.tokenizer_file is not None
    engine = Engine(source.tokenizer_file, source.vocab_size, source.eos_ids)
    mask = np.zeros(engine.mask_words, np.int32)
    fills, compiles = [], []
    for each in bench:
        began = time.perf_counter()
        try:
            grammar = compile_constraint(
                Constraint("json_schema", json.dumps(each["schema"]), "schema"), engine
            )
            fresh = engine.compile(grammar.text)
        except BadRequest:
            continue
        compiles.append(time.perf_counter() - began)
        for test in (t for t in each["tests"] if t["valid"]):
            matcher = fresh.copy()
            for token in engine.tokenize(json.dumps(test["data"]))[:300]:
                began = time.perf_counter()
                matcher.fill(mask.ctypes.data, mask.nbytes)
                fills.append(time.perf_counter() - began)
                if not matcher.accept([token]):
                    break
    return {
        "fills": len(fills), "fill p50": float(np.quantile(fills, 0.5)) * 1e6,
        "fill p99": float(np.quantile(fills, 0.99)) * 1e6, "fill max": max(fills) * 1e6,
        "compile p50": float(np.quantile(compiles, 0.5)) * 1e6,
        "compile p99": float(np.quantile(compiles, 0.99)) * 1e6,
    }  # fmt: skip


def bombs() -> list[dict[str, Any]]:
    """Request fields of the worst schemas, expressions and grammars known."""
    nested: Any = {"type": "string"}
    for _ in range(12):
        nested = {
            "oneOf": [{"type": "object", "properties": {"a": nested}, "required": ["a"]}, {"type": "integer"}]
        }
    deep: Any = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"]}
    overlap = {
        "oneOf": [{"type": "string", "pattern": f"(a|b)*{c}(a|b){{{k}}}"} for k, c in enumerate("ab" * 6, 8)]
    }
    tangled = {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(8)]} for i in range(8)
        ]
    }
    enum = {"enum": [f"member number {i}" for i in range(10_000)]}
    loops = {
        "$defs": {
            str(i): {"anyOf": [{"$ref": f"#/$defs/{(i + j) % 40}"} for j in range(1, 9)]} for i in range(40)
        },
        "$ref": "#/$defs/0",
    }
    return [
        *({"response_format": under(schema)} for schema in (nested, deep, overlap, tangled, enum, loops)),
        {"regex": "(a{1000}){1000}"},
        {"regex": "((a|b|c)*d?){40}x" + "(a?){200}a{200}"},
        {"regex": ""},
        {
            "ebnf": "root ::= a\n"
            + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60))
            + '\na60 ::= "x"'
        },
        {"ebnf": "root ::= root root | " + '"a" | ' * 500 + '"b"'},
        {"response_format": under({"type": "string", "minLength": 1_000_000})},
    ]


async def victims(url: str, seconds: float) -> list[float]:
    """Seconds between the tokens of eight streams."""
    gaps: list[float] = []
    until = time.monotonic() + seconds

    async def stream(client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < until:
            body = {"prompt": f"Story {number}:", "max_tokens": 400, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                last = None
                async for _piece in answer.aiter_bytes():
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if time.monotonic() > until:
                        return

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(stream(client, i) for i in range(STREAMS)))
    return gaps


async def attackers(url: str, seconds: float, kinds: list[dict[str, Any]], pause: float) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    until = time.monotonic() + seconds
    worst = 0.0

    async def attacker(client: httpx.AsyncClient, number: int) -> None:
        nonlocal worst
        turn = number
        while time.monotonic() < until:
            body = json.loads(json.dumps(chat(f"{ASK} {turn}", 16, **kinds[turn % len(kinds)])))
            # Equal ones would be compiled once.
            if "response_format" in body:
                body["response_format"]["json_schema"]["schema"]["title"] = f"{turn}"
            began = time.monotonic()
            answer = await ask(client, body)
            worst = max(worst, time.monotonic() - began)
            outcomes[str(answer.status_code)] += 1
            turn += 1
            await asyncio.sleep(pause)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(attacker(client, i) for i in range(4)))
    outcomes["slowest answer, ms"] = int(worst * 1000)
    return outcomes


def attack(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Beside clients that post what is refused; and beside such as post what is taken: ordinary load."""

    def both(kinds: list[dict[str, Any]]) -> tuple[list[float], dict[str, int]]:
        # The attackers' own work, which would be elsewhere, takes what is left of the cores.
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.nice(19)
            told = asyncio.run(attackers(server.url, args.seconds, kinds, args.pause))
            os.write(writer, json.dumps(told).encode())
            os._exit(0)
        os.close(writer)
        gaps = asyncio.run(victims(server.url, args.seconds))
        with os.fdopen(reader) as pipe:
            outcomes = json.load(pipe)
        os.waitpid(pid, 0)
        return gaps, outcomes

    asyncio.run(victims(server.url, 5))
    refused, taken = [], []
    for kind in bombs():
        status = server.post("/v1/chat/completions", chat(ASK, 16, **kind), 30).status_code
        (taken if status == 200 else refused).append(kind)
    quiet = asyncio.run(victims(server.url, args.seconds))
    loud, outcomes = both(refused)
    again = asyncio.run(victims(server.url, args.seconds))
    busy, answers = both(taken)

    def p99(gaps: list[float]) -> float:
        return float(np.quantile(gaps, 0.99))

    usual = statistics.mean([p99(quiet), p99(again)])
    found = {
        "quiet p99": [p99(quiet), p99(again)],
        "beside what is refused": {"p99": p99(loud), "ratio": p99(loud) / usual, "answers": outcomes},
        "beside what is taken": {"p99": p99(busy), "ratio": p99(busy) / usual, "answers": answers},
    }
    print(json.dumps(found, indent=1))
    return found


TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def as_schema(value: Any) -> Any:
    """BFCL's parameters as JSON Schema."""
    if isinstance(value, list):
        return [as_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    schema = {key: as_schema(each) for key, each in value.items()}
    if isinstance(kind := schema.get("type"), str):
        if kind == "any":
            del schema["type"]
        else:
            schema["type"] = TYPES.get(kind, kind)
    return schema


def prompts(folder: Path) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Messages and tools."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            item = json.loads(line)
            tools = [
                {
                    "type": "function",
                    "function": {
                        "name": f["name"].replace(".", "_"), "description": f["description"],
                        "parameters": as_schema(f["parameters"]),
                    },
                }
                for f in item["function"]
            ]  # fmt: skip
            yield item["question"][0], tools


def called(message: Any, tools: list[dict[str, Any]]) -> str:
    """What is wrong with the calls of a message; "" if nothing."""
    if not message.tool_calls:
        return "no call"
    for call in message.tool_calls:
        schema = next(
            (t["function"]["parameters"] for t in tools if t["function"]["name"] == call.function.name), None
        )
        if schema is None:
            return f"a call of {call.function.name}, which is no tool"
        try:
            jsonschema.validate(json.loads(call.function.arguments), schema)
        except (ValueError, jsonschema.ValidationError) as e:
            return f"{type(e).__name__}: {str(e)[:150]}"
    return ""


def tools(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=300)
    outcomes: Counter[str] = Counter()
    failures = []
    for number, (messages, offered) in enumerate(prompts(args.bfcl)):
        more: Any = {"temperature": 0, "max_tokens": args.max_tokens, "tool_choice": "required"}
        try:
            choice = client.chat.completions.create(
                model="default", messages=messages, tools=offered, **more
            ).choices[0]  # type: ignore[arg-type]
        except openai.BadRequestError as e:
            outcomes["refused"] += 1
            failures.append(f"{number}: {e.message[:200]}")
            continue
        wrong = called(choice.message, offered)
        if choice.finish_reason == "length":
            outcomes["length"] += 1
        elif wrong:
            outcomes["WRONG"] += 1
            failures.append(f"{number}: {wrong}")
        else:
            outcomes["valid"] += 1
    print(dict(outcomes), *failures, sep="\n")
    return {"outcomes": dict(outcomes), "failures": failures}


def repeats(path: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    texts = [text for text in sentences(args.text) if 60 < len(text) < 300][: args.documents]
    bodies = [chat(f"Write about this: {text}", 256, temperature=0, ignore_eos=True) for text in texts]
    with (
        serve(path, folder, num_threads=None, speculative_algorithm="radix") as drafting,
        serve(path, folder, num_threads=None, speculative_algorithm="none") as plain,
    ):
        seconds: dict[str, list[float]] = {"first": [], "repeats": [], "repeats without drafts": []}
        different = 0
        for body in bodies:
            told = []
            for turn in range(5):
                for name, server in (("repeats", drafting), ("repeats without drafts", plain)):
                    began = time.perf_counter()
                    told.append(server.post("/v1/chat/completions", body).json()["choices"][0]["message"])
                    took = time.perf_counter() - began
                    if turn:
                        seconds[name].append(took)
                    elif name == "repeats":
                        seconds["first"].append(took)
            different += any(message != told[0] for message in told)
    means = {name: statistics.mean(values) for name, values in seconds.items()}
    found = {
        "seconds": means, "speed-up": means["repeats without drafts"] / means["repeats"],
        "different": different,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["generate", "cost", "attack", "tools", "repeats"])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--jsonschemabench", type=Path)
    parser.add_argument("--bfcl", type=Path)
    parser.add_argument("--text", nargs="+", type=Path)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=1.0, help="of each of four attackers after an answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = resolve(make(model_path=args.model)).path
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if args.what in ("cost", "repeats"):
            found = {"cost": cost, "repeats": repeats}[args.what](path, folder, args)
        else:
            server = stack.enter_context(serve(path, folder, num_threads=None))
            found = {"generate": generate, "attack": attack, "tools": tools}[args.what](server, args)
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(known | {args.what: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
