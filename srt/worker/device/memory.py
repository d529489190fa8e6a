"""How many KV slots a GPU holds, and what to change where it runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from sapwood.srt.config import Config
from sapwood.srt.errors import ConfigError

T = TypeVar("T")

SHARE_BY_DEFAULT = 0.9
GIB = 2**30


def choose_slots(config: Config, free: int, activations: int, graphs: int, per_slot: int) -> tuple[int, str]:
    """(number of slots, why): what was asked for, or a share of what weights, the largest step's activations
    and the graphs leave.

    `free` bytes are free once the weights are loaded, of which a step needs `activations` and the graphs,
    which are captured later, `graphs`. Raises ConfigError where that leaves too little.
    """
    left = free - activations - graphs
    reserved = f"{activations / GIB:.2f} GiB for activations and {graphs / GIB:.2f} GiB for graphs"
    if config.max_total_tokens is not None:
        need = config.max_total_tokens * per_slot
        if need > left:
            raise ConfigError(
                f"--max-total-tokens {config.max_total_tokens} needs {need / GIB:.2f} GiB of GPU memory; "
                f"{max(left, 0) / GIB:.2f} GiB are left besides the weights, {reserved}",
                param="max_total_tokens",
            )
        return config.max_total_tokens, f"{need / GIB:.2f} GiB, as asked for"
    share = config.mem_fraction_static or SHARE_BY_DEFAULT
    slots = int(max(left, 0) * share) // per_slot
    if slots < 2:
        raise ConfigError(
            f"{free / GIB:.2f} GiB of GPU memory are free besides the weights, and {reserved} leave no room "
            f"for two KV slots of {per_slot} bytes: lower --chunked-prefill-size, --max-running-requests or "
            "--cuda-graph-max-bs, or use --quantization fp8, --kv-cache-dtype fp8_e4m3 or more GPUs "
            "(--tensor-parallel-size)",
            param="mem_fraction_static",
        )
    return slots, (
        f"{slots * per_slot / GIB:.2f} GiB: {share:.0%} of what the weights, {reserved} leave of the GPU"
    )


def within_memory(what: str, instead: str, run: Callable[[], T]) -> T:
    """What `run` returns; where the GPU's memory does not do, ConfigError: what did not fit, and what to
    change."""
    try:
        return run()
    except torch.OutOfMemoryError as e:
        first = str(e).splitlines()[0]
        raise ConfigError(f"{what} do not fit into the GPU's memory: {instead} ({first})") from None
