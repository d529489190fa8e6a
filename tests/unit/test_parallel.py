"""A model shared out among ranks: the parts make the whole, and together they compute what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import linear
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.parallel import Group, shard_of
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.models.weights import Part, Storage
from tests.decoding import Sequence, decoder_of
from tests.gguf_files import tiny_gguf
from tests.models import CONFIG, source_of, tiny, tiny_llama
from tests.ranks import together

IDS = [(i * 37 + 11) % 331 for i in range(90)]
WIDE = {"intermediate_size": 200}
"""Four blocks of inner channels, the last of which is short."""
THREE_HEADS = {**WIDE, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
ONE_HEAD = {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 1}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    native.load(threads=1)
    torch.set_num_threads(1)
    yield
    native.load()
    torch.set_num_threads(before)


SPEC = spec_of(CONFIG)

specs = st.builds(
    lambda kv, group, inner, vocab: replace(
        SPEC, kv_heads=kv, q_heads=kv * group, intermediate=inner, vocab=vocab
    ),
    st.integers(1, 16), st.integers(1, 12), st.integers(1, 2000), st.integers(1, 3000),
)  # fmt: skip


@settings(deadline=None)
@given(specs, st.integers(1, 24))
def test_the_parts_of_all_ranks_are_the_whole_and_no_more(spec: DecoderSpec, size: int) -> None:
    try:
        shard_of(spec, 0, size)
    except ConfigError:
        return
    # What the launcher asks of rank 0 holds of every rank.
    shards = [shard_of(spec, rank, size) for rank in range(size)]
    group = spec.q_heads // spec.kv_heads
    for whole, parts in (
        (spec.q_heads, [s.q_heads for s in shards]),
        (spec.intermediate, [s.inner for s in shards]),
        (spec.vocab, [s.vocab for s in shards]),
    ):
        assert [i for part in parts for i in part] == list(range(whole))
        assert min(map(len, parts)) > 0
    for s in shards:
        # In a rank's own attention, query head i reads KV head i // (its query heads / its KV heads).
        each, rest = divmod(len(s.q_heads), len(s.kv_heads))
        assert rest == 0
        assert [s.kv_heads[i // each] for i in range(len(s.q_heads))] == [q // group for q in s.q_heads]


@pytest.mark.parametrize(
    ("changes", "size", "said"),
    [
        ({"kv_heads": 2, "q_heads": 6}, 4, "4 does not fit 6 query heads on 2 KV heads"),
        ({"kv_heads": 3, "q_heads": 9}, 4, "4 does not fit 9 query heads on 3 KV heads"),
        ({"intermediate": 64}, 2, "2 is too large: 64 inner channels"),
        ({"vocab": 64, "intermediate": 512}, 2, "2 is too large: 64 tokens"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused(changes: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {said}") as caught:
        shard_of(replace(SPEC, **changes), 0, size)
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.parametrize("storage", ["float32", "w8"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_sum_of_the_parts_products_is_the_whole_product(
    tmp_path: Path, size: int, storage: Storage
) -> None:
    tiny_llama(tmp_path, intermediate_size=500, num_attention_heads=6, num_key_value_heads=6, head_dim=32)
    source = source_of(tmp_path, skip_tokenizer_init=True)
    weights, spec = open_weights(source), spec_of(source.config)
    shards = [shard_of(spec, rank, size) for rank in range(size)]
    heads = [range(32 * s.q_heads.start, 32 * s.q_heads.stop) for s in shards]
    for name, cuts in (("mlp.down_proj", [s.inner for s in shards]), ("self_attn.o_proj", heads)):
        part = Part(f"model.layers.1.{name}.weight")
        whole = weights.linear([part], storage)
        x = torch.randn(7, whole.k, generator=torch.Generator().manual_seed(size))
        wanted, total, product = torch.empty(7, 64), torch.zeros(7, 64), torch.empty(7, 64)
        linear(x, whole, wanted)
        for cut in cuts:
            own = x[:, cut.start : cut.stop].contiguous()
            linear(own, weights.linear([part._replace(columns=cut)], storage), product)
            total += product
        torch.testing.assert_close(total, wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", "q4_1", "q6_k"])
def test_a_cut_of_a_stored_matrix_has_the_values_of_the_whole(tmp_path: Path, kind: str) -> None:
    """Quantised ones are cut as codes: nothing is rounded again."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    tiny_gguf(tmp_path / "m.gguf", kind=kind, num_attention_heads=6, num_key_value_heads=3, **sizes)
    source = source_of(tmp_path / "m.gguf", skip_tokenizer_init=True)
    weights, spec = open_weights(source), spec_of(source.config)

    def values(part: Part) -> torch.Tensor:
        return weights.linear([part], "stored").unpack()

    layer = "model.layers.0"
    down, out, gate = (
        Part(f"{layer}.{name}.weight") for name in ("mlp.down_proj", "self_attn.o_proj", "mlp.gate_proj")
    )
    for size in (2, 3):
        for s in (shard_of(spec, rank, size) for rank in range(size)):
            heads = range(128 * s.q_heads.start, 128 * s.q_heads.stop)
            for whole, cut in ((down, s.inner), (out, heads)):
                assert torch.equal(
                    values(whole._replace(columns=cut)), values(whole)[:, cut.start : cut.stop]
                )
            rows = gate._replace(rows=s.inner)
            assert torch.equal(values(rows), values(gate)[s.inner.start : s.inner.stop])


def test_columns_that_part_a_group_of_codes_are_refused_by_name(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", kind="q8_0")
    weights = open_weights(source_of(tmp_path / "m.gguf", skip_tokenizer_init=True))
    for columns in (range(16, 64), range(48)):
        part = Part("model.layers.0.self_attn.o_proj.weight", columns=columns)
        with pytest.raises(ModelError, match=r"o_proj.*Q8_0 .*groups of 32.*--tensor-parallel-size"):
            weights.linear([part], "stored")


@pytest.mark.parametrize("storage", ["w8", "w4"])
def test_columns_that_part_a_group_to_be_rounded_are_refused_by_name(
    tmp_path: Path, storage: Storage
) -> None:
    """They would be rounded otherwise than as a whole."""
    weights = open_weights(source_of(tiny_llama(tmp_path), skip_tokenizer_init=True))
    for columns in (range(16, 64), range(48)):
        part = Part("model.layers.0.self_attn.o_proj.weight", columns=columns)
        with pytest.raises(ModelError, match=r"o_proj.*groups of 32.*--tensor-parallel-size"):
            weights.linear([part], storage)
        assert weights.linear([part], "float32").k == len(columns)


@pytest.mark.parametrize("kind", ["w8", "q8_0", "q6_k", "f32"])
def test_heads_that_part_groups_are_refused_before_anything_is_loaded(tmp_path: Path, kind: str) -> None:
    """With the sizes that do. Of 16 heads of 16 channels on five ranks three are the first one's: their 48
    inputs part a group of 32, but none of 16."""
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 16, "intermediate_size": 512}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    if kind == "w8":
        path = tiny_llama(tmp_path, **sizes, **heads)
    else:
        path = tmp_path / "m.gguf"
        tiny_gguf(path, kind=kind, **sizes, **heads)
    given: dict[str, Any] = {"skip_tokenizer_init": True, "quantization": "w8" if kind == "w8" else "none"}
    if kind in ("w8", "q8_0"):
        said = "--tensor-parallel-size 5 .*groups of 32 inputs.* head_dim 16, .* 1, 2 or 4$"
        with pytest.raises(ConfigError, match=said) as caught:
            source_of(path, **given, tensor_parallel_size=5)
        assert caught.value.param == "tensor_parallel_size"
    else:
        source_of(path, **given, tensor_parallel_size=5)
    source_of(path, **given, tensor_parallel_size=4)


def logits_of(path: Path, size: int, calls: list[list[int]], storage: Storage = "float32") -> Any:
    """Each rank's logits of one row that is extended by the ids of each call in turn."""
    source = source_of(path, skip_tokenizer_init=True)

    def work(group: Group) -> torch.Tensor:
        weights = open_weights(source)
        ops = CpuOps(storage, source.vocab_size)
        decoder = Decoder(spec_of(source.config), weights, ops, source.context_length, group)
        row = Sequence(decoder, 200)
        return torch.cat([row.extend(ids) for ids in calls])

    return together(size, work)


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        ("llama", 2, WIDE),
        ("llama", 2, {**WIDE, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("llama", 2, THREE_HEADS),  # two KV heads and one
        ("llama", 3, THREE_HEADS),
        ("llama", 4, ONE_HEAD),  # which all have
        ("qwen2", 2, WIDE),
        ("qwen3", 2, WIDE),
        ("gemma3", 2, WIDE),
        ("gemma3", 4, WIDE),  # two ranks a KV head
        ("phi3", 2, WIDE),
        ("mistral", 2, WIDE),
    ],
)
def test_ranks_together_give_the_logits_of_the_whole(
    tmp_path: Path, family: str, size: int, changes: dict[str, Any]
) -> None:
    tiny(tmp_path, family, **changes)
    whole = Sequence(decoder_of(tmp_path), 200).extend(IDS)
    first, *others = logits_of(tmp_path, size, [IDS])
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    assert torch.equal(first.argmax(-1), whole.argmax(-1))
    for other in others:
        assert torch.equal(other, first), "every rank has the same logits"


@pytest.mark.parametrize("storage", ["float32", "w8"])
def test_ranks_together_are_exact(tmp_path: Path, storage: Storage) -> None:
    """One extend of n tokens equals chunks of it, and n decodes: `==`."""
    tiny_llama(tmp_path, **{**THREE_HEADS, "head_dim": 32})
    ids = IDS[:40]
    first = logits_of(tmp_path, 2, [ids], storage)
    assert torch.equal(first[0], first[1])
    for calls in ([ids[:17], ids[17:18], ids[18:]], [[i] for i in ids]):
        assert torch.equal(logits_of(tmp_path, 2, calls, storage)[0], first[0])


@pytest.mark.parametrize("wrong", [331, -1])
def test_an_id_that_no_rank_has_is_refused_by_all(tmp_path: Path, wrong: int) -> None:
    tiny_llama(tmp_path, **WIDE)
    with pytest.raises(IndexError, match=f"token id {wrong} is not from 0 to 330"):
        logits_of(tmp_path, 2, [[5, wrong, 6]])
