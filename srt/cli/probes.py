"""Looks at the machine and the installation; every probe says what it found, or that it could not look."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import sapwood
from sapwood.srt.loader.packaged import cache_folder

PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "pyzmq", "msgspec", "fastapi", "starlette", "uvicorn",
    "uvloop", "httpx", "jinja2", "prometheus-client", "rich", "transformers", "xgrammar", "flashinfer-python",
    "triton",
)  # fmt: skip
SMI_SECONDS = 5.0
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def collect(environ: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """Sections of names and values."""
    return {
        "versions": versions(),
        "platform": {
            "system": _guarded(platform.platform),
            "libc": _guarded(lambda: " ".join(platform.libc_ver())),
            "cpu": _guarded(cpu_model),
            "cores": _guarded(cores),
            "memory": _guarded(memory),
        },
        "kernels": kernels(),
        "nvidia": nvidia(),
        "settings": {
            "cache folder": homeless(str(cache_folder(environ)), environ),
            **variables(environ),
        },
    }


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe() or "unknown"
    except (OSError, ValueError, LookupError) as e:
        return f"unknown ({type(e).__name__})"


def versions() -> dict[str, str]:
    """Of Sapwood, Python and the packages that matter; those that are not installed are left out."""
    found = {"sapwood": sapwood.__version__, "python": platform.python_version()}
    if sys.implementation.name != "cpython":
        found["python"] += f" ({sys.implementation.name})"
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name) or "unknown"
        except (importlib.metadata.PackageNotFoundError, OSError, ValueError, LookupError):
            continue
    return found


def cpu_model() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Hardware"):
            return value.strip()
    return platform.processor() or platform.machine()


def cores() -> str:
    """Cores that this process may use, and those that there are."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} usable of {os.cpu_count()}"


def memory() -> str:
    """Available and whole memory, and the limit of the control group if there is one."""
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) * 1024
    text = f"{sizes['MemAvailable'] / 2**30:.1f} GiB available of {sizes['MemTotal'] / 2**30:.1f}"
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (bound := limit.read_text().strip()).isdecimal():
        text += f", limited to {int(bound) / 2**30:.1f} GiB"
    return text


def kernels() -> dict[str, str]:
    """Whether the C++ kernels are built, and the instruction sets that they can use here."""
    from sapwood.kernels import native

    try:
        usable = native.available()
    except (RuntimeError, OSError, AttributeError) as e:
        return {"built": f"no: {homeless(str(e))}"}
    return {"built": "yes", "isa": usable[0] if usable else "none", "isa available": ", ".join(usable)}


def nvidia() -> dict[str, str]:
    """NVIDIA's driver and devices, as its own tool tells them; empty on a machine without."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, LookupError, ValueError):
        return {}
    found = {"driver": " ".join(driver.removeprefix("NVRM version:").split())}
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return found
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as e:
        return {**found, "devices": f"unknown ({type(e).__name__})"}
    devices = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return {**found, **{f"device {i}": line for i, line in enumerate(devices)}}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The SAPWOOD_ variables; of a key only that there is one."""
    return {
        name: "(set)" if _SECRET.search(name) else homeless(environ[name], environ)
        for name in sorted(environ)
        if name.startswith("SAPWOOD_")
    }


def homeless(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text with ~ for the home folder, whose name says whose it is."""
    home = environ.get("HOME", "")
    return text.replace(home, "~") if len(home) > 1 else text
