"""Does Sapwood say what Hugging Face transformers says? Greedy tokens on the same weights in float32.

    python -m bench.reference [--questions FILE | --completions] [--prompts 20] [--max-tokens 64]
                              [--json FILE] [MODEL]
    python -m bench.reference --families [--max-tokens 20] [--json FILE]

`--questions` is a JSON-lines file whose rows have `turns` (MT-bench's form); without it a few built-in
questions are asked, or with `--completions` (a base model's only way) built-in beginnings of texts are
continued. `--families` compares tiny random models of every family, position encoding and window instead.
Where an answer parts from the reference, the gap between the reference's two best logits is shown: a gap near
float32's rounding is a tie, anything else is an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.families import compare_all
from bench.peers import chat_ids, transformers_model
from sapwood import Engine, __version__
from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader.sources import resolve

BUILT_IN = [
    "What is the capital of France?",
    "Write a short poem about a river.",
    "Explain why the sky is blue.",
    "List three prime numbers and say why each is prime.",
]

BEGINNINGS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
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


def encoded(source: ModelSource, texts: list[str], chat: bool) -> list[list[int]]:
    """Prompt ids: of a chat of one message each, or of the text itself, with what the tokenizer adds."""
    if chat:
        return [chat_ids(source, [{"role": "user", "content": text}]) for text in texts]
    from tokenizers import Tokenizer

    assert source.tokenizer_file is not None
    tokenizer = Tokenizer.from_file(source.tokenizer_file)
    return [tokenizer.encode(text).ids for text in texts]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a prompt of one real model."""
    source = resolve(make(model_path=args.model))
    chat = not args.completions
    asked = questions(args.questions, args.prompts) if chat else BEGINNINGS[: args.prompts]
    batch = encoded(source, asked, chat)
    with Engine(model_path=args.model, log_level="warning") as engine:
        params = {"temperature": 0.0, "max_new_tokens": args.max_tokens}
        answers = engine.generate(input_ids=batch, sampling_params=params, progress=False)
    model = transformers_model(source, attention="eager")
    rows = []
    for question, ids, answer in zip(asked, batch, answers, strict=True):
        want, gaps = reference(model, ids, args.max_tokens, source.eos_ids)
        got = answer["output_ids"]
        part = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
        if part is None and len(want) != len(got):
            part = min(len(want), len(got))
        gap = None if part is None else gaps[min(part, len(gaps) - 1)]
        rows.append(
            {"question": question, "tokens": len(got), "parts_at": part, "gap": gap, "text": answer["text"]}
        )
        verdict = "equal" if part is None else f"parts at {part}, gap {gap:.6f}"
        print(f"{len(got):>3} tokens  {verdict}  {question[:60]!r}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--completions", action="store_true")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.max_tokens = args.max_tokens or (20 if args.families else 64)
    if args.families:
        rows = compare_all(args.max_tokens)
        equal, total = sum(row["equal"] for row in rows), sum(row["prompts"] for row in rows)
    else:
        rows = compare(args)
        equal, total = sum(row["parts_at"] is None for row in rows), len(rows)
    versions = {
        "sapwood": __version__, "transformers": transformers.__version__, "torch": torch.__version__
    }  # fmt: skip
    print(f"{equal} of {total} equal", versions)
    if args.json:
        told = {"model": Path(args.model).name if args.model else None, **versions}
        args.json.write_text(json.dumps({**told, "equal": equal, "of": total, "rows": rows}, indent=1))
    return 0 if equal == total else 1


if __name__ == "__main__":
    raise SystemExit(main())
