"""`stop_regex` on every route that generates, and what `/generate` tells of tokens that were kept."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sapwood.srt.messages import Chunk, Ended, Finish, Generate, Kept, Message, pack
from sapwood.srt.server.sampling import MAX_PATTERN_LISTS
from tests.api.scripted import Harness, started
from tests.api.test_chat import events

ROUTES: dict[str, Any] = {
    "/generate": lambda fields: {"text": "x", "sampling_params": fields},
    "/v1/completions": lambda fields: {"prompt": "x", **fields},
    "/v1/chat/completions": lambda fields: {"messages": [{"role": "user", "content": "x"}], **fields},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("given", [r"\n+", [r"\n+"], [r"\n+", "(^|a)b"], [], None])
def test_patterns_reach_the_tokenizer(
    server: Harness, http: httpx.Client, route: str, given: str | list[str] | None
) -> None:
    body = ROUTES[route]({"stop_regex": given, "stop": "END"})
    assert http.post(route, json=body).status_code == 200
    params = server.tokenizer.wait_for(Generate)[-1].params
    assert params.stop_regex == ([given] if isinstance(given, str) else given or [])
    assert params.stop == ["END"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "length of a stop_regex must be from 1 to 256, got 0"),
        ("a" * 257, "length of a stop_regex must be from 1 to 256, got 257"),
        (["a"] * 17, "length of stop_regex must be from 0 to 16, got 17"),
        ("a*", "stop_regex 'a*' matches the empty text"),
        (["a", "b$"], "stop_regex 'b$': the anchor $ is not supported, as where an output ends is not known"),
        ("(?=a)b", "stop_regex '(?=a)b': lookahead (?= at position 0 is not supported"),
        (r"(a)\1", r"a backreference \1 at position 3 is not supported"),
        ("(a{1,50}){1,50}", "stop_regex stands for 2500 characters and choices"),
        ("[ab]?" * 50 + "c", "up to 1375 steps for one character of the output, above the limit of 160"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(
    server: Harness, http: httpx.Client, route: str, given: str | list[str], told: str
) -> None:
    response = http.post(route, json=ROUTES[route]({"stop_regex": given}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "stop_regex"
    assert told in error["message"]
    assert server.tokenizer.received == []


@pytest.mark.parametrize("route", ROUTES)
def test_many_choices_have_simple_ones(server: Harness, http: httpx.Client, route: str) -> None:
    def answer(pattern: str) -> httpx.Response:
        return http.post(route, json=ROUTES[route]({"stop_regex": pattern, "n": 128}))

    refused = answer("[a-z]{20}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")
    assert "40 steps for one character of the output, which makes 5120 for 128" in refused.text
    assert server.tokenizer.received == []
    assert answer(r"[.!?]\s").status_code == 200


def test_prompts_of_one_request_have_few_different_ones(server: Harness, http: httpx.Client) -> None:
    def answer(different: int) -> httpx.Response:
        each = [{"stop_regex": f"a{i % different}"} for i in range(40)]
        return http.post("/generate", json={"text": ["x"] * 40, "sampling_params": each})

    assert answer(MAX_PATTERN_LISTS).status_code == 200
    refused = answer(MAX_PATTERN_LISTS + 1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")


def cut(g: Generate) -> list[Message]:
    finish = Finish("stop", r"\n+", 3, kept=Kept(1, "ri"))
    return [
        started(g),
        Chunk(g.rid, 0, "Pa", pack([50])),
        Chunk(g.rid, 0, "ri", pack([51, 52]), None, finish),
        Ended(g.rid),
    ]


def test_the_tokens_that_were_kept_are_told_at_the_end(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = cut
    body = ROUTES["/generate"]({"stop_regex": r"\n+"})
    got = http.post("/generate", json=body).json()
    assert (got["text"], got["output_ids"]) == ("Pari", [50, 51, 52])
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\n+"}
    assert got["meta_info"]["kept"] == {"tokens": 1, "rest": "ri"}
    streamed = events(http.post("/generate", json={**body, "stream": True}).text)
    assert streamed[-1]["meta_info"]["kept"] == {"tokens": 1, "rest": "ri"}
    assert all("kept" not in event["meta_info"] for event in streamed[:-1])


def test_the_pattern_is_told_as_what_has_matched(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = cut
    for route in ("/v1/completions", "/v1/chat/completions"):
        (choice,) = http.post(route, json=ROUTES[route]({"stop_regex": r"\n+"})).json()["choices"]
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", r"\n+")
