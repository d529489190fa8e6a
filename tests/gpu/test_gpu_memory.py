"""What attention takes of the device's memory beside the measured step is set aside: it is no KV slots."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sapwood.srt.config import make
from sapwood.srt.models.parallel import Alone
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.attention.flashinfer import attending_bytes, lane_bytes
from sapwood.srt.worker.attention.wrappers import EAGER_BYTES, INT_WORKSPACE_BYTES
from sapwood.srt.worker.device import build
from sapwood.srt.worker.device.build import GRAPH_BYTES, LANES, Site, make_device_runner
from sapwood.srt.worker.device.memory import SHARE_BY_DEFAULT
from sapwood.srt.worker.grammars import make_grammars
from tests.gpu.backends import flashinfer_attention, platform_of
from tests.gpu.device_bench import device_bench
from tests.gpu.host_accelerator import HostAccelerator
from tests.gpu.package_double import package
from tests.gpu.recorder import Recorder
from tests.gpu.steps import Step, World, spec_of
from tests.models import source_of, tiny_llama

EVERY_TILE = Step.of((0, 9, 1), (1, 9, 2), (2, 9, 6), (3, 9, 11), (4, 9, 30), (5, 9, 64), (6, 9, 70))
TWO = [(0, 128, [0, 1, 2])]
THREE = [(0, 64, [0, 1, 2]), (64, 128, [0, 1])]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("windows", [(0,), (16,), (0, 16, 32)], ids=["full", "windows", "both"])
def test_a_lanes_wrappers_are_as_many_as_are_counted(windows: tuple[int, ...], deterministic: bool) -> None:
    world = World(spec_of(6, 2, windows=windows), platform_of("double float32"))
    recorder = Recorder(world.platform.flashinfer)
    options = {"deterministic": deterministic, "cascade_bytes": 1, "mixed_bytes": 1}
    attention = flashinfer_attention(world, recorder, **options)
    for shared in ((), TWO, THREE):
        rows = [(row, 130, 1) for row in range(3)]
        attention.plan(world.paged(Step.of(*rows, shared=shared)))
    attention.plan(world.paged(EVERY_TILE))
    made = sum(given.get("num_levels", 1) for _, given in recorder.made)
    assert made * EAGER_BYTES == lane_bytes(world.spec, deterministic, graphs=False)
    rooms = len(windows) * INT_WORKSPACE_BYTES
    assert lane_bytes(world.spec, deterministic, graphs=True) == made * EAGER_BYTES + rooms


def test_a_cascade_has_the_queries_and_three_results_at_a_time() -> None:
    spec, tokens = spec_of(32, 8), 8448
    queries, sums = tokens * 32 * 128 * 2, tokens * 32 * 4
    assert attending_bytes(spec, tokens, deterministic=False) == 4 * queries + 3 * sums
    assert attending_bytes(spec, tokens, deterministic=True) == 2 * queries
    assert attending_bytes(spec_of(32, 8, windows=(16,)), tokens, deterministic=False) == 2 * queries
    assert attending_bytes(spec_of(66, 2), tokens, deterministic=False) == 2 * tokens * 66 * 128 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=64
    )


def bytes_of_slots(folder: Path, attention: Any, **options: Any) -> int:
    bench = device_bench(folder, HostAccelerator(), attention, max_total_tokens=None, **options)
    slot = sum(layer[0].nbytes for layer in (*bench.pool.k, *bench.pool.v))
    return bench.pool.num_slots * slot


@pytest.mark.parametrize("what", ["lane_bytes", "attending_bytes"])
def test_what_attention_takes_is_no_slots(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before, more = bytes_of_slots(folder, package()), 64 << 20
    real = getattr(build, what)
    monkeypatch.setattr(build, what, lambda *args, **kwargs: real(*args, **kwargs) + more)
    lanes = LANES if what == "lane_bytes" else 1
    taken = before - bytes_of_slots(folder, package())
    assert taken == pytest.approx(SHARE_BY_DEFAULT * lanes * more, rel=0.01)


def test_graphs_have_page_tables_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "GRAPH_BYTES", 0)
    monkeypatch.setattr(build, "lane_bytes", lambda *args, **kwargs: 0)
    without, graphs = (bytes_of_slots(folder, package(), disable_cuda_graph=off) for off in (True, False))
    positions = source_of(folder).context_length + 1
    indices = 9 * positions
    assert GRAPH_BYTES > 0
    assert without - graphs == pytest.approx(SHARE_BY_DEFAULT * 4 * LANES * indices, rel=0.05)


def test_it_is_a_ranks_heads_that_must_be_supported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[DecoderSpec] = []

    class Enough(Exception):
        pass

    def support(spec: DecoderSpec, *_types: torch.dtype) -> None:
        given.append(spec)
        raise Enough

    monkeypatch.setattr(build, "require_supported", support)
    source, config = source_of(folder), make(model_path=str(folder), dtype="float16")
    site = Site(HostAccelerator(), SimpleNamespace(rank=1, size=2), package(), package())  # type: ignore[arg-type]
    with pytest.raises(Enough):
        make_device_runner(config, source, site, make_grammars(source), 1)
    assert [(spec.q_heads, spec.kv_heads) for spec in given] == [(3, 1)]


def test_that_norms_are_compiled_is_told_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no kernels of those that FlashInfer compiles with ninja, of which each is told."""
    largest, told = build._Making._largest, []

    def watched(self: build._Making) -> None:
        told.extend(caplog.messages)
        largest(self)

    monkeypatch.setattr(build._Making, "_largest", watched)
    source = source_of(folder)
    config = make(model_path=str(folder), dtype="float16", max_total_tokens=500, max_running_requests=4)
    with caplog.at_level(logging.INFO, "sapwood"):
        site = Site(HostAccelerator(), Alone(), package(), package())
        make_device_runner(config, source, site, make_grammars(source), 1)
    assert any("FlashInfer compiles its norms" in line for line in told)
