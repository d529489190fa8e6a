"""vLLM's v1 scheduler alone, as bench.step_cost drives Sapwood's: run by the Python of vLLM's environment.

    python -P bench/vllm_scheduler.py decode ROWS CONTEXT | waiting ROWS WAITING STEPS

Prints one line of JSON: microseconds of `schedule` and `update_from_output` together, per step.
"""

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

BLOCK = 16


def make(rows: int, blocks: int, longest: int, budget: int) -> Any:
    """A scheduler with prefix caching for a model that is never loaded."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    scheduler = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=longest, enable_chunked_prefill=True,
        is_encoder_decoder=False, async_scheduling=False,
    )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    config = VllmConfig(scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu"))
    config.model_config = Model(longest)
    cache.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=config, kv_cache_config=kv, block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config), log_stats=False,
    )  # fmt: skip


class Model:
    """What the scheduler asks of a model's configuration; anything else is "no"."""

    def __init__(self, longest: int) -> None:
        self.max_model_len = longest
        self.runner_type = "generate"
        self.skip_tokenizer_init = True

    def __getattr__(self, name: str) -> Any:
        return False


class Driver:
    def __init__(self, rows: int, slots: int, longest: int, budget: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.scheduler = make(rows, slots // BLOCK, longest, budget)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._number = 0

    def submit(self, ids: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._number += 1
        self.scheduler.add_request(
            Request(
                request_id=str(self._number),
                prompt_token_ids=ids,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> float:
        from vllm.v1.outputs import ModelRunnerOutput

        begin = time.thread_time()
        planned = self.scheduler.schedule()
        took = time.thread_time() - begin
        ids = list(planned.num_scheduled_tokens)
        requests = self.scheduler.requests
        done = [[3] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=done
        )
        begin = time.thread_time()
        self.scheduler.update_from_output(planned, output)
        return took + time.thread_time() - begin


def decode(rows: int, context: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    driver = Driver(rows, rows * (context + 700), context + 700, 8192)
    for _ in range(rows):
        driver.submit(rng.integers(10, 100_000, context).tolist(), 600)
    for _ in range(10 + rows * context // 8192):
        driver.step()
    return {
        "rows": rows,
        "context": context,
        "us": statistics.median(driver.step() for _ in range(200)) * 1e6,
    }


def waiting(rows: int, count: int, steps: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    families = rng.integers(10, 100_000, (100, 512), dtype=np.int32)
    driver = Driver(rows, 400_000, 1024, 2048)

    def submit() -> None:
        own = rng.integers(10, 100_000, 64, dtype=np.int32)
        driver.submit([*families[rng.integers(100)].tolist(), *own.tolist()], int(rng.integers(32, 97)))

    begin = time.thread_time()
    for _ in range(count):
        submit()
    each = (time.thread_time() - begin) / count
    for _ in range(50):
        driver.step()
    times = []
    for _ in range(steps):
        while len(driver.scheduler.waiting) < count:
            submit()
        times.append(driver.step())
    return {
        "mean": statistics.mean(times) * 1e6,
        "median": statistics.median(times) * 1e6,
        "submit": each * 1e6,
    }


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    print(json.dumps({"decode": decode, "waiting": waiting}[what](*map(int, numbers))))
