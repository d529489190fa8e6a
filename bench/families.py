"""Tiny random models of every family and position encoding: greedy tokens of Sapwood and of transformers."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from sapwood import Engine
from tests.decoding import reference_logits, reference_of
from tests.models import VOCAB
from tests.variants import VARIANTS, write

LENGTHS = (1, 2, 5, 17, 24, 25, 40, 63, 64, 65, 100, 150)
"""Prompt lengths in tokens: below, at and above the windows, the tiles of attention, and a chunk."""
CHUNK = 48


def compare_all(tokens: int) -> list[dict[str, Any]]:
    """One row a variant: how many prompts give the same `tokens` greedy ids, and where the others part."""
    rows = []
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            row = {"variant": name, **_compare(write(Path(folder), name), tokens)}
        parted = ", ".join(f"prompt {p['prompt']} at {p['at']}, gap {p['gap']:.6f}" for p in row["parted"])
        print(f"{row['equal']:>3} of {row['prompts']} equal  {name}  {parted}", flush=True)
        rows.append(row)
    return rows


def _compare(folder: Path, tokens: int) -> dict[str, Any]:
    rng = random.Random(11)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    options = {"skip_tokenizer_init": True, "chunked_prefill_size": CHUNK, "log_level": "warning"}
    with Engine(model_path=str(folder), **options) as engine:
        results = engine.generate(input_ids=prompts, sampling_params=params, progress=False)
    model, parted = reference_of(folder), []
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        found = _parts(model, prompt, result["output_ids"], tokens)
        if found is not None:
            parted.append({"prompt": index, **found})
    return {"prompts": len(prompts), "equal": len(prompts) - len(parted), "parted": parted}


def _parts(model: Any, prompt: list[int], answer: list[int], tokens: int) -> dict[str, Any] | None:
    """The first place where the answer is not the reference's greedy one, with the gap between its two best
    logits there; None if there is none. What comes before is equal, so one pass tells all."""
    best = reference_logits(model, prompt + answer[:-1])[len(prompt) - 1 :].topk(2, dim=-1)
    same = best.indices[:, 0] == torch.tensor(answer)
    if len(answer) == tokens and bool(same.all()):
        return None
    at = int((~same).int().argmax()) if not bool(same.all()) else len(answer)
    gap = best.values[min(at, len(answer) - 1)]
    return {"at": at, "gap": float(gap[0] - gap[1])}
