"""What a worker runs on: what goes with a GPU or the CPU alone is refused elsewhere, by its flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.srt.config import make
from sapwood.srt.errors import ConfigError
from sapwood.srt.worker.choice import Choice, activations, choose, why_cpu
from sapwood.srt.worker.cpu import make_runner
from sapwood.srt.worker.device.forward import graph_sizes
from sapwood.srt.worker.device.memory import choose_slots, within_memory
from tests.models import source_of, tiny_llama

GIB = 2**30


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({}, 0, Choice("cpu", "cpu")),
        ({}, 1, Choice("cuda", "flashinfer")),
        ({"device": "cpu"}, 1, Choice("cpu", "cpu")),
        ({"device": "cuda"}, 2, Choice("cuda", "flashinfer")),
        ({"attention_backend": "reference"}, 0, Choice("cpu", "reference")),
        ({"attention_backend": "reference"}, 1, Choice("cuda", "reference")),
        ({"tensor_parallel_size": 2, "quantization": "fp8"}, 2, Choice("cuda", "flashinfer")),
        ({"tensor_parallel_size": 3}, 0, Choice("cpu", "cpu")),
    ],
)
def test_the_device_and_its_attention(options: dict[str, Any], gpus: int, expected: Choice) -> None:
    assert choose(make(**options), gpus) == expected


@pytest.mark.parametrize(
    ("options", "gpus", "said"),
    [
        ({"device": "cuda"}, 0, "--device cuda: torch .* is built without CUDA: .*sapwood.cuda"),
        ({"attention_backend": "flashinfer"}, 0, "--attention-backend flashinfer is for a GPU, and there is"),
        ({"dtype": "bfloat16"}, 0, "--dtype bfloat16 is for a GPU"),
        (
            {"quantization": "fp8", "device": "cpu"},
            1,
            "--quantization fp8 is for a GPU, and --device is cpu$",
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, 0, "--kv-cache-dtype fp8_e4m3 is for a GPU"),
        ({"quantization": "w8"}, 1, "--quantization w8 is for the CPU: see --device"),
        ({"attention_backend": "cpu"}, 1, "--attention-backend cpu is for the CPU"),
        ({"cuda_graph_max_bs": 64}, 0, "--cuda-graph-max-bs 64 is for a GPU"),
        ({"cpu_isa": "avx2"}, 1, "--cpu-isa avx2 is for the CPU: see --device"),
        ({"tensor_parallel_size": 4}, 2, "--tensor-parallel-size 4 needs as many GPUs; 2 can be seen"),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_flag(
    options: dict[str, Any], gpus: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        choose(make(**options), gpus)
    assert caught.value.param in options


def test_why_there_is_no_gpu_is_told_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_cpu(make(device="cpu")) == "--device cpu"
    assert why_cpu(make()) == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert why_cpu(make()).startswith(f"torch {torch.__version__} for CUDA 13.0 sees no GPU: nvidia-smi")


@pytest.mark.parametrize(
    ("device", "cuda", "warned"), [("auto", "13.0", True), ("auto", None, False), ("cpu", "13.0", False)]
)
def test_a_build_for_cuda_that_sees_no_gpu_is_warned_of(
    tmp_path: Path, device: str, cuda: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And what computes is among the facts, with the reason."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = make(model_path=str(tiny_llama(tmp_path)), device=device, max_total_tokens=64, num_threads=1)
    _runner, _pool, facts = make_runner(config, source_of(tmp_path))
    assert facts["device"] == f"cpu ({why_cpu(config)})"
    assert ("no GPU is used" in caplog.text) == warned


def test_a_gpu_computes_in_16_bits() -> None:
    assert activations(make(), {"torch_dtype": "float16"}) == torch.float16
    assert activations(make(), {"dtype": "bfloat16"}) == torch.bfloat16
    assert activations(make(), {"dtype": "float32"}) == torch.bfloat16
    assert activations(make(), {}) == torch.bfloat16
    assert activations(make(dtype="float16"), {"dtype": "bfloat16"}) == torch.float16


def test_slots_are_a_share_of_what_is_left() -> None:
    slots, why = choose_slots(make(), 10 * GIB, 2 * GIB, GIB, 2**20)
    assert slots == int(7 * 1024 * 0.9)
    assert "90% of what the weights, 2.00 GiB for activations and 1.00 GiB for graphs leave" in why
    assert choose_slots(make(mem_fraction_static=0.5), 10 * GIB, 2 * GIB, GIB, 2**20)[0] == 7 * 512
    assert choose_slots(make(max_total_tokens=100), 10 * GIB, 0, 0, 2**20)[0] == 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_total_tokens": 9000}, "--max-total-tokens 9000 needs 8.79 GiB .* 7.00 GiB are left"),
        ({"mem_fraction_static": 0.01}, "leave no room for two KV slots .* lower --chunked-prefill-size"),
    ],
)
def test_too_little_memory_says_what_to_change(options: dict[str, Any], said: str) -> None:
    per_slot = 2**20 if "max_total_tokens" in options else GIB
    with pytest.raises(ConfigError, match=said):
        choose_slots(make(**options), 10 * GIB, 2 * GIB, GIB, per_slot)


def test_what_does_not_fit_is_named() -> None:
    def load() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand a page of advice")

    with pytest.raises(ConfigError, match=r"^the weights do not fit .*: use --quantization fp8"):
        within_memory("the weights", "use --quantization fp8", load)
    assert within_memory("nothing", "", lambda: 3) == 3


def test_graphs_are_of_few_sizes_and_the_largest_is_first() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [8, 4, 2, 1]
    assert graph_sizes(20) == [20, 16, 8, 4, 2, 1]
    sizes = graph_sizes(256)
    assert sizes[0] == 256
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) < 20
