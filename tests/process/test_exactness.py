"""The exactness benchmark on a tiny model: every way of serving gives the same answers, `==`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench import exactness
from sapwood.srt.messages import Chunk, Finish, Read, TextLogprob, pack
from sapwood.srt.server.outcome import Outcome
from tests.models import tiny


def test_every_way_of_serving_gives_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 has what the others have, and sliding windows. Other samplings and runs are for the bench."""
    samplings = ["stop string", "all of it", "mean state", "json", "json n = 3"]
    few = ("cache off, 16 at a time", "chunks of 16", "overlap off")
    monkeypatch.setattr(exactness, "RUNS", {name: exactness.RUNS[name] for name in few})
    model = tiny(tmp_path / "model", "gemma3", max_position_embeddings=1024)
    file = tmp_path / "rows.json"
    chosen = ["--prompts", "10", "--samplings", ",".join(samplings), "--drafts", "auto"]
    status = exactness.main(["--model", str(model), *chosen, "--json", str(file)])
    assert status == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["differences"] == 0
    assert result["retracted"] > 0
    rows = result["rows"]
    assert {row["sampling"] for row in rows} == set(samplings)
    assert len(rows) == len(samplings) * (2 + len(exactness.RUNS) + 3 + 1)
    warm = [row for row in rows if row["run"] == "drafts: auto, warm"]
    assert sum(row["accepted"] for row in warm) > 0, "no draft was kept: nothing is proven"


def test_prompts_share_prefixes_whatever_their_number() -> None:
    for count in (4, 10, 24, 200):
        made = exactness.prompts(count, 300)
        assert len(made) == count
        families = {tuple(prompt[:3]) for prompt in made}
        assert 2 <= len(families) <= count // 2


def test_one_bit_of_any_value_is_a_difference() -> None:
    def outcome(value: float, read: float, pooled: bytes) -> bytes:
        made = Outcome(1, 1)
        made.add(0, Read("r", 1, [TextLogprob(5, read, "x", b"x", [(5, read, "x", b"x")])], pooled))
        made.add(0, Chunk("r", 0, "x", pack([5]), [TextLogprob(5, value, "x", b"x")], Finish("length")))
        return exactness.answer(made)

    plain = outcome(-1.5, -2.5, b"1234")
    assert plain == outcome(-1.5, -2.5, b"1234")
    assert plain != outcome(math.nextafter(-1.5, 0), -2.5, b"1234")
    assert plain != outcome(-1.5, math.nextafter(-2.5, 0), b"1234")
    assert plain != outcome(-1.5, -2.5, b"1235")


def test_an_unknown_sampling_is_named() -> None:
    with pytest.raises(SystemExit, match="no sampling 'greed'"):
        exactness.chosen_samplings("greedy,greed")
