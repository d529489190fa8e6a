"""Is a way of storing and computing good enough? The product's CPU engine beside Hugging Face in float32.

    python -m bench.quality [MODEL] [--text FILE ...] [--choices FILE ...] [--dtype stored,float32]
                            [--kv-cache-dtype auto] [--tokens 4096] [--chunk 512] [--items 200] [--json FILE]

Both sides have the same (dequantised) weights; ours go through the worker's decoder, kernels and KV pool.
Over chunks of real text: perplexity and its ratio, greedy agreement (the share of positions, the text before
them given, where the most likely token is the reference's), logit error relative to the reference's largest
logit, and KL divergence. Over questions with choices: accuracy, and the paired difference to the reference.
All shares and differences come with 95 % intervals. `--text` takes plain text or JSON lines (`text`; `turns`;
`question` with `answer`), `--choices` JSON lines of `context`, `choices` and `answer`, an index; or the files
of GSM8K or MT-bench, of which questions with choices are made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import transformers
from torch import Tensor

from bench.peers import transformers_model
from bench.quality_data import Encode, Item, chunks, encoded, items_of, text_of
from bench.quality_stats import Divergence, choice_summary
from sapwood import __version__
from sapwood.kernels import machine, native
from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader.sources import resolve
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.weights import Storage
from sapwood.srt.worker.fused import FusedForward
from sapwood.srt.worker.kv_pool import DTYPES, KvPool, choose_dtype

STORAGES = ("stored", "float32", "float16", "w8", "w4")
KV_DTYPES = ("auto", *DTYPES)


@dataclass(frozen=True)
class Mode:
    """One way of storing weights, and K and V; `kv` "auto" is what the worker takes by itself."""

    storage: Storage
    kv: str = "auto"

    @property
    def name(self) -> str:
        return self.storage if self.kv == "auto" else f"{self.storage}, kv {self.kv}"


class Model(Protocol):
    """What is compared."""

    def logits(self, ids: list[int]) -> Tensor:
        """After each of `ids`, a text of its own: float32 [n, vocab], valid until the next call."""

    def score(self, context: list[int], choices: list[list[int]]) -> list[float]:
        """The mean log-probability of each choice's tokens after the context."""


class Ours:
    """The engine's forward pass over a KV pool, without processes: rows share their context's slots."""

    def __init__(self, source: ModelSource, mode: Mode, room: int, rows: int) -> None:
        spec, weights = spec_of(source.config), open_weights(source)
        self._decoder, self._room = Decoder(spec, weights, CpuOps(mode.storage), source.context_length), room
        self.kv_dtype = choose_dtype(mode.kv, weights.formats)
        pool = KvPool(rows * room, spec.layers, spec.kv_heads, spec.head_dim, self.kv_dtype)
        self._table = torch.arange(rows * room, dtype=torch.int32).view(rows, room)
        self._forward = FusedForward(self._decoder, pool, self._table)

    def logits(self, ids: list[int]) -> Tensor:
        return self._extend(0, [ids])

    def score(self, context: list[int], choices: list[list[int]]) -> list[float]:
        # The last token of the context goes with each choice: its logits are of the choice's first token.
        shared = len(context) - 1
        if shared:
            self._extend(0, [context[:shared]])
        own = self._table.clone()
        self._table[:, :shared] = own[0, :shared]
        parts = [[context[-1], *choice] for choice in choices]
        logits, scores = self._extend(shared, parts), []
        for choice in choices:
            scores.append(_mean_logprob(logits[: len(choice)], choice))
            logits = logits[len(choice) + 1 :]
        self._table.copy_(own)
        return scores

    def _extend(self, start: int, parts: Sequence[list[int]]) -> Tensor:
        """All rows go on from `start`, each by its part: the logits after each token, row after row."""
        longest = start + max(map(len, parts))
        if longest > self._room:
            raise SystemExit(f"a text has {longest} tokens, there is room for {self._room}: see --room")
        rows = torch.arange(len(parts), dtype=torch.int32)
        positions = [torch.arange(start, start + len(part), dtype=torch.int32) for part in parts]
        batch = Batch(
            ids=torch.tensor(list(itertools.chain.from_iterable(parts)), dtype=torch.int32),
            positions=torch.cat(positions),
            slots=torch.cat([self._table[row, at] for row, at in enumerate(positions)]),
            rows=rows,
            starts=torch.full((len(parts),), start, dtype=torch.int32),
            counts=torch.tensor([len(part) for part in parts], dtype=torch.int32),
        )
        return self._decoder.logits(self._forward(batch), torch.arange(len(batch.ids), dtype=torch.int32))


class Reference:
    """Hugging Face transformers in float32."""

    def __init__(self, source: ModelSource) -> None:
        self._model = transformers_model(source)

    def logits(self, ids: list[int]) -> Tensor:
        return cast(Tensor, self._model(torch.tensor([ids]), use_cache=False).logits[0])

    def score(self, context: list[int], choices: list[list[int]]) -> list[float]:
        # Whole sequences, without a cache: what follows a row's last token cannot be seen by it.
        longest = max(map(len, choices))
        padded = [[*context, *choice, *[0] * (longest - len(choice))] for choice in choices]
        logits = self._model(torch.tensor(padded), use_cache=False, logits_to_keep=longest + 1).logits
        return [_mean_logprob(rows[: len(c)], c) for rows, c in zip(logits, choices, strict=True)]


def _mean_logprob(logits: Tensor, ids: list[int]) -> float:
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
    return chosen.mean().item()


def compare_texts(
    reference: Model, modes: dict[str, Model], texts: Sequence[list[int]]
) -> dict[str, dict[str, Any]]:
    """What `Divergence.summary` says of each mode."""
    sums = {name: Divergence() for name in modes}
    for ids in texts:
        want = reference.logits(ids)
        for name, model in modes.items():
            sums[name].add(ids, want, model.logits(ids))
    return {name: found.summary() for name, found in sums.items()}


def compare_choices(
    reference: Model, modes: dict[str, Model], items: Sequence[Item], encode: Encode
) -> dict[str, dict[str, Any]]:
    """What `choice_summary` says of each mode."""
    picked: dict[str, list[int]] = {name: [] for name in ("", *modes)}
    for item in items:
        context, choices = encoded(item, encode)
        for name, model in (("", reference), *modes.items()):
            scores = model.score(context, choices)
            picked[name].append(scores.index(max(scores)))
    right, options = [item.right for item in items], len(items[0].choices)
    return {name: choice_summary(picked[name], picked[""], right, options) for name in modes}


def show_texts(name: str, row: dict[str, Any]) -> None:
    low, high = row["perplexity_ratio_interval"]
    worst, best = row["agreement_interval"]
    print(
        f"{name:<16} perplexity {row['perplexity']:.4f} ({row['perplexity_reference']:.4f} x"
        f" {row['perplexity_ratio']:.5f} [{low:.5f}, {high:.5f}])  greedy {row['agreement']:.2%}"
        f" [{worst:.2%}, {best:.2%}] of {row['positions']}  logit error max {row['error_max']:.1e}"
        f" rms {row['error_rms']:.1e}  KL {row['kl']:.1e}"
    )


def show_choices(name: str, row: dict[str, Any]) -> None:
    low, high = row["accuracy_interval"]
    less, more = row["difference_interval"]
    print(
        f"{name:<16} {row['accuracy']:.1%} right [{low:.1%}, {high:.1%}] of {row['items']} (chance"
        f" {row['chance']:.0%}), reference {row['accuracy_reference']:.1%}, difference"
        f" {100 * row['difference']:+.1f} [{100 * less:+.1f}, {100 * more:+.1f}] points,"
        f" {row['same_choice']:.1%} picked alike"
    )


def chosen_modes(dtypes: str, kv_dtypes: str) -> list[Mode]:
    """Each storage with each of K and V; SystemExit for a name that is neither."""
    wanted = [
        (dtypes.split(","), STORAGES, "--dtype"),
        (kv_dtypes.split(","), KV_DTYPES, "--kv-cache-dtype"),
    ]
    for names, known, flag in wanted:
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"{flag}: no {unknown[0]!r}: there are {', '.join(known)}")
    return [Mode(cast(Storage, d), c) for d in wanted[0][0] for c in wanted[1][0]]


def tokenizer_of(source: ModelSource) -> Encode:
    from tokenizers import Tokenizer

    assert source.tokenizer_file is not None
    tokenizer = Tokenizer.from_file(source.tokenizer_file)
    return lambda text: tokenizer.encode(text).ids


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--choices", type=Path, nargs="+", default=[])
    parser.add_argument("--dtype", default="stored")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=4096, help="of text, in all")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of text that are one sequence")
    parser.add_argument("--items", type=int, default=200, help="questions at most, of each file")
    parser.add_argument("--room", type=int, default=2048, help="tokens of the longest question")
    parser.add_argument("--threads", type=int, default=machine.choose_threads()[0])
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not args.text and not args.choices:
        parser.error("nothing to compare on: give --text, --choices or both")
    if args.chunk < 2 or args.tokens < args.chunk or args.items < 1:
        parser.error("--chunk takes at least 2 tokens, --tokens a chunk, --items 1")
    return args


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    modes = chosen_modes(args.dtype, args.kv_cache_dtype)
    source = resolve(make(model_path=args.model))
    encode = tokenizer_of(source)
    isa = native.load(args.isa, args.threads)
    torch.set_num_threads(args.threads)
    wanted = args.tokens // args.chunk if args.text else 0
    texts = chunks([encode(text_of(path)) for path in args.text], args.chunk, wanted)
    sets = {path.name: items_of(path, args.items) for path in args.choices}
    rows = max((len(item.choices) for items in sets.values() for item in items), default=1)
    reference = Reference(source)
    ours: dict[str, Model] = {m.name: Ours(source, m, max(args.room, args.chunk), rows) for m in modes}
    result: dict[str, Any] = {"model": source.name, "sapwood": __version__, "torch": torch.__version__}
    result |= {"transformers": transformers.__version__, "isa": isa, "chunk": args.chunk}
    print(f"{source.name} beside Hugging Face float32, {isa}, 95 % intervals in brackets")
    begin = time.monotonic()
    if texts:
        result["text"] = compare_texts(reference, ours, texts)
        for name, row in result["text"].items():
            show_texts(name, row)
    for file, items in sets.items():
        found = result.setdefault("choices", {})[file] = compare_choices(reference, ours, items, encode)
        print(file)
        for name, row in found.items():
            show_choices(name, row)
    print(f"{time.monotonic() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
