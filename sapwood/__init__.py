"""Sapwood: a serving runtime for large language models. Public names are loaded on first use."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sapwood.lang.api import (
        assistant,
        assistant_begin,
        assistant_end,
        ids,
        image,
        separate_reasoning,
        special,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from sapwood.lang.backends.echo import Echo
    from sapwood.lang.backends.endpoint import RuntimeEndpoint
    from sapwood.lang.backends.openai import OpenAI
    from sapwood.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from sapwood.lang.defaults import flush_cache, get_default_backend, get_server_info, set_default_backend
    from sapwood.lang.errors import LangError, RequestFailed, Unsupported
    from sapwood.lang.outputs import gen, gen_int, gen_string, select
    from sapwood.lang.program import function
    from sapwood.lang.state import AsyncState, State
    from sapwood.srt.engine import Engine
    from sapwood.srt.llm import LLM
    from sapwood.srt.llm_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
    from sapwood.srt.runtime import Runtime

_root = Path(__file__).resolve().parent.parent
if (_root / "setup.py").is_file() and (_root / "srt").is_dir():
    # Imported from the repository's root, where srt, lang and kernels lie beside this package.
    __path__.append(str(_root))

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncState": "sapwood.lang.state",
    "Echo": "sapwood.lang.backends.echo",
    "Engine": "sapwood.srt.engine",
    "GuidedDecodingParams": "sapwood.srt.llm_params",
    "LLM": "sapwood.srt.llm",
    "LangError": "sapwood.lang.errors",
    "OpenAI": "sapwood.lang.backends.openai",
    "RequestFailed": "sapwood.lang.errors",
    "Runtime": "sapwood.srt.runtime",
    "RuntimeEndpoint": "sapwood.lang.backends.endpoint",
    "SamplingParams": "sapwood.srt.llm_params",
    "State": "sapwood.lang.state",
    "StructuredOutputsParams": "sapwood.srt.llm_params",
    "Unsupported": "sapwood.lang.errors",
    "assistant": "sapwood.lang.api",
    "assistant_begin": "sapwood.lang.api",
    "assistant_end": "sapwood.lang.api",
    "flush_cache": "sapwood.lang.defaults",
    "function": "sapwood.lang.program",
    "gen": "sapwood.lang.outputs",
    "gen_int": "sapwood.lang.outputs",
    "gen_string": "sapwood.lang.outputs",
    "get_default_backend": "sapwood.lang.defaults",
    "get_server_info": "sapwood.lang.defaults",
    "greedy_token_selection": "sapwood.lang.choices",
    "ids": "sapwood.lang.api",
    "image": "sapwood.lang.api",
    "select": "sapwood.lang.outputs",
    "separate_reasoning": "sapwood.lang.api",
    "set_default_backend": "sapwood.lang.defaults",
    "special": "sapwood.lang.api",
    "system": "sapwood.lang.api",
    "system_begin": "sapwood.lang.api",
    "system_end": "sapwood.lang.api",
    "token_length_normalized": "sapwood.lang.choices",
    "unconditional_likelihood_normalized": "sapwood.lang.choices",
    "user": "sapwood.lang.api",
    "user_begin": "sapwood.lang.api",
    "user_end": "sapwood.lang.api",
    "video": "sapwood.lang.api",
}

__all__ = [
    "LLM",
    "AsyncState",
    "Echo",
    "Engine",
    "GuidedDecodingParams",
    "LangError",
    "OpenAI",
    "RequestFailed",
    "Runtime",
    "RuntimeEndpoint",
    "SamplingParams",
    "State",
    "StructuredOutputsParams",
    "Unsupported",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_default_backend",
    "get_server_info",
    "greedy_token_selection",
    "ids",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "special",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
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
