"""Every family, position encoding and window of the models that are served, as tiny models' configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import FAMILIES, NULL, tiny

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SHORT, LONG = [1.0 + i / 7 for i in range(8)], [2.0 + i for i in range(8)]
SWITCHED = {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 3}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral: no window": ("mistral", {"sliding_window": NULL}),
    "mistral: window of one": ("mistral", {"sliding_window": 1}),
    "mistral: window of a tile and one": ("mistral", {"sliding_window": 65}),
    "mistral: window by default": ("mistral", {"sliding_window": None}),
    "mistral: heads wider than hidden": ("mistral", {"head_dim": 40, "num_key_value_heads": 1}),
    "qwen2: windows from a layer on": ("qwen2", SWITCHED),
    "qwen2: windows by layer type": (
        "qwen2",
        {**SWITCHED, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "qwen2: tied and untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3: windows from a layer on": ("qwen3", {**SWITCHED, "max_window_layers": 1}),
    "qwen3: biases": ("qwen3", {"attention_bias": True}),
    "gemma3: windows by layer type": (
        "gemma3",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 70},
    ),
    "gemma3: biases, untied": ("gemma3", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3: defaults": (
        "gemma3",
        {
            "hidden_activation": None, "query_pre_attn_scalar": None, "rope_theta": None,
            "rope_local_base_freq": None, "sliding_window_pattern": None, "tie_word_embeddings": None,
            "num_hidden_layers": 6,
        },
    ),
    "gemma3: rope_parameters by layer type": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "rope_theta": None, "rope_local_base_freq": None,
        },
    ),
    "gemma3: linear rope": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3: some channels turn": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3: longrope": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "factor": 4.0, "short_factor": SHORT, "long_factor": LONG}},
    ),
    "linear rope": ("qwen2", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "yarn rope": ("qwen2", {"rope_scaling": YARN}),
    "yarn rope, old spelling": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 256},
    ),
    "yarn rope, all options": (
        "qwen3",
        {"rope_scaling": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False,
                          "mscale": 1.2, "mscale_all_dim": 0.7}},
    ),
    "yarn rope, own attention factor": ("llama", {"rope_scaling": {**YARN, "attention_factor": 0.9}}),
    "yarn rope, original length outside": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 96},
    ),
    "dynamic rope": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
}  # fmt: skip
"""A name → the family, and what its config has other than the family's `tiny` model."""


def write(path: Path, variant: str) -> Path:
    """Write the tiny model of a variant, without an end-of-sequence token."""
    family, overrides = VARIANTS[variant]
    return tiny(path, family, eos_token_id=NULL, **overrides)
