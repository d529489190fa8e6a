"""`stream_options.continuous_usage_stats`: load generators count tokens by it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sapwood.srt.messages import Chunk, Finish, Started, Verdict, pack
from sapwood.srt.server.outcome import Outcome
from tests.api.scripted import Harness
from tests.api.test_chat import events

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", ROUTES)
def test_every_chunk_has_the_usage_so_far(server: Harness, http: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ROUTES[path], "stream": True, "stream_options": options}
    values = events(http.post(path, json=body).text)
    counts = [value["usage"]["completion_tokens"] for value in values]
    assert counts == sorted(counts)
    whole = http.post(path, json=ROUTES[path]).json()["usage"]
    assert values[-1]["usage"] == whole
    assert values[-1]["choices"] == []
    assert {value["usage"]["prompt_tokens"] for value in values} == {whole["prompt_tokens"]}


@pytest.mark.parametrize("path", ROUTES)
def test_alone_it_is_refused(server: Harness, http: httpx.Client, path: str) -> None:
    body = {**ROUTES[path], "stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


class Unread(list[Any]):
    """A list that nobody may look into."""

    def __iter__(self) -> Any:
        raise AssertionError("it was read")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("it was read")


def test_the_usage_so_far_is_not_counted_anew() -> None:
    """A request may have 16,384 choices, and each chunk of each tells it."""
    outcome = Outcome(3, 2)
    for prompt in range(3):
        outcome.add(prompt, Started("r", pack([5] * (prompt + 1)), Verdict(prompt, "diverged"), 0.0))
        outcome.add(prompt, Chunk("r", 0, "a", pack([6, 7])))
        outcome.add(prompt, Chunk("r", 1, "b", pack([8])))
    outcome.add(1, Chunk("r", 1, "", b"", None, Finish("stop", None, 4)))
    kept = outcome.choices, outcome.started
    outcome.choices, outcome.started = Unread(outcome.choices), Unread(outcome.started)
    usage = outcome.usage(report=False)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 12, 18)
    assert usage.prompt_tokens_details.cached_tokens == 3
    outcome.choices, outcome.started = kept
    report = outcome.usage(report=True)
    assert report.completion_tokens == sum(outcome.completion_tokens(i) for i in range(6))
    assert [cache.matched for cache in report.cache] == [0, 1, 2]  # type: ignore[union-attr]
