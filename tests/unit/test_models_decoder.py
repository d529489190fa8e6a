"""The decoder against transformers: tiny Llamas of many shapes, then the packaged model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.attention import attend
from sapwood.srt.errors import ModelError
from sapwood.srt.loader.weights import Weights, open_weights
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.registry import Row, spec_from_row, spec_of
from sapwood.srt.models.rope import inverse_frequencies
from sapwood.srt.models.spec import DecoderSpec
from tests.gguf_files import tiny_gguf
from tests.models import default_source, default_tokenizer, source_of, tiny_llama

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


@dataclass
class Sequence:
    """One row in a pool of its own: extends by some tokens and tells their logits."""

    decoder: Decoder
    room: int
    length: int = 0
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.decoder.spec
        self.k, self.v = (
            [torch.zeros(self.room, spec.kv_heads, spec.head_dim) for _ in range(spec.layers)] for _ in "kv"
        )
        self.table = torch.randperm(self.room, generator=torch.Generator().manual_seed(3)).int()[None]

    def extend(self, ids: list[int]) -> Tensor:
        positions = torch.arange(self.length, self.length + len(ids), dtype=torch.int32)
        batch = Batch(
            ids=torch.tensor(ids, dtype=torch.int32),
            positions=positions,
            slots=self.table[0, positions.long()],
            rows=torch.zeros(1, dtype=torch.int32),
            starts=torch.tensor([self.length], dtype=torch.int32),
            counts=torch.tensor([len(ids)], dtype=torch.int32),
        )
        self.length += len(ids)
        hidden = self.decoder.forward(batch, self, self._attend)
        return self.decoder.logits(hidden, torch.arange(len(ids), dtype=torch.int32)).clone()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        found = [int(self.extend(prompt)[-1].argmax())]
        while len(found) < count:
            found.append(int(self.extend(found[-1:])[-1].argmax()))
        return found

    def _attend(self, layer: int, qkv: Tensor, batch: Batch, out: Tensor) -> None:
        spec = self.decoder.spec
        attend(
            qkv, self.k[layer], self.v[layer], self.table, batch.rows, batch.starts, batch.counts,
            spec.q_heads, spec.kv_heads, spec.head_dim, spec.scale, out,
        )  # fmt: skip


def decoder_of(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    source = source_of(path, skip_tokenizer_init=True)
    return Decoder(spec_of(source.config), open_weights(source), dtype, source.context_length)


def reference_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of the answer is the most likely one after what comes before it."""
    logits = reference_logits(model, prompt + answer[:-1])
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == answer


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
    full, half = decoder_of(tmp_path), decoder_of(tmp_path, torch.float16)
    assert half.nbytes * 2 == full.nbytes
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


def test_qk_norm_is_that_of_qwen3(tmp_path: Path) -> None:
    """The switch that no registered row uses yet, so that the row to come only has to name it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(6)
    config = Qwen3Config(
        vocab_size=331, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train(False)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, 1.0, 0.2)
    spec = spec_from_row(config.to_dict(), Row(qkv_bias="attention_bias", qk_norm=True))
    decoder = Decoder(spec, _Direct(dict(model.state_dict()), spec).weights, torch.float32, 256)
    ours = Sequence(decoder, 200).extend(IDS)
    assert (ours - reference_logits(model, IDS)).abs().max() < 1e-4


class _Direct:
    """Tensors of a running model as a reader."""

    place = "memory"

    def __init__(self, tensors: dict[str, Tensor], spec: DecoderSpec) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.weights = Weights(self, spec)

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().clone()

    def pack(self, names: Any, dtype: torch.dtype) -> Any:
        from sapwood.kernels.ops.gemm import pack

        return pack(torch.cat([self.read(name) for name in names]), dtype)


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


@pytest.fixture(scope="module")
def packaged() -> tuple[Decoder, Any]:
    """The packaged model, and transformers with the same dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    source = default_source()
    weights = open_weights(source)
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**source.config)).train(False)
    unset = model.load_state_dict({n: weights.vector(n) for n in weights.names()}, strict=False)
    assert unset.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return Decoder(spec_of(source.config), weights, torch.float32, source.context_length), model


@pytest.mark.parametrize("question", ["What is the capital of France?", "Write one line about rivers."])
def test_the_packaged_model_says_what_transformers_says(packaged: tuple[Decoder, Any], question: str) -> None:
    decoder, reference = packaged
    tokenizer = default_tokenizer()
    prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
    ours, theirs = Sequence(decoder, 128).extend(prompt), reference_logits(reference, prompt)
    assert (ours - theirs).abs().max() < 1e-3
    answer = Sequence(decoder, 128).greedy(prompt, 16)
    assert is_greedy(reference, prompt, answer)
    if "France" in question:
        assert tokenizer.decode(answer).startswith("The capital of France is Paris.")
