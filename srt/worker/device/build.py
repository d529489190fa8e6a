"""Puts a device's runner together: weights, what is left of the memory as KV slots, lanes, warm-up."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sapwood.kernels.ops.device_sampling import MAX_VOCAB, WORKSPACE
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.parallel import Group, shard_of
from sapwood.srt.models.registry import spec_of
from sapwood.srt.worker.attention.flashinfer import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    attending_bytes,
    lane_bytes,
    require_supported,
)
from sapwood.srt.worker.attention.gathered import GATHERED_BYTES, GatheredAttention
from sapwood.srt.worker.choice import activations
from sapwood.srt.worker.constraints import Constraints
from sapwood.srt.worker.device.accelerator import Accelerator
from sapwood.srt.worker.device.columns import DeviceColumns
from sapwood.srt.worker.device.forward import DeviceForward, graph_sizes
from sapwood.srt.worker.device.lane import Lane, LaneAttention, Sizes
from sapwood.srt.worker.device.logprobs import DeviceFetch
from sapwood.srt.worker.device.memory import choose_slots, within_memory
from sapwood.srt.worker.device.pieces import MOST_LINES
from sapwood.srt.worker.device.runner import DeviceRunner, Parts
from sapwood.srt.worker.device.sampler import DeviceSampler
from sapwood.srt.worker.grammars import Grammars
from sapwood.srt.worker.kv_pool import DTYPES, KvPool, slot_bytes
from sapwood.srt.worker.reader import PromptReader
from sapwood.srt.worker.token_pool import TokenPool

_log = logging.getLogger("sapwood.worker")

LANES = 2
MOST_CAPTURED = 256
GATHER_BYTES = 24
"""For each slot that a step reads, while they are gathered: two columns of int64, one of int32, and room."""
GRAPH_BYTES = 16 * 2**20
"""A graph's own, about: the plan of its attention, and what its kernels need at launch."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a runner is put together: the device, the other ranks, and FlashInfer (or what stands for it) for
    attention and for the rest of a layer; None: plain torch."""

    accelerator: Accelerator
    group: Group
    attention: Any = None
    ops: Any = None


def make_device_runner(
    config: Config, source: ModelSource, site: Site, grammars: Grammars, threads: int
) -> tuple[DeviceRunner, KvPool, dict[str, str]]:
    """Load the model (or this rank's part) and make its pool; the facts say what was chosen, and why.

    Raises ConfigError naming what to change where the device's memory does not do.
    """
    config = config.on("cuda")
    torch.set_grad_enabled(False)
    if config.deterministic:  # nor may partial sums of a product be rounded to 16 bits
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    dtype, kv_dtype = _types(config, source, site)
    device = site.accelerator.device
    ops = DeviceOps(device, dtype, site.ops, "fp8" if config.quantization == "fp8" else "none")
    decoder = within_memory(
        "the weights",
        "use --quantization fp8 or more GPUs (--tensor-parallel-size)",
        lambda: Decoder(
            spec_of(source.config),
            open_weights(source, device=device, quiet=site.group.rank > 0),
            ops,
            source.context_length,
            site.group,
        ),
    )
    making = _Making(config, source, site, decoder, kv_dtype)
    num_slots, why = making.slots()
    pool = within_memory("the KV slots", "lower --mem-fraction-static", lambda: making.pool(num_slots))
    instead = "lower --mem-fraction-static, --max-total-tokens or --chunked-prefill-size"
    constraints = Constraints(grammars, threads)
    runner = within_memory("a step's buffers", instead, lambda: making.runner(pool, constraints))
    within_memory("a step's activations", instead, runner.warm_up)
    facts = {
        "device": _named(device),
        "weights": ops.summary(),
        "kv pool": f"{num_slots} slots of {making.slot_bytes} bytes ({_dtype(kv_dtype)}), {why}",
        "attention": "plain torch" if site.attention is None else f"flashinfer {_version(site.attention)}",
    }
    return runner, pool, facts


def _types(config: Config, source: ModelSource, site: Site) -> tuple[torch.dtype, torch.dtype]:
    """Those of activations and of K and V. Raises ConfigError for a model that a GPU cannot run with them."""
    dtype = activations(config, source.config)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    whole, group = spec_of(source.config), site.group
    if site.ops is not None:
        require_supported(shard_of(whole, group.rank, group.size).local(whole), dtype, kv_dtype)
    if whole.vocab > MAX_VOCAB:
        raise ConfigError(
            f"the model's vocabulary of {whole.vocab} tokens is beyond the {MAX_VOCAB} that are sampled from "
            "on a GPU: use --device cpu",
            param="device",
        )
    return dtype, kv_dtype


class _Making:
    """One model on one device, while its runner is made."""

    def __init__(
        self, config: Config, source: ModelSource, site: Site, decoder: Decoder[Any], kv_dtype: torch.dtype
    ) -> None:
        self._config, self._source, self._site = config, source, site
        self._decoder, self._kv_dtype = decoder, kv_dtype
        spec = decoder.spec
        self.slot_bytes = slot_bytes(spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
        size = config.chunk
        self._tokens = (source.context_length if size < 0 else size) + config.rows
        most = min(config.cuda_graph_max_bs or MOST_CAPTURED, config.rows)
        # Plain torch gathers what it reads: a captured step would keep the sizes of its first.
        without = config.disable_cuda_graph or site.attention is None
        self._graph_sizes = [] if without else graph_sizes(most)

    def slots(self) -> tuple[int, str]:
        """As many on every rank."""
        accelerator = self._site.accelerator
        if self._site.ops is not None:
            _log.info("running the largest step: FlashInfer compiles its norms, some seconds at every start")
        peak, kept = within_memory(
            "a step's activations",
            "lower --chunked-prefill-size or --max-running-requests",
            lambda: accelerator.peak(self._largest),
        )
        free, _total = accelerator.memory()
        graphs = LANES * (WORKSPACE_BYTES + len(self._graph_sizes) * GRAPH_BYTES)
        config = self._config
        # What it keeps, the buffers between the layers, is no longer free.
        activations = peak - kept + self._sampling_bytes() + self._table_bytes() + self._attention_bytes()
        slots, why = choose_slots(config, free, activations, graphs, self.slot_bytes)
        least = self._site.group.smallest(slots)
        return least, why if least == slots else f"{why}; another rank has room for no more"

    def _largest(self) -> None:
        """A step of as many tokens, and then as many lines of logits, as there can be."""
        zeros = torch.zeros(self._tokens, dtype=torch.int32, device=self._site.accelerator.device)
        pool = self.pool(1)
        batch = Batch(zeros, zeros, zeros, zeros[:1], zeros[:1], zeros[:1])
        hidden = self._decoder.forward(batch, pool, _attend_nothing)
        self._decoder.logits(hidden, zeros[: self._lines()])

    def _lines(self) -> int:
        """The most lines of logits that are drawn from at a time."""
        config = self._config
        # However short drafts are to be, what a grammar forces may be longer.
        drafts = 0 if config.speculative_algorithm == "none" else MOST_LINES
        return min(config.rows * (1 + drafts), self._tokens, MOST_LINES)

    def _sampling_bytes(self) -> int:
        """What sampling takes at most: room to sort, copies of lines that are changed, and what rows with
        penalties have had."""
        vocab, rows = self._decoder.spec.vocab, self._config.rows
        return WORKSPACE + vocab * (4 * self._lines() + 5 * rows)

    def _table_bytes(self) -> int:
        """The slot table, and what gathers a step's slots from it, at most; the pool's own size is not known
        yet, so it is as if each row had all positions of its own."""
        rows, positions = self._config.rows + 1, self._source.context_length + 1
        gathered = min(rows * positions, 4 * self._guess())
        kept = 2 if self._graph_sizes else 1  # graphs have a copy of their own
        return 4 * rows * positions + (4 * LANES * kept + GATHER_BYTES) * gathered

    def _attention_bytes(self) -> int:
        """What attention takes and keeps, which the measured step has none of."""
        if self._site.attention is None:
            return 2 * GATHERED_BYTES
        spec, deterministic = self._decoder.spec, self._config.deterministic
        kept = lane_bytes(spec, deterministic, graphs=bool(self._graph_sizes))
        return attending_bytes(spec, self._tokens, deterministic) + LANES * kept

    def _guess(self) -> int:
        """As many slots as there could be if nothing else took memory."""
        free, _total = self._site.accelerator.memory()
        return self._config.max_total_tokens or free // self.slot_bytes

    def pool(self, num_slots: int) -> KvPool:
        spec = self._decoder.spec
        device = self._site.accelerator.device
        return KvPool(num_slots, spec.layers, spec.kv_heads, spec.head_dim, self._kv_dtype, device)

    def runner(self, pool: KvPool, constraints: Constraints) -> DeviceRunner:
        config, source, site, decoder = self._config, self._source, self._site, self._decoder
        accelerator, capacity = site.accelerator, config.rows
        max_tokens = min(source.context_length, pool.num_slots)
        spec = decoder.spec
        tokens = TokenPool(capacity + 1, max_tokens, spec.vocab, spec.hidden, source.eos_ids)
        # The dummy row draws with filters, so that what they need is compiled.
        tokens.temperature[capacity], tokens.top_k[capacity], tokens.top_p[capacity] = 1.0, 5, 0.5
        columns = DeviceColumns(tokens, accelerator.device, accelerator.pinned)
        sizes = Sizes(
            tokens=self._tokens,
            rows=capacity,
            indices=min(capacity * (max_tokens + 1), 4 * pool.num_slots) + capacity,
            dummy_row=capacity,
            dummy_slot=pool.num_slots,
        )
        # Padding reads a slot for each row too.
        graphs = [size for size in self._graph_sizes if 2 * size <= sizes.indices]
        lanes = [Lane(accelerator, self._attention(pool), columns.slot_table, sizes) for _ in range(LANES)]
        compute = accelerator.stream()
        # A kernel of theirs is small: it must not wait for what is left of a long prompt's.
        plan, copy = (accelerator.stream(urgent=True) for _ in range(2))
        parts = Parts(
            decoder=decoder,
            tokens=tokens,
            columns=columns,
            sampler=DeviceSampler(columns, tokens, accelerator.pinned, site.group, site.ops),
            reader=PromptReader(decoder, tokens, DeviceFetch(accelerator.pinned)),
            constraints=constraints,
            forward=DeviceForward(decoder, pool, accelerator, compute, lanes, graphs, site.group),
            lanes=lanes,
            accelerator=accelerator,
            group=site.group,
            compute=compute,
            plan=plan,
            copy=copy,
        )
        return DeviceRunner(parts)

    def _attention(self, pool: KvPool) -> LaneAttention:
        """A lane's own."""
        flashinfer, spec = self._site.attention, self._decoder.spec
        device = self._site.accelerator.device
        if flashinfer is None:
            return GatheredAttention(spec, pool, device)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return FlashInferAttention(
            flashinfer, spec, pool, self._decoder.ops.dtype, device, workspace, self._config.deterministic
        )


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _version(module: Any) -> str:
    return str(getattr(module, "__version__", "of unknown version"))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attend_nothing(_layer: int, _qkv: Tensor, _batch: Batch, out: Tensor) -> None:
    out.zero_()
