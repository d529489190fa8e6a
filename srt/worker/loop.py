"""The worker process: loads the model, makes the pool, then answers steps in order."""

from __future__ import annotations

import torch

from sapwood.kernels import machine, native
from sapwood.srt import log
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import BadRequest, ConfigError, Overloaded
from sapwood.srt.grammar.engine import Engine
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.loader.kept_weights import KeptWeights
from sapwood.srt.loader.packaged import cache_folder
from sapwood.srt.loader.weights import Weights, open_weights
from sapwood.srt.messages import DropGrammars, GrammarLoaded, LoadGrammar, Step, StepResult, WorkerReady
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.weights import Storage
from sapwood.srt.orders import Boot
from sapwood.srt.worker.attention.reference import ReferenceForward
from sapwood.srt.worker.constraints import Constraints
from sapwood.srt.worker.fused import FusedForward
from sapwood.srt.worker.grammars import Grammars
from sapwood.srt.worker.kv_pool import KvPool, choose_dtype, choose_slots, slot_bytes
from sapwood.srt.worker.runner import Runner
from sapwood.srt.worker.token_pool import TokenPool


def make_runner(
    config: Config, source: ModelSource, grammars: Grammars | None = None
) -> tuple[Runner, KvPool, dict[str, str]]:
    """Load the model and make its pool; the facts say what was chosen, and why. Rows may have `grammars`."""
    threads, why_threads = machine.choose_threads()
    if config.num_threads is not None:
        threads, why_threads = config.num_threads, f"as asked; chosen would be {threads}"
    try:
        isa = native.load(config.cpu_isa, threads)
    except RuntimeError as e:
        raise ConfigError(str(e), param="cpu_isa") from None
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    spec = spec_of(source.config)
    decoder, weights, why_stored, mapped = _load(config, source)
    kv_dtype = choose_dtype(config.kv_cache_dtype, weights.formats)
    each = slot_bytes(spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
    num_slots, why = choose_slots(config, source.context_length, each, mapped)
    pool = KvPool(num_slots, spec.layers, spec.kv_heads, spec.head_dim, kv_dtype)
    tokens = TokenPool(
        config.max_running_requests,
        min(source.context_length, num_slots),
        spec.vocab,
        spec.hidden,
        source.eos_ids,
    )
    backend = "cpu" if config.attention_backend == "auto" else config.attention_backend
    kind = FusedForward if backend == "cpu" else ReferenceForward
    forward = kind(decoder, pool, torch.from_numpy(tokens.slot_table))
    facts = {
        "weights": f"{weights.summary()}, {why_stored}",
        "kernels": f"{isa}, {threads} threads ({why_threads})",
        "kv pool": f"{num_slots} slots of {each} bytes ({kv_dtype}), {why}".replace("torch.", ""),
        "attention": backend,
    }
    constraints = Constraints(grammars or make_grammars(source), threads)
    return Runner(decoder, forward, tokens, constraints), pool, facts


def make_grammars(source: ModelSource) -> Grammars:
    """Those of the model's tokenizer; their masks are as wide as its logits."""

    def make_engine() -> Engine:
        if source.tokenizer_file is None:
            raise BadRequest("constraints need a tokenizer.json, which this model does not have")
        try:
            return Engine(source.tokenizer_file, spec_of(source.config).vocab, source.eos_ids)
        except ValueError as e:
            raise BadRequest(f"constraints do not work with this model's tokenizer: {e}") from None

    return Grammars(make_engine)


def _load(config: Config, source: ModelSource) -> tuple[Decoder, Weights, str, int]:
    """The model, its weights, why these are stored as they are, and how many bytes of them are mapped."""
    storage, why = _storage(config)
    kept = None
    if config.weight_cache and source.files:
        kept = KeptWeights(cache_folder() / "weights", source.files, storage)
        why += ", mapped from the cache" if kept.is_found else ""
    weights = open_weights(source, kept)
    decoder = Decoder(spec_of(source.config), weights, storage, source.context_length)
    if kept is not None:
        kept.save()
    return decoder, weights, why, kept.nbytes if kept else 0


def _storage(config: Config) -> tuple[Storage, str]:
    if config.quantization == "w8" or config.quantization == "w4":
        return config.quantization, f"--quantization {config.quantization}"
    return ("stored", "as stored") if config.dtype == "auto" else (config.dtype, f"--dtype {config.dtype}")


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Run until the launcher ends the process."""
    logger = log.set_up("worker", boot.config.log_level, boot.config.log_format)
    inbox = Inbox(boot.directory, "worker", boot.index)
    scheduler = Outbox(boot.directory, "scheduler")
    grammars = make_grammars(boot.source)
    grammars.start()
    inbox.watch(grammars.fileno())
    runner, pool, facts = make_runner(boot.config, boot.source, grammars)
    scheduler.send(WorkerReady(pool.num_slots, boot.index))
    lifeline.ready(facts)
    logger.debug("ready")
    while True:
        turn(inbox, scheduler, runner, grammars)


def turn(inbox: Inbox, scheduler: Outbox, runner: Runner, grammars: Grammars) -> None:
    """Wait for messages, or for grammars that are loaded, and answer what there is."""
    for message in inbox.receive(None):
        if isinstance(message, LoadGrammar):
            grammars.load(message)
        elif isinstance(message, DropGrammars):
            grammars.drop(message.keys)
        else:
            assert isinstance(message, Step)
            _send(scheduler, runner.run(message))
    if loaded := grammars.finished():
        _send(scheduler, *loaded)


def _send(scheduler: Outbox, *answers: StepResult | GrammarLoaded) -> None:
    if not scheduler.send(*answers):
        raise Overloaded("the scheduler does not take results")
