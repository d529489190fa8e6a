"""Is the cache exact? The same prompts under every way of serving them, compared with `==`.

    python -m bench.exactness [--prompts 200] [--max-tokens 8] [--json FILE] [MODEL]

Ten families of prompts share prefixes of 3 to 600 tokens. The baseline is each prompt alone on an empty
cache; every other run must give the same ids and the same logprobs, to the bit. The last run asks for
longer answers from a pool so small that rows are retracted; the count is shown: a run that never retracts
would prove nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from sapwood import Engine, __version__

LONG = 32
SHARED = (3, 17, 63, 64, 65, 130, 200, 256, 400, 600)


def prompts(count: int, vocab: int) -> list[list[int]]:
    """`count` prompts in ten families, mixed; a family shares a prefix, each prompt has its own end."""
    rng = random.Random(7)
    bases = [[rng.randrange(3, vocab) for _ in range(n)] for n in SHARED]
    made = [
        [*bases[i % len(bases)], *(rng.randrange(3, vocab) for _ in range(rng.randint(1, 24)))]
        for i in range(count)
    ]
    rng.shuffle(made)
    return made


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 1234},
    "n = 2": {"temperature": 1.0, "seed": 99, "n": 2},
    "stop string": {"temperature": 1.0, "seed": 5, "stop": ["e", " the"]},
}

RUNS: dict[str, dict[str, Any]] = {
    "cache off, 16 at a time": {"disable_radix_cache": True, "max_running_requests": 16},
    "chunks of 16": {"chunked_prefill_size": 16, "max_running_requests": 16},
    "chunks of 64": {"chunked_prefill_size": 64, "max_running_requests": 16},
    "chunks of 512": {"chunked_prefill_size": 512, "max_running_requests": 16},
    "overlap off": {"disable_overlap_schedule": True, "max_running_requests": 16},
    "tiny pool": {"max_total_tokens": 1100, "max_running_requests": 16, "chunked_prefill_size": 64},
}


def answer(result: dict[str, Any] | list[dict[str, Any]]) -> Any:
    """What must not change: ids, text, and logprobs as exact floats."""
    many = result if isinstance(result, list) else [result]
    return [
        (
            r["output_ids"],
            r["text"],
            r["meta_info"]["finish_reason"],
            [(float(p).hex(), i) for p, i, *_ in r["meta_info"]["output_token_logprobs"]],
        )
        for r in many
    ]


def ask(engine: Engine, batch: list[list[int]], params: dict[str, Any]) -> list[Any]:
    results = engine.generate(input_ids=batch, sampling_params=params, return_logprob=True, progress=False)
    n = params.get("n", 1)
    return [answer(results[i * n : (i + 1) * n]) for i in range(len(batch))]


def compare(
    name: str, variant: str, want: list[Any], got: list[Any], rows: list[dict[str, Any]], **more: Any
) -> None:
    differ = sum(a != b for a, b in zip(want, got, strict=True))
    rows.append({"run": name, "sampling": variant, "prompts": len(want), "differ": differ, **more})
    print(f"{name:<26} {variant:<12} {len(want):>4} prompts  {differ:>3} differ  {more or ''}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    baseline: dict[str, list[Any]] = {}
    longer: dict[str, list[Any]] = {}
    common = {"model_path": args.model, "context_length": args.context_length, "log_level": "warning"}
    begin = time.time()
    with Engine(**common, max_running_requests=16) as engine:
        batch = prompts(args.prompts, engine.server_info()["source"]["vocab_size"])
        longest = max(map(len, batch))
        for name, variant in VARIANTS.items():
            params = {"max_new_tokens": args.max_tokens, **variant}
            cold = []
            for prompt in batch:
                engine.flush_cache()
                cold += ask(engine, [prompt], params)
            baseline[name] = cold
            print(f"baseline {name}: alone, on an empty cache", flush=True)
            engine.flush_cache()
            warm = [ask(engine, [prompt], params)[0] for prompt in batch]
            compare("one at a time, cache on", name, cold, warm, rows)
            compare("16 at a time, all cached", name, cold, ask(engine, batch, params), rows)
            # Long enough that rows outgrow what was kept for them at admission.
            params["max_new_tokens"] = max(args.max_tokens, LONG)
            few = batch[: args.prompts // 4]
            longer[name] = []
            for prompt in few:
                engine.flush_cache()
                longer[name] += ask(engine, [prompt], params)
    for run, options in RUNS.items():
        with Engine(**{**common, **options}) as engine:
            for name, variant in VARIANTS.items():
                params = {"max_new_tokens": args.max_tokens, **variant}
                if run == "tiny pool":
                    params["max_new_tokens"] = max(args.max_tokens, LONG)
                    got = ask(engine, batch[: args.prompts // 4], params)
                    retracted = engine.server_info()["state"]["retracted"]
                    compare(run, name, longer[name], got, rows, retracted=retracted)
                else:
                    compare(run, name, baseline[name], ask(engine, batch, params), rows)
    bad = sum(row["differ"] for row in rows)
    print(f"{bad} differences; longest prompt {longest} tokens; {time.time() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps({"sapwood": __version__, "differences": bad, "rows": rows}, indent=1))
    if not any(row.get("retracted") for row in rows):
        print("no row was retracted: the tiny pool is not tiny enough to prove anything")
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
