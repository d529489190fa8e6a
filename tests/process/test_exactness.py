"""The exactness benchmark on a tiny model: every way of serving gives the same ids and logprobs, `==`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import exactness
from tests.models import tiny_llama


def test_every_way_of_serving_gives_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model", max_position_embeddings=1024)
    status = exactness.main([str(model), "--prompts", "40", "--json", str(tmp_path / "rows.json")])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "retracted" in printed
