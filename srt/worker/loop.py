"""The worker process: loads the model, makes the pool, then answers steps in order."""

from __future__ import annotations

import torch

from sapwood.kernels import native
from sapwood.srt import log
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError, Overloaded
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.messages import Boot, Step, WorkerReady
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.registry import spec_of
from sapwood.srt.worker.attention.cpu import CpuAttention
from sapwood.srt.worker.kv_pool import KvPool, choose_slots, slot_bytes
from sapwood.srt.worker.runner import Runner
from sapwood.srt.worker.token_pool import TokenPool

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def make_runner(config: Config, source: ModelSource) -> tuple[Runner, KvPool, dict[str, str]]:
    """Load the model and make its pool; the facts say what was chosen, and why."""
    threads = config.num_threads or native.usable_cores()
    try:
        isa = native.load(config.cpu_isa, threads)
    except RuntimeError as e:
        raise ConfigError(str(e), param="cpu_isa") from None
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spec = spec_of(source.config)
    dtype = DTYPES["float32" if config.dtype == "auto" else config.dtype]
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    decoder = Decoder(spec, open_weights(source), dtype, source.context_length)
    each = slot_bytes(spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
    num_slots, why = choose_slots(config, source.context_length, each)
    pool = KvPool(num_slots, spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
    tokens = TokenPool(
        config.max_running_requests,
        min(source.context_length, num_slots),
        spec.vocab,
        spec.hidden,
        source.eos_ids,
    )
    backend = "cpu" if config.attention_backend == "auto" else config.attention_backend
    attention = CpuAttention(spec, pool, torch.from_numpy(tokens.slot_table), backend)
    facts = {
        "weights": f"{dtype} on cpu, {decoder.nbytes / 2**20:.0f} MiB".replace("torch.", ""),
        "kernels": f"{isa}, {threads} threads ({'as asked' if config.num_threads else 'usable cores'})",
        "kv pool": f"{num_slots} slots of {each} bytes ({kv_dtype}), {why}".replace("torch.", ""),
        "attention": backend,
    }
    return Runner(decoder, pool, tokens, attention), pool, facts


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Run until the launcher ends the process."""
    logger = log.set_up("worker", boot.config.log_level, boot.config.log_format)
    inbox = Inbox(boot.directory, "worker", boot.index)
    scheduler = Outbox(boot.directory, "scheduler")
    runner, pool, facts = make_runner(boot.config, boot.source)
    scheduler.send(WorkerReady(pool.num_slots))
    lifeline.ready(facts)
    logger.debug("ready")
    while True:
        for step in inbox.receive(None):
            assert isinstance(step, Step)
            if not scheduler.send(runner.run(step)):
                raise Overloaded("the scheduler does not take results")
