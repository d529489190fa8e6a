"""Throughput of concurrent requests over HTTP, beside Hugging Face `generate` on the same batch.

    python -m bench.throughput [--requests 32] [--input 128] [--output 64] [--repeats 3] [--json FILE] [MODEL]

Starts `sapwood serve`, then alternates: all requests at once, streamed, through the OpenAI route; and one
`generate` call of transformers in float32 with the same prompts. Ratios are pair by pair; above 1 Sapwood is
faster. Prompts are token ids, all different, so that no prefix is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from bench.peers import transformers_model
from sapwood import __version__
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from tests.serving import serve


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(count)]


async def ask_all(url: str, batch: list[list[int]], output: int) -> tuple[float, list[float], int]:
    """(seconds for all, time to the first token of each, output tokens)."""
    first: list[float] = []

    async def one(client: httpx.AsyncClient, ids: list[int]) -> int:
        body = {
            "prompt": ids, "max_tokens": output, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        tokens, begin, seen = 0, time.perf_counter(), False
        async with client.stream("POST", url + "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if not seen:
                    first.append(time.perf_counter() - begin)
                    seen = True
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        return tokens

    limits = httpx.Limits(max_connections=len(batch))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        begin = time.perf_counter()
        tokens = await asyncio.gather(*(one(client, ids) for ids in batch))
        return time.perf_counter() - begin, sorted(first), sum(tokens)


def generate(model: Any, batch: list[list[int]], output: int) -> float:
    ids = torch.tensor(batch)
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    assert out.shape[1] == ids.shape[1] + output
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve(make(model_path=args.model))
    model = transformers_model(source)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(args.model, Path(folder), num_threads=torch.get_num_threads()) as server,
    ):
        for repeat in range(args.repeats + 1):
            batch = prompts(args.requests, args.input, source.vocab_size, repeat)
            seconds, first, tokens = asyncio.run(ask_all(server.url, batch, args.output))
            assert tokens == args.requests * args.output
            peer = generate(model, batch, args.output)
            if repeat == 0:
                continue  # a warm-up
            row = {
                "sapwood_tokens_per_s": tokens / seconds,
                "transformers_tokens_per_s": tokens / peer,
                "ratio": peer / seconds,
                "ttft_p50_s": statistics.median(first),
                "ttft_max_s": first[-1],
            }
            rows.append(row)
            print("  ".join(f"{name} {value:.2f}" for name, value in row.items()), flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    print(f"median ratio {ratio:.2f} (sapwood {__version__}, transformers {transformers.__version__})")
    if args.json:
        versions = {
            "sapwood": __version__, "transformers": transformers.__version__, "torch": torch.__version__
        }  # fmt: skip
        args.json.write_text(json.dumps({**versions, "ratio": ratio, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
