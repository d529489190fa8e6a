"""tests/gpu by pytest, in a process of its own with a limit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.gpu.here import Here

ROOT = Path(__file__).parents[2]
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
DRY_TESTS = ("tests/gpu/test_gpu_attention.py", "-k", "scores and double")
GRACE = 3.0


def tests(here: Here) -> None:
    """On a GPU without those that FlashInfer's double can do anywhere. Counts go by pytest's lines, so that a
    run that is cut short has them too."""
    here.close()  # what it takes of the memory, the tests may need
    chosen = DRY_TESTS if here.place.dry else ("tests/gpu", "-k", "not double")
    command = [
        sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist",
        *chosen,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        ended = _wait(process, here.left - 2 * GRACE)
        out.seek(0)
        text = out.read()
    counts = counted(text)
    for outcome in OUTCOMES:
        most = {"most": 0} if outcome in ("FAILED", "ERROR") else {}
        here.row(outcome.lower(), counts[outcome], "tests", **most)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", text, re.MULTILINE)
    selection = " ".join(chosen)
    here.row(f"{selection}: {'ran to the end' if ended else 'cut at its limit'}", ended, failed=failed)
    if ended and process.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {process.returncode}: {text[-600:]}")


def counted(text: str) -> Counter[str]:
    """Of `pytest -v`'s lines so far."""
    return Counter(re.findall(rf"^\S+::.* ({'|'.join(OUTCOMES)})\b", text, re.MULTILINE))


def _wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether it ended by itself; else it is interrupted, which makes pytest tell what has failed."""
    for patience, end in ((max(limit, 1.0), signal.SIGINT), (GRACE, signal.SIGKILL)):
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.send_signal(end)
            continue
        return end == signal.SIGINT
    process.wait()
    return False
