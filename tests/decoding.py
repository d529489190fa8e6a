"""Models run without a server: one sequence alone, or several through the worker's runner in mixed steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.ops.attention import attend
from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.messages import RowStart, Step
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.weights import Storage
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.cpu import make_runner
from sapwood.srt.worker.fused import FusedForward
from tests.models import source_of


@dataclass
class Sequence:
    """One row in a pool of its own, or several: extends by some tokens and tells their logits.

    `fused`: as the worker does, with all layers in one call, not op by op.
    """

    decoder: Decoder[Any]
    room: int
    rows: int = 1
    fused: bool = False
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec, slots = self.decoder.spec, self.rows * self.room
        self.k, self.v = (
            [torch.zeros(slots, spec.kv_heads, spec.head_dim) for _ in range(spec.layers)] for _ in "kv"
        )
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(3))
        self.table = order.int().view(self.rows, self.room)
        self.lengths = [0] * self.rows
        self.forward = FusedForward(self.decoder, self, self.table) if self.fused else self._op_by_op

    def extend(self, *ids: list[int]) -> Tensor:
        """The logits after each of `ids`, which go to row 0, row 1, and so on."""
        parts = list(zip(self.lengths, map(len, ids), strict=True))
        positions = [torch.arange(start, start + count) for start, count in parts]
        batch = Batch(
            ids=torch.tensor([i for part in ids for i in part], dtype=torch.int32),
            positions=torch.cat(positions).int(),
            slots=torch.cat([self.table[row, at] for row, at in enumerate(positions)]),
            rows=torch.arange(self.rows, dtype=torch.int32),
            starts=torch.tensor(self.lengths, dtype=torch.int32),
            counts=torch.tensor([count for _, count in parts], dtype=torch.int32),
        )
        self.lengths = [start + count for start, count in parts]
        hidden = self.forward(batch)
        index = torch.arange(len(batch.ids), dtype=torch.int32, device=hidden.device)
        return self.decoder.logits(hidden, index).clone()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        (found,) = self.greedy_together([prompt], count)
        return found

    def greedy_together(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The continuations of all prompts, a row each: side by side, a step reads the weights once."""
        ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
        found = [[int(token)] for token in self.extend(*prompts)[ends].argmax(-1)]
        while len(found[0]) < count:
            last = self.extend(*(row[-1:] for row in found)).argmax(-1)
            for row, token in zip(found, last.tolist(), strict=True):
                row.append(token)
        return found

    def _op_by_op(self, batch: Batch) -> Tensor:
        return self.decoder.forward(batch, self, self._attend)

    def _attend(self, layer: int, qkv: Tensor, batch: Batch, out: Tensor) -> None:
        spec = self.decoder.spec
        attend(
            qkv, self.k[layer], self.v[layer], self.table, batch.rows, batch.starts, batch.counts,
            spec.q_heads, spec.kv_heads, spec.head_dim, spec.scale, out, spec.window(layer),
        )  # fmt: skip


def decoder_of(path: Path, storage: Storage = "float32", **options: Any) -> Decoder[Any]:
    source = source_of(path, skip_tokenizer_init=True, **options)
    return Decoder(spec_of(source.config), open_weights(source), CpuOps(storage), source.context_length)


def greedy_in_mixed_steps(path: Path, prompts: list[list[int]], count: int, chunk: int) -> list[list[int]]:
    """The greedy continuations of all prompts, computed together: row i joins at step i, prompts come in
    chunks of `chunk` + i tokens, and decodes of the earlier rows share their steps."""
    slots = sum(len(p) for p in prompts) + count * len(prompts)
    config = make(
        model_path=str(path), max_total_tokens=slots, max_running_requests=len(prompts), num_threads=1
    )
    runner, _pool, _facts = make_runner(config, source_of(path, skip_tokenizer_init=True))
    free = iter(np.random.default_rng(0).permutation(slots).tolist())
    done = [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    number = 0
    while any(len(answer) < count for answer in answers):
        live = [i for i in range(min(number + 1, len(prompts))) if len(answers[i]) < count]
        parts = [[-1] if answers[i] else prompts[i][done[i] :][: chunk + i] for i in live]
        starts = [done[i] for i in live]
        for i, part in zip(live, parts, strict=True):
            done[i] += len(part)
        samples = [int(done[i] >= len(prompts[i])) for i in live]
        joins = [number] if number < len(prompts) else []
        step = Step(
            number=number,
            released=b"",
            admitted=[RowStart(i, b"", params, 0, 0, len(prompts[i])) for i in joins],
            rows=messages.pack(live),
            starts=messages.pack(starts),
            counts=messages.pack([len(p) for p in parts]),
            ids=messages.pack(np.concatenate(parts)),
            slots=messages.pack([next(free) for p in parts for _ in p]),
            samples=messages.pack(samples),
        )
        result = runner.run(step)
        assert not result.errors
        drawn = iter(messages.unpack(result.ids).tolist())
        for i, sampled in zip(live, samples, strict=True):
            answers[i] += [next(drawn)] if sampled else []
        number += 1
    return answers


def reference_of(path: Path) -> Any:
    """transformers on the same folder, in float32 with plain attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.train(False)


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of the answer is the most likely one after what comes before it."""
    logits = reference_logits(model, prompt + answer[:-1])
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
