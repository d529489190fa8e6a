"""What a config may say: the architectures there are, and refusals that name key, value and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.registry import longest_context, spec_of, supported
from sapwood.srt.models.rope_config import rotary_of
from sapwood.srt.models.spec import tensor_shapes
from tests.models import CONFIG, FAMILIES, NULL, random_tensors, save_weights, source_of, tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    config = {**CONFIG, **FAMILIES[family], **overrides}
    return {k: None if v is NULL else v for k, v in config.items() if v is not None}


def test_every_row_has_a_tiny_model() -> None:
    named = {config_of(family)["architectures"][0] for family in FAMILIES}
    assert named == set(supported())


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_another_architecture_is_refused_with_the_list_of_what_there_is(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is not supported") as error:
        spec_of(config_of("llama", architectures=[name]))
    assert ", ".join(supported()) in error.value.message


def test_a_model_with_an_image_tower_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ModelError, match="image tower is not served; a text-only checkpoint"):
        spec_of(config_of("gemma3", architectures=["Gemma3ForConditionalGeneration"]))


def test_a_share_that_is_a_quotient_gives_its_channels_back() -> None:
    """30 / 88 * 88 is a little less than 30."""
    for head_dim in range(4, 257, 2):
        for rotary in range(2, head_dim + 1, 2):
            assert rotary_of({"partial_rotary_factor": rotary / head_dim}, head_dim) == rotary


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0, which is not supported"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0, which is not supported"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True, which is not"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'; supported: silu, swish, gelu_"),
    ("gemma3", {"sliding_window": NULL}, "sliding_window = None; it must be a whole number"),
    ("gemma3", {"layer_types": ["full_attention"]}, "it must be a list of 3 of 'full_attention' and"),
    ("gemma3", {"layer_types": ["linear_attention"] * 3}, "it must be a list of 3 of 'full_attention' and"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0; it must be a positive number"),
    ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'; supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "turns 8 of 16 channels; this architecture turns all"),
    ("phi3", {"partial_rotary_factor": 0.2}, "which turns 3 of 16 channels; it must be an even number"),
    ("phi3", {"partial_rotary_factor": 1.5}, "which turns 24 of 16 channels; it must be an even number"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0; it must be a whole number from 1"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window = 1; it must be true or false"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers = -1; it must be"),
    ("qwen2", {"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope'; supported: default, linear, "),
    ("qwen2", {"rope_scaling": 3}, "rope_scaling = 3; it must be an object"),
    ("qwen2", {"rope_scaling": {**YARN, "factor": -1}}, "factor = -1; it must be a positive number"),
    ("qwen2", {"rope_scaling": {**YARN, "attention_factor": "x"}}, "attention_factor = 'x'; it must be"),
    ("qwen2", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0; 'yarn' needs it above 1"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor = 0.5 for its rotary encoding"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "has one for all"),
    (
        "phi3",
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
        r"rope factors must be 8 positive numbers, got 7: short_factor = ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(
    family: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        spec_of(config_of(family, **overrides))
    assert message in error.value.message


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ({}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 1280),
        ({"rope_scaling": YARN}, 512),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 1024),
    ],
)
def test_longest_context(overrides: dict[str, Any], longest: int) -> None:
    assert longest_context(config_of("llama", **overrides)) == longest


def test_every_tensor_of_a_family_is_asked_for_by_name(tmp_path: Path) -> None:
    """A checkpoint that lacks one of the tensors that only its family has is refused, naming it."""
    for family, name in (
        ("gemma3", "model.layers.1.pre_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.0.post_feedforward_layernorm.weight"),
        ("gemma3", "model.layers.2.self_attn.q_norm.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
        ("mistral", "lm_head.weight"),
    ):
        path = tiny(tmp_path / family, family)
        source = source_of(path, skip_tokenizer_init=True)
        tensors = random_tensors(source.config, 0, torch.float32)
        assert set(tensors) == set(tensor_shapes(spec_of(source.config)))
        del tensors[name]
        save_weights(path, tensors)
        with pytest.raises(ModelError, match=f"has no tensor {name}"):
            open_weights(source)
