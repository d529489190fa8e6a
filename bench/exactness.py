"""Is the cache exact? The same prompts under every way of serving them, compared with `==`.

    python -m bench.exactness [--model PATH] [--samplings all|plain|new|NAME,...] [--prompts 200]
                              [--max-tokens 8] [--drafts auto ngram radix] [--json FILE]

Up to ten families of prompts share prefixes of 3 to 600 tokens. The baseline is each prompt alone on an empty
cache; every other run must give the same ids, texts, ends, logprobs, prompt logprobs and hidden states, to
the bit. The last run asks for everything at once, with longer answers, from a pool so small that rows are
retracted; the count is shown: a run that never retracts would prove nothing. The baseline has no drafts; each
source of them has a run of its own, warm, which shows how many were proposed and how many of them kept.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sapwood import __version__
from sapwood.srt import config
from sapwood.srt.loader import sources
from sapwood.srt.messages import IdsPrompt, pack
from sapwood.srt.offline import OfflineRuntime
from sapwood.srt.offline_work import Work
from sapwood.srt.params import Constraint, SamplingParams
from sapwood.srt.server.demands import Demands
from sapwood.srt.server.outcome import Outcome

LONG = 32
SHARED = (3, 17, 63, 64, 65, 130, 200, 256, 400, 600)
ECHO: dict[str, Any] = {"logprobs": 5, "logprob_start": 0, "logprob_ids": [5, 17, 300]}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
BIASES: dict[str, Any] = {"logit_bias": {5: 4.0, 17: -100.0, 300: 3.5}, "min_tokens": 4}

PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 1234},
    "n = 2": {"seed": 99, "n": 2},
    "stop string": {"seed": 5, "stop": ["e", " the"]},
}
NEW: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0.7, "seed": 11, **PENALTIES},
    "logit_bias": {"seed": 3, "stop_token_ids": [5, 300], **BIASES},
    "n = 4": {"seed": 7, "n": 4, "top_p": 0.95, "top_k": 50},
    "echo": {"temperature": 0.0, **ECHO},
    "prompt only": {"max_tokens": 0, **ECHO, "logprob_start": 20},
    "all of it": {"seed": 8, "n": 4, "min_p": 0.02, **PENALTIES, **BIASES, **ECHO},
    "last state": {"max_tokens": 0, "pooling": "last", "logprobs": None},
    "mean state": {"max_tokens": 0, "pooling": "mean", "logprobs": None},
}
DOCUMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["animal", "plant", "mineral"]},
        "counts": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps(DOCUMENT), "json_schema")
CONSTRAINED: dict[str, dict[str, Any]] = {
    "json": {"temperature": 0.0, "max_tokens": 48, "constraint": JSON},
    "json drawn": {"seed": 21, "max_tokens": 48, "constraint": JSON},
    "json n = 3": {"seed": 4, "n": 3, "max_tokens": 48, "min_tokens": 30, **PENALTIES, "constraint": JSON},
    "regex": {
        "seed": 6, "ignore_eos": True, "max_tokens": 24,
        "constraint": Constraint("regex", "(the|a) [a-z]{2,9} (is|was) [a-z ]{3,20}[.]", "regex"),
    },
}  # fmt: skip
SAMPLINGS = {**PLAIN, **NEW, **CONSTRAINED}

RUNS: dict[str, dict[str, Any]] = {
    "cache off, 16 at a time": {"disable_radix_cache": True},
    "chunks of 16": {"chunked_prefill_size": 16},
    "chunks of 64": {"chunked_prefill_size": 64},
    "chunks of 512": {"chunked_prefill_size": 512},
    "overlap off": {"disable_overlap_schedule": True},
}
DRAFTS = ("auto", "ngram", "radix")
TINY = "tiny pool, all at once"


def prompts(count: int, vocab: int) -> list[list[int]]:
    """`count` prompts, mixed, in families of five and more; a family shares a prefix, ends are their own."""
    rng = random.Random(7)
    families = min(len(SHARED), max(2, count // 5))
    lengths = SHARED[:: -(len(SHARED) // families)][:families]
    bases = [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
    made = [
        [*bases[i % len(bases)], *(rng.randrange(3, vocab) for _ in range(rng.randint(1, 24)))]
        for i in range(count)
    ]
    rng.shuffle(made)
    return made


def answer(outcome: Outcome) -> bytes:
    """What must not change: all but times and what the cache held. Floats are kept to the bit."""
    choices = [
        (c.ids, c.text, c.finish and msgspec.structs.replace(c.finish, drafted=0, accepted=0), c.logprobs)
        for c in outcome.choices
    ]
    return msgspec.msgpack.encode((choices, outcome.prompt_logprobs, outcome.pooled))


class Asked(NamedTuple):
    """How prompts are answered."""

    params: SamplingParams
    constraint: Constraint | None


class Runtime:
    """A running model, asked in one way or another."""

    def __init__(self, runtime: OfflineRuntime) -> None:
        self._runtime = runtime

    def ask(self, batch: Sequence[list[int]], asked: Asked) -> list[bytes]:
        """All prompts side by side."""
        return self.ask_mixed([(prompt, asked) for prompt in batch])

    def ask_mixed(self, jobs: Sequence[tuple[list[int], Asked]]) -> list[bytes]:
        work = [
            Work(IdsPrompt(pack(prompt)), asked.params, demands=Demands(asked.constraint))
            for prompt, asked in jobs
        ]
        return [answer(outcome) for outcome in self._runtime.outcomes(work, progress=False)]

    def ask_alone(self, batch: Sequence[list[int]], asked: Asked, *, cold: bool) -> list[bytes]:
        """One prompt after the other; `cold`: each on an empty cache."""
        answers = []
        for prompt in batch:
            if cold:
                self.flush()
            answers += self.ask([prompt], asked)
        return answers

    def flush(self) -> None:
        self._runtime.run(self._runtime.service.client.ask("flush"))

    def counted(self, what: str) -> int:
        """One of the scheduler's totals; the pool invariant is checked too."""
        count: int = self._runtime.run(self._runtime.service.client.ask("check"))[what]
        return count


@contextmanager
def running(**options: Any) -> Iterator[Runtime]:
    chosen = config.make(log_level="warning", **{"max_running_requests": 16, **options})
    runtime = OfflineRuntime(chosen, sources.resolve(chosen))
    try:
        yield Runtime(runtime)
    finally:
        runtime.close()


class Table:
    """What was compared, printed line by line."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def compare(self, run: str, name: str, want: list[bytes], got: list[bytes], **more: Any) -> None:
        differ = sum(a != b for a, b in zip(want, got, strict=True))
        self.rows.append({"run": run, "sampling": name, "prompts": len(want), "differ": differ, **more})
        print(f"{run:<26} {name:<12} {len(want):>4} prompts  {differ:>3} differ  {more or ''}", flush=True)

    def total(self, column: str) -> int:
        return sum(row.get(column, 0) for row in self.rows)


class Comparison:
    """The samplings of a model on one set of prompts; `short` answers, and `long` ones for the tiny pool."""

    def __init__(
        self, samplings: Mapping[str, dict[str, Any]], batch: list[list[int]], max_tokens: int
    ) -> None:
        def params(least: int) -> dict[str, Asked]:
            common = {"max_tokens": max(max_tokens, least), "logprobs": 0}
            every = {name: {**common, **given} for name, given in samplings.items()}
            constraints = {name: given.pop("constraint", None) for name, given in every.items()}
            return {name: Asked(SamplingParams(**given), constraints[name]) for name, given in every.items()}

        self.short, self.long = params(0), params(LONG)
        self.batch, self.few = batch, batch[: max(len(batch) // 4, min(len(batch), 10))]
        self.longest = max(map(len, batch))
        self.table = Table()
        self._alone: dict[str, list[bytes]] = {}
        self._alone_long: dict[str, list[bytes]] = {}

    def baseline(self, runtime: Runtime) -> None:
        """Every prompt alone, cold and then warm, and all of them on a full cache."""
        for name, params in self.short.items():
            cold = self._alone[name] = runtime.ask_alone(self.batch, params, cold=True)
            print(f"baseline {name}: alone, on an empty cache", flush=True)
            runtime.flush()
            warm = runtime.ask_alone(self.batch, params, cold=False)
            self.table.compare("one at a time, cache on", name, cold, warm)
            self.table.compare("16 at a time, all cached", name, cold, runtime.ask(self.batch, params))
            self._alone_long[name] = runtime.ask_alone(self.few, self.long[name], cold=True)

    def run(self, name: str, runtime: Runtime) -> None:
        """Each sampling on an empty cache, so that its prompts are really computed in this way."""
        for sampling, params in self.short.items():
            runtime.flush()
            before = runtime.counted("prompt_tokens_computed")
            got = runtime.ask(self.batch, params)
            computed = runtime.counted("prompt_tokens_computed") - before
            self.table.compare(name, sampling, self._alone[sampling], got, computed=computed)

    def run_drafts(self, name: str, runtime: Runtime) -> None:
        """Each sampling cold, then again, when the cache has what was said: one at a time, side by side."""
        for sampling, params in self.short.items():
            runtime.flush()
            before = [runtime.counted(what) for what in ("drafted_tokens", "accepted_tokens")]
            want = self._alone[sampling]
            self.table.compare(name + ", cold", sampling, want, runtime.ask(self.batch, params))
            self.table.compare(
                name + ", alone", sampling, want, runtime.ask_alone(self.batch, params, cold=False)
            )
            got = runtime.ask(self.batch, params)
            after = [runtime.counted(what) for what in ("drafted_tokens", "accepted_tokens")]
            drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
            self.table.compare(name + ", warm", sampling, want, got, drafted=drafted, accepted=accepted)

    def run_tiny(self, runtime: Runtime) -> None:
        """Answers longer than what is kept for them at admission, of all samplings side by side."""
        jobs = [(prompt, params) for prompt in self.few for params in self.long.values()]
        answers = runtime.ask_mixed(jobs)
        retracted = runtime.counted("retracted")
        for i, name in enumerate(self.long):
            got = answers[i :: len(self.long)]
            more = {"retracted": retracted} if i == 0 else {}
            self.table.compare(TINY, name, self._alone_long[name], got, **more)

    @property
    def tiny_pool(self) -> int:
        """Slots for the longest request, and little else."""
        return self.longest + 2 * LONG


def chosen_samplings(names: str) -> dict[str, dict[str, Any]]:
    """The samplings of a group, or those named; SystemExit if there is no such one."""
    groups = {"all": SAMPLINGS, "plain": PLAIN, "new": NEW, "constrained": CONSTRAINED}
    if names in groups:
        return groups[names]
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in SAMPLINGS]:
        raise SystemExit(f"no sampling {unknown[0]!r}: there are {', '.join([*groups, *SAMPLINGS])}")
    return {name: SAMPLINGS[name] for name in wanted}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--samplings", default="all")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--drafts", nargs="*", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    samplings = chosen_samplings(args.samplings)
    common = {"model_path": args.model, "context_length": args.context_length}
    begin = time.time()
    source = sources.resolve(config.make(**common))
    comparison = Comparison(samplings, prompts(args.prompts, source.vocab_size), args.max_tokens)
    with running(**common, speculative_algorithm="none") as runtime:
        comparison.baseline(runtime)
    for algorithm in args.drafts:
        with running(**common, speculative_algorithm=algorithm) as runtime:
            comparison.run_drafts(f"drafts: {algorithm}", runtime)
    for name, options in RUNS.items():
        with running(**common, **options) as runtime:
            comparison.run(name, runtime)
    with running(**common, max_total_tokens=comparison.tiny_pool, chunked_prefill_size=64) as runtime:
        comparison.run_tiny(runtime)
    table, seconds = comparison.table, time.time() - begin
    bad, retracted = table.total("differ"), table.total("retracted")
    print(f"{source.name}: {bad} differences; longest prompt {comparison.longest} tokens; {seconds:.0f} s")
    if args.json:
        result = {"sapwood": __version__, "model": source.name, "architecture": source.architecture}
        result |= {"seconds": round(seconds), "differences": bad, "retracted": retracted, "rows": table.rows}
        args.json.write_text(json.dumps(result, indent=1))
    if not retracted:
        print("no row was retracted: the tiny pool is not tiny enough to prove anything")
    return 1 if bad or not retracted else 0


if __name__ == "__main__":
    raise SystemExit(main())
