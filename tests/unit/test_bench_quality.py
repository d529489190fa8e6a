"""The quality bench: its intervals, its questions, and both sides' numbers on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bench.quality import Mode, Ours, Reference, chosen_modes, main
from bench.quality_data import Item, chunks, encoded, items_of, text_of
from bench.quality_stats import Divergence, choice_summary, paired_difference, wilson
from tests.models import VOCAB, source_of, tiny_llama

GSM8K = [
    {"question": f"How much is {n} + {n}?", "answer": f"It is {n}+{n}={2 * n}.\n#### {2 * n}"}
    for n in range(3, 12)
]
MT_BENCH = [{"turns": [f"Write a poem of {n} lines.", f"Make it {n} lines shorter."]} for n in range(20, 28)]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe (1998), Statistics in Medicine 17, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_a_paired_difference_counts_only_items_that_differ() -> None:
    ours = [True] * 50 + [True] * 8 + [False] * 2 + [False] * 40
    reference = [True] * 50 + [False] * 8 + [True] * 2 + [False] * 40
    difference, low, high = paired_difference(ours, reference)
    assert difference == pytest.approx(0.06)
    assert low == pytest.approx(6 / 102 - 1.959964 * math.sqrt(11 - 36 / 102) / 102)
    assert high == pytest.approx(6 / 102 + 1.959964 * math.sqrt(11 - 36 / 102) / 102)
    same, low, high = paired_difference(ours, ours)
    assert same == 0
    assert low < 0 < high


def test_divergence_of_equal_logits_is_none() -> None:
    found, logits = Divergence(), torch.randn(6, 11)
    found.add([1, 2, 3, 4, 5, 6], logits, logits.clone())
    row = found.summary()
    assert (row["perplexity_ratio"], row["agreement"], row["kl"], row["error_max"]) == (1.0, 1.0, 0.0, 0.0)
    losses = -logits.log_softmax(-1)[torch.arange(5), torch.arange(2, 7)]
    assert row["perplexity"] == pytest.approx(losses.mean().exp().item())


def test_divergence_adds_chunks_up() -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(2, 8, 13, generator=generator)
    ours = reference + 0.3 * torch.randn(2, 8, 13, generator=generator)
    ids = torch.randint(13, (2, 8), generator=generator)
    found = Divergence()
    for chunk in range(2):
        found.add(ids[chunk].tolist(), reference[chunk], ours[chunk])
    row = found.summary()
    want, got = (x.double().log_softmax(-1) for x in (reference, ours))
    following = ids[:, 1:, None]
    more = (want - got)[:, :-1].gather(2, following).flatten()
    assert row["positions"] == 16
    assert row["perplexity_ratio"] == pytest.approx(more.mean().exp().item(), rel=1e-5)
    low, high = row["perplexity_ratio_interval"]
    assert (low * high) ** 0.5 == pytest.approx(row["perplexity_ratio"])
    reach = 1.959964 * more.std(correction=0).item() / 14**0.5
    assert math.log(high / low) / 2 == pytest.approx(reach, rel=1e-4)
    assert row["kl"] == pytest.approx((want.exp() * (want - got)).sum(-1).mean().item(), rel=1e-4)
    assert row["agreement"] == (want.argmax(-1) == got.argmax(-1)).double().mean().item()
    largest = reference.abs().max().item()
    assert row["error_max"] == pytest.approx((ours - reference).abs().max().item() / largest)
    rms = (ours - reference).square().mean().sqrt().item()
    assert row["error_rms"] == pytest.approx(rms / largest, rel=1e-5)


def test_choices_are_summed_up() -> None:
    row = choice_summary([0, 1, 2, 3], [0, 1, 1, 2], [0, 1, 2, 0], 4)
    assert (row["accuracy"], row["accuracy_reference"], row["difference"]) == (0.75, 0.5, 0.25)
    assert (row["items"], row["chance"], row["same_choice"]) == (4, 0.25, 0.5)


def test_chunks_come_from_all_texts_and_do_not_overlap_needlessly() -> None:
    texts = [list(range(100)), list(range(1000, 1012)), [7] * 3]
    found = chunks(texts, 10, 5)
    assert [len(chunk) for chunk in found] == [10] * 5
    assert found[-1] == list(range(1000, 1010))
    assert [chunk[0] for chunk in found[:4]] == [0, 30, 60, 90]
    with pytest.raises(SystemExit, match="hold 11 chunks of 10 tokens, 12 were asked for"):
        chunks(texts, 10, 12)


def test_texts_are_read_from_each_kind_of_file(tmp_path: Path) -> None:
    assert (
        text_of(write(tmp_path / "a.jsonl", [*MT_BENCH[:1]]))
        == "Write a poem of 20 lines.\nMake it 20 lines shorter."
    )
    assert text_of(write(tmp_path / "b.jsonl", [*GSM8K[:1]])).startswith(
        "Question: How much is 3 + 3?\nAnswer:"
    )
    (tmp_path / "c.txt").write_text("plain")
    assert text_of(tmp_path / "c.txt") == "plain"
    with pytest.raises(SystemExit, match="needs text, turns, or a question"):
        text_of(write(tmp_path / "d.jsonl", [{"other": 1}]))
    (tmp_path / "e.jsonl").write_text('{"text": "x"}\n[')
    with pytest.raises(SystemExit, match=r"e\.jsonl:2: not JSON"):
        text_of(tmp_path / "e.jsonl")


@pytest.mark.parametrize("rows", [GSM8K, MT_BENCH], ids=["gsm8k", "mt_bench"])
def test_items_are_made_with_one_right_choice(rows: list[dict[str, object]], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    items = items_of(path, 100)
    assert items == items_of(path, 100)
    assert len(items) == len(rows)
    assert len({item.right for item in items}) > 1
    for item in items:
        assert len(set(item.choices)) == 4
        number = next(word for word in item.context.split() if word.isdigit())
        assert number in item.choices[item.right].replace("+", " ").split()


def test_items_that_are_given_stay_as_they_are(tmp_path: Path) -> None:
    row = {"context": "One and one is", "choices": [" two", " three"], "answer": 0}
    assert items_of(write(tmp_path / "own.jsonl", [row]), 5) == [
        Item("One and one is", (" two", " three"), 0)
    ]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no rows"),
        ([{"context": "x", "choices": ["a", "b"], "answer": 2}], "the index of its answer"),
        ([{"other": 1}], "no items can be made of rows with other"),
        (GSM8K[:3], "needs 3 wrong choices, the other rows have 2"),
    ],
)
def test_rows_without_a_question_are_refused(
    rows: list[dict[str, object]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=says):
        items_of(write(tmp_path / "rows.jsonl", rows), 5)


def test_a_choice_that_merges_with_its_context_is_cut_before_it() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) for c in text.replace("ab", "X")]

    context, choices = encoded(Item("qa", ("b", "c"), 0), encode)
    assert context == encode("q")
    assert choices == [encode("ab"), encode("ac")]


def test_ours_and_the_reference_score_alike(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path / "model"))
    ours, reference = Ours(source, Mode("float32"), 64, 3), Reference(source)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (40,), generator=generator).tolist()
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ids), reference.logits(ids), atol=1e-4, rtol=1e-4)
        choices = [ids[:1], ids[3:8], ids[5:7]]
        for context in (ids[:1], ids[:20]):
            alone = [reference.logits([*context, *c]).log_softmax(-1) for c in choices]
            at = len(context) - 1
            want = [
                sum(rows[at + i, token].item() for i, token in enumerate(c)) / len(c)
                for rows, c in zip(alone, choices, strict=True)
            ]
            assert reference.score(context, choices) == pytest.approx(want, abs=1e-4)
            assert ours.score(context, choices) == pytest.approx(want, abs=1e-4)
        torch.testing.assert_close(ours.logits(ids), reference.logits(ids), atol=1e-4, rtol=1e-4)


def test_k_and_v_are_stored_as_the_worker_does(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path / "model"))
    wide, narrow = torch.float32, torch.float16
    modes = [Mode("stored"), Mode("float32"), Mode("w8"), Mode("stored", "float16"), Mode("w8", "float32")]
    assert [Ours(source, m, 64, 1).kv_dtype for m in modes] == [wide, wide, narrow, narrow, wide]


def test_modes_are_every_pair_and_unknown_ones_are_named() -> None:
    names = [m.name for m in chosen_modes("stored,float32", "auto,float16")]
    assert names == ["stored", "stored, kv float16", "float32", "float32, kv float16"]
    with pytest.raises(SystemExit, match="--dtype: no 'int3'"):
        chosen_modes("int3", "auto")
    with pytest.raises(SystemExit, match="--kv-cache-dtype: no 'slow'"):
        chosen_modes("stored", "slow")


def test_the_whole_bench_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(tmp_path / "model")
    text = write(tmp_path / "text.jsonl", [*GSM8K])
    choices = write(tmp_path / "choices.jsonl", [*MT_BENCH])
    arguments = [str(model), "--text", str(text), "--choices", str(choices), "--dtype", "float32"]
    assert main([*arguments, "--tokens", "96", "--chunk", "32", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    row = found["text"]["float32"]
    assert row["positions"] == 96
    assert row["agreement"] == 1.0
    assert row["error_max"] < 1e-5
    assert abs(row["perplexity_ratio"] - 1) < 1e-5
    row = found["choices"]["choices.jsonl"]["float32"]
    assert row["items"] == len(MT_BENCH)
    assert row["same_choice"] == 1.0
    assert row["difference"] == 0.0
    assert "greedy 100.00%" in capsys.readouterr().out
    assert main([str(model), "--choices", str(choices), "--dtype", "float32", "--items", "2"]) == 0
    assert "100.0% picked alike" in capsys.readouterr().out
