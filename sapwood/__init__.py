"""Sapwood: a serving runtime for large language models. Public names are loaded on first use."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

_root = Path(__file__).resolve().parent.parent
if (_root / "setup.py").is_file() and (_root / "srt").is_dir():
    # Imported from the repository's root, where srt, lang and kernels lie beside this package.
    __path__.append(str(_root))

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "sapwood.srt.engine",
    "LLM": "sapwood.srt.llm",
    "GuidedDecodingParams": "sapwood.srt.llm_params",
    "Runtime": "sapwood.srt.runtime",
    "SamplingParams": "sapwood.srt.llm_params",
    "StructuredOutputsParams": "sapwood.srt.llm_params",
}

__all__ = [
    "LLM",
    "Engine",
    "GuidedDecodingParams",
    "Runtime",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sapwood' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as e:
        raise ImportError(f"sapwood.{name} needs {e.name}: pip install 'sapwood[serve]'") from e


def __dir__() -> list[str]:
    return sorted(__all__)
