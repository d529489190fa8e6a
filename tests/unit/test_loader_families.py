"""GGUF files of every family give the config and the tensors of the Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_model import config_of
from sapwood.srt.loader.gguf_parts import GgufFile
from sapwood.srt.loader.gguf_tokenizer import build
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.registry import architecture_of, spec_of
from tests.gguf_files import ARCHITECTURES, family_config, spm_metadata, tiny_gguf
from tests.models import FAMILIES, save_weights, source_of, tiny

EXACT = {"rms_norm_eps": 2.0**-17}
"""What a GGUF file keeps in float32 without rounding."""

SAYS = {"gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window_pattern": 6}}
"""Configs that a GGUF file can express: of Gemma 3 it has neither the scale of scores nor the period."""


def overrides(family: str, **more: Any) -> dict[str, Any]:
    return {**EXACT, **SAYS.get(family, {}), **more}


def gguf_spec(path: Path, family: str, metadata: dict[str, Any] | None = None, **more: Any) -> Any:
    tiny_gguf(path, family=family, metadata=metadata, **overrides(family, **more))
    return spec_of(config_of(GgufFile(path)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_describes_the_same_decoder(tmp_path: Path, family: str, tied: bool) -> None:
    config = family_config(family, **overrides(family, tie_word_embeddings=tied))
    found = gguf_spec(tmp_path / "m.gguf", family, tie_word_embeddings=tied)
    assert found == spec_of(config)
    source = source_of(tmp_path / "m.gguf", skip_tokenizer_init=True)
    assert source.architecture == architecture_of(config)
    assert source.context_length == config["max_position_embeddings"]


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_of_the_folder(tmp_path: Path, family: str, kind: str) -> None:
    put = tiny_gguf(tmp_path / "m.gguf", family=family, kind=kind, **overrides(family))
    folder = tiny(tmp_path / "hf", family, weights=False, **overrides(family))
    if kind != "f32":
        q8 = gguf.GGMLQuantizationType.Q8_0
        put = {
            name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(t.numpy(), q8), q8))
            if t.dim() == 2
            else t
            for name, t in put.items()
        }
    save_weights(folder, {name: t.contiguous() for name, t in put.items()})
    ours = open_weights(source_of(tmp_path / "m.gguf", skip_tokenizer_init=True))
    theirs = open_weights(source_of(folder))
    assert ours.names() == theirs.names() == put.keys()
    for name in ours.names():
        if family == "gemma3" and name.endswith("norm.weight"):  # went through + 1 - 1
            assert torch.equal(ours.vector(name) + 1, theirs.vector(name) + 1), name
        else:
            assert torch.equal(ours.vector(name), theirs.vector(name)), name
        if ours.vector(name).dim() == 2:
            packed = [w.linear([name], "float32").unpack() for w in (ours, theirs)]
            assert torch.equal(*packed), name


def test_only_gemma_and_llama_files_are_put_right(tmp_path: Path) -> None:
    """The fixes are the family's own: a Qwen file's rows and norms are as they are."""
    for family in FAMILIES:
        tensors = tiny_gguf(tmp_path / "m.gguf", family=family, **overrides(family))
        file = GgufFile(tmp_path / "m.gguf")
        changed = {
            own
            for own, name in [("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
                              ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight")]
            if name in tensors and file.raw(own).tobytes() != tensors[name].numpy().tobytes()
        }  # fmt: skip
        expected = {"llama": {"blk.0.attn_k.weight"}, "gemma3": {"blk.0.attn_norm.weight"}}
        assert changed == expected.get(ARCHITECTURES[family], set()), family


ODD = [np.array([1, 2, 3]), ["a", "b"], [], "x", -1, 0, 1.5, True, 2**63, np.array([np.nan]), float("nan")]


@pytest.mark.parametrize("spm", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_metadata_are_refused_by_name_or_do_no_harm(tmp_path: Path, family: str, spm: bool) -> None:
    pieces = {piece: -float(i) for i, piece in enumerate(["\u2581", "ab", "abc", *"abc"])}
    metadata: dict[str, Any] = {**spm_metadata(pieces), "tokenizer.ggml.merges": None} if spm else {}
    tiny_gguf(tmp_path / "m.gguf", family=family, metadata=metadata, **overrides(family))
    refused = 0
    for key in GgufFile(tmp_path / "m.gguf").metadata:
        for odd in ODD:
            file = GgufFile(tmp_path / "m.gguf")
            file.metadata[key] = odd
            try:
                spec_of(config_of(file))
                build(file.metadata, file.path)
            except ModelError:
                refused += 1
    assert refused > 50


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}


@pytest.mark.parametrize(
    ("family", "metadata", "scaling"),
    [
        ("llama", {"rope.freq_base": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ("llama", LINEAR, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope.scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ("llama", {**LINEAR, "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ("qwen2", YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
        (
            "qwen3",
            {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0,
             "beta_slow": 2.0},
        ),
    ],
)  # fmt: skip
def test_position_encodings(
    tmp_path: Path, family: str, metadata: dict[str, Any], scaling: dict[str, Any]
) -> None:
    given = {f"{ARCHITECTURES[family]}.{key}": value for key, value in metadata.items()}
    theta = scaling.get("rope_theta", 10000.0)
    expected = family_config(
        family, **overrides(family), rope_theta=None, rope_parameters={"rope_theta": theta, **scaling}
    )
    assert gguf_spec(tmp_path / "m.gguf", family, given) == spec_of(expected)


def test_the_attention_factor_of_yarn_comes_on_top(tmp_path: Path) -> None:
    given = {f"qwen2.{key}": value for key, value in {**YARN, "rope.scaling.attn_factor": 0.5}.items()}
    plain = gguf_spec(tmp_path / "a.gguf", "qwen2", {f"qwen2.{k}": v for k, v in YARN.items()}).rope.scaling
    assert plain > 1
    assert gguf_spec(tmp_path / "b.gguf", "qwen2", given).rope.scaling == pytest.approx(plain / 2)


def test_gemma_scales_only_the_layers_that_see_all(tmp_path: Path) -> None:
    given = {f"gemma3.{key}": value for key, value in LINEAR.items()}
    expected = family_config(
        "gemma3", **overrides("gemma3"), rope_scaling={"rope_type": "linear", "factor": 4.0}
    )
    assert gguf_spec(tmp_path / "m.gguf", "gemma3", given) == spec_of(expected)


def test_gemma_may_say_its_layers_and_its_local_base(tmp_path: Path) -> None:
    given = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 5000.0}
    expected = family_config(
        "gemma3", **overrides("gemma3", sliding_window_pattern=2, rope_local_base_freq=5000.0)
    )
    assert gguf_spec(tmp_path / "m.gguf", "gemma3", given) == spec_of(expected)
    each = [True, False, False, True, True, True, False]
    given = {"gemma3.attention.sliding_window_pattern": each}
    found = gguf_spec(tmp_path / "m.gguf", "gemma3", given)
    assert found.windows == tuple(24 if slides else 0 for slides in each)


def test_gemma_27b_has_its_own_scale(tmp_path: Path) -> None:
    """Its scores are divided by the root of 5376 / 32 = 168, not of the head's 128."""
    given = {"gemma3.attention.sliding_window_pattern": 6}
    config = {"num_hidden_layers": 62, "hidden_size": 80, "intermediate_size": 32}
    assert gguf_spec(tmp_path / "m.gguf", "gemma3", given, **config).query_scalar == 80 / 4


def test_llama_3_keeps_its_factors_as_a_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tiny_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    rope = spec_of(config_of(GgufFile(tmp_path / "m.gguf"))).rope
    assert rope.kind == "factors"
    assert rope.factors == tuple(factors.tolist())
    opened = open_weights(source_of(tmp_path / "m.gguf", skip_tokenizer_init=True))
    assert "rope_freqs.weight" not in opened.names()


def test_phi_3_keeps_two_tables_of_factors(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 40, 8, dtype=np.float32)
    metadata = {
        "phi3.rope.scaling.original_context_length": 128,
        "phi3.rope.scaling.attn_factor": 1.25,
        "phi3.attention.sliding_window": 0,
    }
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    tiny_gguf(tmp_path / "m.gguf", family="phi3", metadata=metadata, extra=extra, **EXACT)
    longrope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short.tolist(),
        "long_factor": long.tolist(), "attention_factor": 1.25,
    }  # fmt: skip
    expected = family_config(
        "phi3", **EXACT, rope_theta=None, rope_parameters=longrope, sliding_window=None,
        original_max_position_embeddings=128,
    )  # fmt: skip
    assert spec_of(config_of(GgufFile(tmp_path / "m.gguf"))) == spec_of(expected)


def test_phi_3_may_turn_a_part_of_a_head(tmp_path: Path) -> None:
    expected = family_config("phi3", **EXACT, partial_rotary_factor=0.75)
    assert gguf_spec(tmp_path / "m.gguf", "phi3", partial_rotary_factor=0.75) == spec_of(expected)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        (
            "llama",
            {"general.architecture": "mamba"},
            "'mamba' is not supported; .*: llama, qwen2, qwen3",
        ),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [True]}, "sliding_window_pattern is"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen3", {"qwen3.attention.head_count_kv": [2, 2]}, "qwen3.attention.head_count_kv is .*one number"),
        ("qwen2", {"qwen2.attention.value_length": 8}, "value length 8"),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, family: str, metadata: dict[str, Any], message: str
) -> None:
    tiny_gguf(tmp_path / "m.gguf", family=family, metadata=metadata, **overrides(family))
    with pytest.raises(ModelError, match=message):
        source_of(tmp_path / "m.gguf", skip_tokenizer_init=True)
