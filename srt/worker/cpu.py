"""Puts the runner of a CPU together: weights as they are stored, the exact kernels, slots in free memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sapwood.kernels import machine, native
from sapwood.kernels.ops.gemm import PackedWeight
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError
from sapwood.srt.loader.kept_weights import KeptWeights
from sapwood.srt.loader.packaged import cache_folder
from sapwood.srt.loader.weights import Weights, open_weights
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.parallel import Alone, Group
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.weights import Storage
from sapwood.srt.worker.attention.kernels import OpByOp
from sapwood.srt.worker.choice import why_cpu
from sapwood.srt.worker.constraints import Constraints
from sapwood.srt.worker.follower import Follower
from sapwood.srt.worker.fused import FusedForward
from sapwood.srt.worker.grammars import Grammars, make_grammars
from sapwood.srt.worker.kv_pool import KvPool, choose_dtype, choose_slots, slot_bytes
from sapwood.srt.worker.runner import Runner
from sapwood.srt.worker.token_pool import TokenPool

_log = logging.getLogger("sapwood")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, or a rank's part of it, and its pools; the facts say what was chosen, and why."""

    decoder: Decoder[PackedWeight]
    forward: Callable[[Batch], torch.Tensor]
    pool: KvPool
    tokens: TokenPool
    threads: int
    facts: dict[str, str]


def make_runner(
    config: Config, source: ModelSource, grammars: Grammars | None = None, group: Group | None = None
) -> tuple[Runner, KvPool, dict[str, str]]:
    """Load the model and make its pool; the facts say what was chosen, and why. Rows may have `grammars`.
    Of a `group` it is rank 0."""
    group = group or Alone()
    loaded = load(config, source, group)
    constraints = Constraints(grammars or make_grammars(source), loaded.threads)
    runner = Runner(loaded.decoder, loaded.forward, loaded.tokens, constraints, group)
    return runner, loaded.pool, loaded.facts


def make_follower(config: Config, source: ModelSource, group: Group) -> tuple[Follower, KvPool]:
    """What every other rank of the group has."""
    loaded = load(config, source, group)
    return Follower(loaded.decoder, loaded.forward, loaded.tokens, group), loaded.pool


def load(config: Config, source: ModelSource, group: Group) -> Loaded:
    """The group's ranks do this together: their pools have equally many slots."""
    config = config.on("cpu")
    threads, why_threads = choose_threads(config, group.size)
    try:
        isa = native.load(config.cpu_isa, threads)
    except RuntimeError as e:
        raise ConfigError(str(e), param="cpu_isa") from None
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    decoder, weights, why_stored, mapped = _load(config, source, group)
    spec = decoder.spec
    kv_dtype = choose_dtype(config.kv_cache_dtype, weights.formats)
    each = slot_bytes(spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
    group.smallest(0)  # no rank looks at the free memory before all have their weights
    num_slots, why = choose_slots(config, source.context_length, each, mapped)
    num_slots = group.smallest(num_slots)
    pool = KvPool(num_slots, spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
    tokens = TokenPool(
        config.rows,
        min(source.context_length, num_slots),
        spec.vocab,
        spec.hidden,
        source.eos_ids,
    )
    backend = "reference" if config.attention_backend == "reference" else "cpu"
    slot_table = torch.from_numpy(tokens.slot_table)
    # One call computes a whole model, not a part that waits for others after each product.
    fused = backend == "cpu" and group.size == 1
    forward: Callable[[Batch], torch.Tensor] = (
        FusedForward(decoder, pool, slot_table) if fused else OpByOp(decoder, pool, slot_table, backend)
    )
    facts = {
        "device": _device(config, group),
        "weights": f"{weights.summary()}, {why_stored}",
        "kernels": f"{isa}, {threads} threads ({why_threads})",
        "kv pool": f"{num_slots} slots of {each} bytes ({kv_dtype}), {why}".replace("torch.", ""),
        "attention": backend,
    }
    if group.size > 1:
        facts["ranks"] = f"{group.size}, over gloo; weights, threads and slots are those of rank 0"
    return Loaded(decoder, forward, pool, tokens, threads, facts)


def choose_threads(config: Config, ranks: int) -> tuple[int, str]:
    """(threads of this process, why)"""
    threads, why = machine.choose_threads()
    if ranks > 1:
        threads, why = max(1, threads // ranks), f"{why}, shared by {ranks} ranks"
    if config.num_threads is not None:
        return config.num_threads, f"as asked; chosen would be {threads}"
    return threads, why


def _device(config: Config, group: Group) -> str:
    """What runs the model, and why; a torch for GPUs that sees none is warned of."""
    why = why_cpu(config)
    if group.rank == 0 and config.device == "auto" and torch.version.cuda is not None:
        _log.warning("no GPU is used: %s", why)
    return f"cpu ({why})"


def _load(
    config: Config, source: ModelSource, group: Group
) -> tuple[Decoder[PackedWeight], Weights, str, int]:
    """The model, its weights, why these are stored as they are, and how many bytes of them are mapped."""
    storage, why = _storage(config)
    kept = None
    if config.weight_cache and source.files:
        # Each rank has a file of its own.
        part = f" of rank {group.rank} of {group.size}" if group.size > 1 else ""
        kept = KeptWeights(cache_folder() / "weights", source.files, storage + part)
        why += ", mapped from the cache" if kept.is_found else ""
    weights = open_weights(source, kept, quiet=group.rank > 0)
    ops = CpuOps(storage, source.vocab_size)
    decoder = Decoder(spec_of(source.config), weights, ops, source.context_length, group)
    if kept is not None:
        kept.save()
    return decoder, weights, why, kept.nbytes if kept else 0


def _storage(config: Config) -> tuple[Storage, str]:
    if config.quantization == "w8" or config.quantization == "w4":
        return config.quantization, f"--quantization {config.quantization}"
    if config.dtype == "float32" or config.dtype == "float16":
        return config.dtype, f"--dtype {config.dtype}"
    return "stored", "as stored"
