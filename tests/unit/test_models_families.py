"""Every family, position encoding and window against transformers on the same random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import PackedWeight
from sapwood.srt.models.rope import inverse_frequencies
from sapwood.srt.models.weights import Storage
from tests.decoding import (
    Sequence,
    decoder_of,
    greedy_in_mixed_steps,
    is_greedy,
    reference_logits,
    reference_of,
)
from tests.models import NULL, VOCAB, tiny
from tests.variants import LONG, SHORT, VARIANTS, write

IDS = [(i * 37 + 11) % VOCAB for i in range(150)]
"""Longer than every window, and than two tiles of attention."""
PROMPTS = [[(i * step + 5) % VOCAB for i in range(n)] for n, step in ((100, 41), (37, 13), (3, 7), (66, 29))]


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Results do not depend on the threads, but two that wait for each other on busy cores take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    native.load()
    torch.set_num_threads(before)
    torch.set_grad_enabled(True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    native.load(threads=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_ids_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    write(tmp_path, variant)
    reference = reference_of(tmp_path)
    ours, theirs = Sequence(decoder_of(tmp_path), 200).extend(IDS), reference_logits(reference, IDS)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std() > 0.3, "a model whose logits are all alike shows nothing"
    answers = greedy_in_mixed_steps(tmp_path, PROMPTS, 20, chunk=16)
    assert [len(answer) for answer in answers] == [20] * len(PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert is_greedy(reference, prompt, answer)


@pytest.mark.parametrize("storage", ["float32", "float16", "w8", "w4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_layers_in_one_call_equal_op_by_op(tmp_path: Path, variant: str, storage: Storage) -> None:
    decoder = decoder_of(write(tmp_path, variant), storage)
    fused, plain = Sequence(decoder, 200, rows=2, fused=True), Sequence(decoder, 200, rows=2)
    for first, second in ((IDS[:97], IDS[:3]), (IDS[97:98], IDS[3:4]), (IDS[98:], IDS[4:40])):
        assert torch.equal(fused.extend(first, second), plain.extend(first, second))
    assert all(torch.equal(a, b) for a, b in zip(fused.k + fused.v, plain.k + plain.v, strict=True))


@pytest.mark.parametrize("variant", ["mistral", "gemma3", "qwen2: windows from a layer on", "phi3"])
def test_one_extend_equals_decodes_and_chunks_to_the_bit(tmp_path: Path, variant: str) -> None:
    decoder = decoder_of(write(tmp_path, variant))
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


@pytest.mark.parametrize("storage", ["float32", "w8", "w4"])
@pytest.mark.parametrize("variant", ["gemma3", "phi3"])
def test_all_layers_in_one_call_equal_decodes_and_chunks_to_the_bit(
    tmp_path: Path, variant: str, storage: Storage
) -> None:
    """With every instruction set and thread count too; what is expected is one extend, op by op."""
    decoder = decoder_of(write(tmp_path, variant), storage)
    for isa in native.available():
        native.load(isa, threads=1)
        whole = Sequence(decoder, 200)
        expected = whole.extend(IDS)
        for threads in (1, 2):
            native.load(isa, threads)
            for sizes in ([150], [1] * 150, [7] * 21 + [3], [64, 64, 22], [149, 1]):
                part, begin, logits = Sequence(decoder, 200, fused=True), 0, []
                for size in sizes:
                    logits.append(part.extend(IDS[begin : begin + size]))
                    begin += size
                assert torch.equal(torch.cat(logits), expected), (isa, threads, sizes)
                for ours, theirs in zip(part.k + part.v, whole.k + whole.v, strict=True):
                    assert torch.equal(ours, theirs), (isa, threads, sizes)


@pytest.mark.parametrize("wrong", ["qkv", "out", "gate_up", "down", "mlp_norm", "q_norm", "table"])
def test_weights_of_other_shapes_are_not_registered(tmp_path: Path, wrong: str) -> None:
    decoder = decoder_of(write(tmp_path, "gemma3"))
    have = getattr(decoder.layers[1], wrong)
    other = PackedWeight(have.n, have.k + 1, have.format) if isinstance(have, PackedWeight) else have[:-1]
    decoder.layers[1] = replace(decoder.layers[1], **{wrong: other})
    with pytest.raises(ValueError, match=f"{wrong} must be "):
        Sequence(decoder, 200, fused=True)


def test_windows_are_seen_in_the_logits(tmp_path: Path) -> None:
    """A model with a window says other things than the same without, from the first hidden token on."""
    narrow = Sequence(decoder_of(tiny(tmp_path / "a", "mistral", sliding_window=24)), 200).extend(IDS)
    wide = Sequence(decoder_of(tiny(tmp_path / "b", "mistral", sliding_window=NULL)), 200).extend(IDS)
    assert torch.equal(narrow[:24], wide[:24])
    assert (narrow[24:] - wide[24:]).abs().amax(-1).min() > 1e-3


def test_use_sliding_window_false_is_full_attention(tmp_path: Path) -> None:
    with_key = Sequence(decoder_of(tiny(tmp_path / "a", "qwen2", sliding_window=4)), 200).extend(IDS)
    without = Sequence(decoder_of(tiny(tmp_path / "b", "qwen2", sliding_window=NULL)), 200).extend(IDS)
    assert torch.equal(with_key, without)


def test_the_head_and_the_window_of_one_spec(tmp_path: Path) -> None:
    spec = decoder_of(tiny(tmp_path, "gemma3")).spec
    assert spec.windows == (24, 24, 0)
    assert spec.tied
    assert spec.scale == 20**-0.5


@torch.inference_mode()
def test_dynamic_rope_beyond_the_original_length_is_hugging_faces_at_the_served_length(
    tmp_path: Path,
) -> None:
    """Hugging Face's base moves with the sequence; ours is the one it has when the context is full."""
    tiny(
        tmp_path, "llama", max_position_embeddings=100, eos_token_id=None,
        rope_scaling={"type": "dynamic", "factor": 4.0},
    )  # fmt: skip
    reference = reference_of(tmp_path)
    within = Sequence(decoder_of(tmp_path), 200).extend(IDS[:90])
    assert (within - reference_logits(reference, IDS[:90])).abs().max() < 1e-4
    stretched = decoder_of(tmp_path, context_length=150)
    ours, theirs = Sequence(stretched, 200).extend(IDS), reference_logits(reference, IDS)
    assert (ours - theirs).abs().max() < 1e-4
    frequencies = reference.model.rotary_emb.inv_freq
    torch.testing.assert_close(
        inverse_frequencies(stretched.spec.rope, 16, 150), frequencies, rtol=1e-6, atol=0
    )


def test_longrope_beyond_the_original_length_has_the_long_factors(tmp_path: Path) -> None:
    tiny(
        tmp_path, "phi3", sliding_window=None, original_max_position_embeddings=100,
        max_position_embeddings=150,
        rope_scaling={"type": "longrope", "short_factor": SHORT, "long_factor": LONG}, eos_token_id=None,
    )  # fmt: skip
    ours = Sequence(decoder_of(tmp_path), 200).extend(IDS)
    assert (ours - reference_logits(reference_of(tmp_path), IDS)).abs().max() < 1e-4
    short = Sequence(decoder_of(tmp_path, context_length=100), 200).extend(IDS[:90])
    assert (short - reference_logits(reference_of(tmp_path), IDS[:90])).abs().max() < 1e-4
