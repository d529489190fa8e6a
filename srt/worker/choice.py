"""What a worker runs on: a GPU or the CPU, and which attention; a wrong wish is refused by its flag."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sapwood.srt.config import Config
from sapwood.srt.errors import ConfigError

INSTALL = "pip install 'sapwood[cuda]'"

_CPU_ONLY: Mapping[str, Container[object]] = {
    "quantization": ("w8", "w4", "gguf"),
    "attention_backend": ("cpu",),
    "cpu_isa": ("amx", "avx512", "avx2", "portable"),
}
_GPU_ONLY: Mapping[str, Container[object]] = {
    "dtype": ("bfloat16",),
    "quantization": ("fp8",),
    "kv_cache_dtype": ("bfloat16", "fp8_e4m3"),
    "attention_backend": ("flashinfer",),
    "cuda_graph_max_bs": frozenset(range(1, 4097)),  # whatever is given
}


@dataclass(frozen=True, slots=True)
class Choice:
    device: Literal["cuda", "cpu"]
    attention: Literal["flashinfer", "cpu", "reference"]


def choose(config: Config, gpus: int | None = None) -> Choice:
    """The device and the attention for `config`, on a machine with so many GPUs (None: look).

    Raises ConfigError naming the flag that does not go with the device, or what is missing for a GPU.
    """
    if config.device == "cpu":
        found = 0
    else:
        found = torch.cuda.device_count() if gpus is None else gpus
    if config.device == "cuda" and not found:
        raise ConfigError(f"--device cuda: {_no_gpu()}", param="device")
    device: Literal["cuda", "cpu"] = "cuda" if found else "cpu"
    for name, values in (_GPU_ONLY if device == "cpu" else _CPU_ONLY).items():
        value = getattr(config, name)
        if value in values:
            other, why = "the CPU: see --device", ""
            if config.device == "cpu":
                other = "a GPU, and --device is cpu"
            elif device == "cpu":
                other, why = "a GPU, and there is none", f" ({_no_gpu()})"
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is for {other}{why}",
                param=name,
            )
    if device == "cuda" and found < config.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} needs as many GPUs; {found} can be seen",
            param="tensor_parallel_size",
        )
    if config.attention_backend == "auto":
        return Choice(device, "flashinfer" if device == "cuda" else "cpu")
    return Choice(device, config.attention_backend)


def why_cpu(config: Config) -> str:
    """Why the CPU computes, for people: what was asked for, or what torch has and sees."""
    if config.device == "cpu":
        return "--device cpu"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _no_gpu()


def activations(config: Config, source: Mapping[str, Any]) -> torch.dtype:
    """What a GPU computes in: --dtype, else float16 for a checkpoint of float16, else bfloat16."""
    stored = source.get("dtype") or source.get("torch_dtype")
    auto = "float16" if stored == "float16" else "bfloat16"
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    return dtypes[auto if config.dtype == "auto" else config.dtype]


def _no_gpu() -> str:
    """Why torch sees no GPU, with the versions that count."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it, then {INSTALL}"
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU: nvidia-smi tells whether the "
        "driver is there and new enough"
    )
