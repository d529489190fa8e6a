"""What each process of a server takes: to import, in memory, and which CUDA libraries it has loaded.

`python -m bench.processes [MODEL] --json FILE`. Import times are of fresh interpreters, the least of some;
memory is read when the server is ready and after a few requests.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from sapwood.srt.lifeline import ROLES
from tests.serving import serve

NAMES = "cuda|cublas|cudnn|cufft|curand|cusparse|nccl|nvrtc|nvidia|flashinfer|triton"
CUDA = re.compile(rf"/[^/\n]*({NAMES})[^/\n]*\.so")
PARTS = {"launcher": "sapwood.srt.serve", **ROLES}
REQUESTS = 8


def import_seconds(module: str, times: int = 5) -> float:
    """The least of some runs of a fresh interpreter, less that of one that imports nothing."""

    def least(program: str) -> float:
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-P", "-c", program], check=True)
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    return least(f"import {module}") - least("pass")


def cuda_libraries(pid: int) -> list[str]:
    """File names of CUDA's libraries, and of what is compiled for it, that a process has mapped."""
    return sorted({Path(match[0]).name for match in CUDA.finditer(Path(f"/proc/{pid}/maps").read_text())})


def role_of(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[command.index("sapwood.srt.lifeline") + 1] if "sapwood.srt.lifeline" in command else ""


def memory(pid: int) -> dict[str, float]:
    """MiB: proportional set size, and what is the process's own alone."""
    full = psutil.Process(pid).memory_full_info()
    return {"pss": full.pss / 2**20, "uss": full.uss / 2**20}


def measure(model: str | None, folder: Path) -> dict[str, Any]:
    with serve(model, folder) as server:
        launcher = psutil.Process(server.launcher.pid)
        pids = {"launcher": launcher.pid}
        for child in launcher.children(recursive=True):
            pids.setdefault(role_of(child) or f"{child.name()} {child.pid}", child.pid)
        ready = {name: memory(pid) for name, pid in pids.items()}
        for _ in range(REQUESTS):
            answer = server.post(
                "/generate", {"text": "The sapwood", "sampling_params": {"max_new_tokens": 32}}
            )
            answer.raise_for_status()
        served = {name: memory(pid) for name, pid in pids.items()}
        libraries = {name: cuda_libraries(pid) for name, pid in pids.items()}
    imports = {name: import_seconds(PARTS[name]) for name in pids if name in PARTS}
    return {
        name: {
            "import_seconds": imports.get(name),
            "ready": ready[name],
            "served": served[name],
            "cuda_libraries": libraries[name],
        }
        for name in pids
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.model, Path(folder))
    print(f"{'process':12} {'import s':>9} {'ready MiB':>10} {'served MiB':>11}  CUDA libraries")
    for name, of in found.items():
        seconds = "" if of["import_seconds"] is None else f"{of['import_seconds']:.2f}"
        names = ", ".join(of["cuda_libraries"]) or "none"
        print(f"{name:12} {seconds:>9} {of['ready']['pss']:>10.0f} {of['served']['pss']:>11.0f}  {names}")
    if arguments.json:
        import torch

        report = {"torch": torch.__version__, "python": sys.version.split()[0], "processes": found}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
