"""Programs on a real server with a tiny model: counted to the token, kept among other traffic, and ended."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.models import VOCAB, tiny_llama
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("programs")
    model = tiny_llama(folder / "model", max_position_embeddings=1024)
    with serve(model, folder, max_total_tokens=2000, speculative_algorithm="none") as running:
        yield running


def ids(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def path(server: Server, prompt: list[int], program: str | None, tokens: int = 8) -> tuple[list[int], int]:
    """Prompt and output but its last token, and how much of the prompt was cached."""
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
    told = server.post("/generate", {"input_ids": prompt, "program": program, "sampling_params": sampling})
    assert told.status_code == 200, told.text
    answer = told.json()
    return [*prompt, *answer["output_ids"][:-1]], answer["meta_info"]["cached_tokens"]


def show(server: Server, program: str) -> dict[str, Any]:
    counts: dict[str, Any] = httpx.get(f"{server.url}/programs/{program}").json()
    return counts


def end(server: Server, program: str) -> httpx.Response:
    return server.post("/programs/end", {"program": program})


def test_a_tree_of_requests_computes_each_of_its_tokens_once(server: Server) -> None:
    """Three levels of three branches, those of a level at the same time."""
    level = [ids(60, 1)]
    paths: list[list[int]] = []
    cached = requests = 0
    with ThreadPoolExecutor(9) as pool:
        for depth in range(3):
            prompts = [[*before, *ids(5, 10 * depth + i)] for before in level for i in range(3)]
            found = list(pool.map(lambda prompt: path(server, prompt, "tree"), prompts[:9]))
            level = [its for its, _ in found]
            paths += level
            cached += sum(n for _, n in found)
            requests += len(found)
    counts = end(server, "tree").json()
    distinct = {tuple(each[: n + 1]) for each in paths for n in range(len(each))}
    assert counts["computed_tokens"] + counts["decoded_tokens"] - counts["surplus_tokens"] == len(distinct)
    assert (counts["requests"], counts["cached_tokens"]) == (requests, cached)
    assert counts["prompt_tokens"] - cached == counts["computed_tokens"]
    assert counts["recomputed_tokens"] == counts["drafted_tokens"] == counts["retracted"] == 0
    assert counts["output_tokens"] == 8 * requests


def test_a_chat_stays_cached_among_others_until_its_end(server: Server) -> None:
    turns, _ = path(server, ids(100, 2), "chat")
    lost, _ = path(server, ids(100, 3), None)

    def crowd(seed: int) -> None:
        for i in range(12):
            path(server, ids(300, seed + i), None, 1)

    crowd(100)
    assert path(server, [*lost, 5], None)[1] == 0
    turns, cached = path(server, [*turns, 5, 6], "chat")
    assert cached == 107
    assert show(server, "chat")["cached_tokens"] == 107
    assert end(server, "chat").json()["released_tokens"] == len(turns)
    crowd(200)
    assert path(server, [*turns, 5], None)[1] == 0
    assert end(server, "chat").status_code == 404
