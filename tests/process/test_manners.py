"""A runtime that has nothing to do costs next to nothing; one that is loaded has given back what it can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.manners import idle, role_of
from bench.process_cost import tree
from tests.models import tiny_llama
from tests.serving import serve

WAKES_PER_SECOND = 25
"""Each process beats once a second, and the launcher hears it; some also look up as often."""


def test_an_idle_server_wakes_rarely_and_takes_less_than_a_hundredth_of_a_core(tmp_path: Path) -> None:
    with serve(tiny_llama(tmp_path / "model"), tmp_path, num_threads=2, max_total_tokens=512) as server:
        server.generate([3, 4, 5], max_new_tokens=20)
        # By then the engine of constraints too has been loaded, for which nobody waits at the start.
        asked = {"text": "x", "sampling_params": {"regex": "ab", "max_new_tokens": 4}}
        assert server.post("/generate", asked).json()["text"] == "ab"
        found = {role_of(pid): of for pid, of in idle(tree(server.launcher.pid), 4.0).items()}
    assert {"launcher", "server", "tokenizer", "grammar", "engine", "scheduler", "worker"} <= set(found)
    assert sum(wakes for _, wakes in found.values()) < WAKES_PER_SECOND, found
    assert sum(milliseconds for milliseconds, _ in found.values()) < 10, found


def test_a_loaded_process_is_not_collected_again_and_gives_back_what_loading_freed() -> None:
    program = """
import ctypes, gc, resource
from pathlib import Path
from sapwood.srt.lifeline import settle

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

rubbish = [bytes(1000) for _ in range(64_000)]
kept = bytes(1000)  # above all of it on the heap
del rubbish
before = resident()
settle()
assert gc.get_freeze_count() > 1000
assert gc.isenabled()
if hasattr(ctypes.CDLL(None), "malloc_trim"):
    assert before - resident() > 48_000_000, (before, resident())
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
