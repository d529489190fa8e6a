"""The decoder against transformers: tiny Llamas of many shapes (the packaged model: test_loader_tied.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.kernels import native
from sapwood.srt.errors import ModelError
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.rope import inverse_frequencies
from tests.decoding import Sequence, decoder_of, is_greedy, reference_logits, reference_of
from tests.gguf_files import tiny_gguf
from tests.models import source_of, tiny_llama

IDS = [(i * 37 + 11) % 331 for i in range(150)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Results do not depend on the threads, but two that wait for each other on busy cores take minutes."""
    before = torch.get_num_threads()
    native.load(threads=1)
    torch.set_num_threads(1)
    yield
    native.load()
    torch.set_num_threads(before)


SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "head_dim 24, 3 queries a KV head": {
        "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
    },
    "heads wider than hidden": {"head_dim": 40, "num_key_value_heads": 1},
    "one head each": {"num_key_value_heads": 4, "head_dim": 18},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "wide vocabulary": {"vocab_size": 331 + 64},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_logits_and_greedy_ids_are_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    tiny_llama(tmp_path, shards=2, eos_token_id=None, **shape)
    decoder, reference = decoder_of(tmp_path), reference_of(tmp_path)
    ours, theirs = Sequence(decoder, 200).extend(IDS), reference_logits(reference, IDS)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std() > 0.3, "a model whose logits are all alike shows nothing"
    assert is_greedy(reference, IDS[:20], Sequence(decoder, 200).greedy(IDS[:20], 24))


def test_what_transformers_saves_is_loaded(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=331, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).train(False)
    model.generation_config.update(eos_token_id=[2, 7], do_sample=True, temperature=0.5)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    source = source_of(tmp_path, skip_tokenizer_init=True)
    assert len(source.files) > 1
    assert set(source.eos_ids) == {2, 7}
    assert source.sampling_defaults["temperature"] == 0.5
    ours = Sequence(decoder_of(tmp_path), 200).extend(IDS)
    assert (ours - reference_logits(model, IDS)).abs().max() < 1e-4


def test_one_extend_equals_decodes_and_chunks_to_the_bit(tmp_path: Path) -> None:
    tiny_llama(tmp_path, attention_bias=True, mlp_bias=True)
    decoder = decoder_of(tmp_path)
    whole = Sequence(decoder, 200)
    expected = whole.extend(IDS)
    for sizes in ([1] * 150, [7] * 21 + [3], [64, 64, 22], [149, 1]):
        part, begin, logits = Sequence(decoder, 200), 0, []
        for size in sizes:
            logits.append(part.extend(IDS[begin : begin + size]))
            begin += size
        assert torch.equal(torch.cat(logits), expected)
        for ours, theirs in zip(part.k + part.v, whole.k + whole.v, strict=True):
            assert torch.equal(ours, theirs)


def test_a_gguf_gives_the_bits_of_the_same_safetensors(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", tie_word_embeddings=False)
    # A GGUF keeps its epsilon as float32.
    tiny_llama(tmp_path / "folder", tie_word_embeddings=False, rms_norm_eps=float(torch.tensor(1e-5)))
    ours, theirs = (decoder_of(tmp_path / name) for name in ("m.gguf", "folder"))
    assert torch.equal(Sequence(ours, 200).extend(IDS), Sequence(theirs, 200).extend(IDS))


def test_float16_storage_is_half_the_bytes_and_close(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    full, half = decoder_of(tmp_path), decoder_of(tmp_path, "float16")
    for ours, theirs in zip(half.layers, full.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            assert getattr(ours, name).nbytes * 2 == getattr(theirs, name).nbytes
    assert half.embedding.nbytes * 2 == full.embedding.nbytes
    difference = (Sequence(full, 200).extend(IDS) - Sequence(half, 200).extend(IDS)).abs().max()
    assert 0 < difference < 0.05


def test_buffers_that_have_grown_change_nothing(tmp_path: Path) -> None:
    decoder = decoder_of(tiny_llama(tmp_path))
    short = Sequence(decoder, 200).extend(IDS[:3])
    Sequence(decoder, 200).extend(IDS)
    assert torch.equal(Sequence(decoder, 200).extend(IDS[:3]), short)


def test_an_id_or_position_outside_is_refused(tmp_path: Path) -> None:
    decoder = decoder_of(tiny_llama(tmp_path, max_position_embeddings=8))
    for wrong in ([331], [-1]):
        with pytest.raises(IndexError, match=f"token id {wrong[0]} "):
            Sequence(decoder, 16).extend(wrong)
    with pytest.raises(IndexError, match="position 8 must be from 0 to 7"):
        Sequence(decoder, 16).extend(IDS[:9])


def test_rope_factors_of_a_gguf_divide_the_frequencies(tmp_path: Path) -> None:
    spec = spec_of({**_config(tmp_path), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    plain = inverse_frequencies(spec.rope, 16)
    factors = tuple(float(f) for f in range(1, 9))
    divided = inverse_frequencies(replace(spec.rope, kind="factors", factors=factors), 16)
    assert torch.equal(divided, plain / torch.tensor(factors))
    with pytest.raises(ModelError, match="rope factors must be 8 positive numbers, got 3"):
        spec_of({**_config(tmp_path), "rope_parameters": {"rope_type": "factors", "factors": [1, 2, 3]}})


def _config(tmp_path: Path) -> dict[str, Any]:
    return source_of(tiny_llama(tmp_path)).config
