"""The KV pool: K and V of one token in every layer are one slot."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from sapwood.kernels.machine import free_memory
from sapwood.srt.config import Config
from sapwood.srt.errors import ConfigError

CONTEXTS_BY_DEFAULT = 4
"""Unless a number or a share is asked for, the pool holds this many full contexts, if memory allows."""
SHARE_BY_DEFAULT = 0.5
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}


class KvPool:
    """`k[layer]` and `v[layer]`: [num_slots, num_kv_heads, head_dim] of `dtype`, zeros; on a device other
    than the CPU there is one slot more, the last, which is nobody's: padding is written there."""

    def __init__(
        self,
        num_slots: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_slots + (device is not None), kv_heads, head_dim)
        self.num_slots = num_slots
        self.k = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.v = [_zeros(shape, dtype, device) for _ in range(layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Memory that the system gives page by page as it is written; torch.zeros would touch all of it."""
    if device is not None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=str(dtype).removeprefix("torch.")))


def choose_dtype(asked: str, formats: Collection[str]) -> torch.dtype:
    """What K and V are stored as: `asked`; for "auto" float32 if all weights' `formats` are, else float16."""
    auto = "float32" if set(formats) == {"float32"} else "float16"
    return DTYPES[auto if asked == "auto" else asked]


def slot_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token in every layer."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


def choose_slots(
    config: Config, context_length: int, bytes_per_slot: int, mapped: int = 0
) -> tuple[int, str]:
    """(number of slots, why): what was asked for, else a few contexts, and no more than half the free memory.

    `mapped` bytes of weights lie in memory that the system calls free, and are not free to us. Ranks share
    the machine's memory: each must have loaded its weights before any calls this. Raises ConfigError if what
    was asked for does not fit in the machine's free memory.
    """
    ranks = config.tensor_parallel_size
    free = max(free_memory() // ranks - mapped, 0)
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    if config.max_total_tokens is not None:
        need = config.max_total_tokens * bytes_per_slot
        if need > free:
            raise ConfigError(
                f"--max-total-tokens {config.max_total_tokens} needs {need / 2**20:.0f} MiB,"
                f" {free / 2**20:.0f} MiB are free{each}",
                param="max_total_tokens",
            )
        return config.max_total_tokens, f"{need / 2**20:.0f} MiB, as asked for"
    share = config.mem_fraction_static or SHARE_BY_DEFAULT
    fitting = int(free * share) // bytes_per_slot
    if fitting < 2:
        raise ConfigError(
            f"{free / 2**20:.0f} MiB of memory are free{each}; a share of {share}"
            f" (--mem-fraction-static) holds no two slots of {bytes_per_slot} bytes",
            param="mem_fraction_static",
        )
    slots, why = fitting, f"{share:.0%} of {free / 2**20:.0f} MiB free{each}"
    if config.mem_fraction_static is None and fitting >= CONTEXTS_BY_DEFAULT * context_length:
        slots = CONTEXTS_BY_DEFAULT * context_length
        why = f"{CONTEXTS_BY_DEFAULT} contexts of {context_length} tokens"
    return slots, f"{slots * bytes_per_slot / 2**20:.0f} MiB: {why}"
