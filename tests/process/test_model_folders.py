"""Model folders as they come, served: where their EOS ids stand, and what of them is not whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sapwood
from sapwood import Engine
from tests.models import IM_END, random_tensors, save_weights, tiny_llama

ROOT = Path(sapwood.__file__).resolve().parent.parent
A, B = 40, 41
"""Ids of ordinary tokens, which a folder may name as EOS."""

LAYER = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def folder_with(path: Path, config: Any, generation: dict[str, Any] | None, eos_token: str | None) -> Path:
    """A tiny model whose EOS ids stand in these places only."""
    folder = tiny_llama(path, eos_token_id=config, generation=generation)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {**settings, "eos_token": eos_token} if eos_token else {"bos_token": settings["bos_token"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "ends"),
    [
        # Both as lists of generation_config.json, beside a top_k that transformers means as "off" (P18, P14).
        (None, {"eos_token_id": [A, B], "top_k": 0, "do_sample": True}, None, {A, B}),
        (None, None, "<|im_end|>", {IM_END}),
        (A, {"eos_token_id": [B]}, "<|im_end|>", {A, B, IM_END}),
    ],
    ids=["generation_config", "tokenizer", "everywhere"],
)
def test_any_eos_ends_and_is_not_shown(
    tmp_path: Path, config: Any, generation: dict[str, Any] | None, eos_token: str | None, ends: set[int]
) -> None:
    """P50, P18: a bias makes each id in turn the next token."""
    folder = folder_with(tmp_path / "m", config, generation, eos_token)
    with Engine(str(folder), max_total_tokens=1024, log_level="warning") as engine:
        for token in (A, B, IM_END):
            params = {"temperature": 0, "max_new_tokens": 20, "logit_bias": {token: 100.0}}
            answer = engine.generate("A river is", params)
            reason = answer["meta_info"]["finish_reason"]
            if token in ends:
                assert reason["type"] == "stop", token
                assert answer["text"] == ""
            else:
                assert reason["type"] == "length", token
            ignoring = engine.generate("A river is", {**params, "ignore_eos": True})
            assert ignoring["meta_info"]["finish_reason"]["type"] == "length"
            assert ignoring["meta_info"]["completion_tokens"] == 20


def without(name: str) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        tensors = random_tensors(json.loads((folder / "config.json").read_text()), 0, torch.float32)
        del tensors[name]
        save_weights(folder, tensors, 3)

    return break_it


def cut(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-10])


def point_nowhere(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "gone.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (without("lm_head.weight"), "has no tensor lm_head.weight"),
        (without(LAYER), f"has no tensor {LAYER}"),
        (cut, f"{SHARD}: is no whole safetensors file"),
        (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: is missing"),
        (point_nowhere, "gone.safetensors: is missing"),
    ],
    ids=["head", "layer", "cut", "shard", "index"],
)
def test_a_checkpoint_that_is_not_whole_is_never_served(
    tmp_path: Path, break_it: Callable[[Path], None], named: str
) -> None:
    """P52: the start fails, non-zero, with one line that names the tensor or the file."""
    folder = tiny_llama(tmp_path / "m", shards=3, tie_word_embeddings=False)
    break_it(folder)
    ran = serve(folder)
    assert ran.returncode not in (0, None)
    assert named in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_tensor_that_is_not_known_is_no_error(tmp_path: Path) -> None:
    """P52: only a warning."""
    folder = tiny_llama(tmp_path / "m")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.extra.weight": torch.ones(3)}, path)
    with Engine(str(folder), max_total_tokens=512, log_level="error") as engine:
        params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        assert engine.generate("A river is", params)["meta_info"]["completion_tokens"] == 4


def serve(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "sapwood", "serve", str(folder), "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
