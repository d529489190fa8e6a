"""Does Sapwood say what Hugging Face transformers says? Greedy tokens on the same weights in float32.

    python -m bench.reference [--questions FILE] [--prompts 20] [--max-tokens 64] [--json FILE] [MODEL]

`--questions` is a JSON-lines file whose rows have `turns` (MT-bench's form); without it a few built-in
questions are asked. Where an answer parts from the reference, the gap between the reference's two best
logits is shown: a gap near float32's rounding is a tie, anything else is an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.peers import chat_ids, transformers_model
from sapwood import Engine, __version__
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve

BUILT_IN = [
    "What is the capital of France?",
    "Write a short poem about a river.",
    "Explain why the sky is blue.",
    "List three prime numbers and say why each is prime.",
]


def questions(path: Path | None, count: int) -> list[str]:
    if path is None:
        return BUILT_IN[:count]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    step = max(1, len(rows) // count)
    return [row["turns"][0] for row in rows[::step]][:count]


def reference(model: Any, ids: list[int], count: int, eos: list[int]) -> tuple[list[int], list[float]]:
    """Greedy continuation, and at each position the gap between the two best logits."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=eos, pad_token_id=eos[0]
        )[0].tolist()
        best = model(torch.tensor([out])).logits[0, len(ids) - 1 : -1].topk(2, dim=-1).values
    return out[len(ids) :], (best[:, 0] - best[:, 1]).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = questions(args.questions, args.prompts)
    source = resolve(make(model_path=args.model))
    with Engine(model_path=args.model, log_level="warning") as engine:
        params = {"temperature": 0.0, "max_new_tokens": args.max_tokens}
        batch = [chat_ids(source, [{"role": "user", "content": question}]) for question in asked]
        answers = engine.generate(input_ids=batch, sampling_params=params, progress=False)
    model = transformers_model(source)
    rows = []
    for question, ids, answer in zip(asked, batch, answers, strict=True):
        want, gaps = reference(model, ids, args.max_tokens, source.eos_ids)
        got = answer["output_ids"]
        part = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
        if part is None and len(want) != len(got):
            part = min(len(want), len(got))
        gap = None if part is None else gaps[part]
        rows.append({"question": question, "tokens": len(got), "parts_at": part, "gap": gap})
        verdict = "equal" if part is None else f"parts at {part}, gap {gap:.6f}"
        print(f"{len(got):>3} tokens  {verdict}  {question[:60]!r}", flush=True)
    equal = sum(row["parts_at"] is None for row in rows)
    versions = {
        "sapwood": __version__, "transformers": transformers.__version__, "torch": torch.__version__
    }  # fmt: skip
    print(f"{equal} of {len(rows)} equal", versions)
    if args.json:
        args.json.write_text(json.dumps({**versions, "equal": equal, "rows": rows}, indent=1))
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
