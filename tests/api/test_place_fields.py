"""`cache_salt`, `priority`, `keep` and `queue_timeout`: on every route that computes, from the field to the
message that carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sapwood.srt.config import make
from sapwood.srt.messages import Generate
from sapwood.srt.params import Scheduling
from tests.api.scripted import Harness, answer, client, reading

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
    "/v1/embeddings": {"input": "x"},
}


@pytest.fixture(scope="module")
def shared_ordered() -> Iterator[Harness]:
    harness = Harness(make(schedule_policy="priority"))
    yield harness
    harness.close()


@pytest.fixture
def ordered(shared_ordered: Harness) -> Harness:
    """A server that obeys priorities."""
    shared_ordered.reset()
    return shared_ordered


@pytest.fixture(scope="module")
def ask(shared_ordered: Harness) -> Iterator[httpx.Client]:
    with client(shared_ordered) as http:
        yield http


def sent(harness: Harness, http: httpx.Client, route: str, **fields: Any) -> Generate:
    """What the tokenizer got."""
    harness.reset()
    harness.tokenizer.script = reading if route == "/v1/embeddings" else answer
    told = http.post(route, json={**ROUTES[route], **fields})
    assert told.status_code == 200, told.text
    return harness.tokenizer.wait_for(Generate)[0]


def refused(http: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    told = http.post(route, json={**ROUTES[route], **fields})
    assert told.status_code == 400, told.text
    return dict(told.json()["error"])


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_that_computes_takes_them(ordered: Harness, ask: httpx.Client, route: str) -> None:
    message = sent(ordered, ask, route, cache_salt="s", priority=-5, keep=60, queue_timeout=2.5)
    assert message.namespace == "salt:s"
    assert message.scheduling == Scheduling("", -5, 60.0, 2.5, "")


@pytest.mark.parametrize("route", ROUTES)
def test_absent_and_null_ask_for_nothing(ordered: Harness, ask: httpx.Client, route: str) -> None:
    nothing = {"cache_salt": None, "priority": None, "keep": None, "queue_timeout": None}
    for fields in ({}, nothing, {"priority": 0, "keep": 0}):
        message = sent(ordered, ask, route, **fields)
        assert (message.namespace, message.scheduling) == ("", Scheduling())


def test_the_limits_themselves_are_taken(ordered: Harness, ask: httpx.Client) -> None:
    for priority in (-(2**31), 2**31 - 1):
        message = sent(ordered, ask, "/generate", priority=priority, keep=3600, queue_timeout=86400)
        assert message.scheduling == Scheduling("", priority, 3600.0, 86400.0, "")


def test_all_prompts_of_a_request_have_them(ordered: Harness, ask: httpx.Client) -> None:
    assert ask.post("/generate", json={"text": ["a", "b"], "priority": 7}).status_code == 200
    assert [g.scheduling.priority for g in ordered.tokenizer.wait_for(Generate, 2)] == [7, 7]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 2**31}, "priority must be from -2147483648 to 2147483647, got 2147483648"),
        ({"priority": -(2**31) - 1}, "priority must be from -2147483648 to 2147483647, got -2147483649"),
        ({"priority": 1.5}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"keep": -1}, "keep must be from 0 to 3600 seconds, got -1.0"),
        ({"keep": 3600.5}, "keep must be from 0 to 3600 seconds, got 3600.5"),
        ({"keep": "60"}, "keep"),
        ({"queue_timeout": 0}, "queue_timeout must be above 0 and at most 86400 seconds, got 0.0"),
        ({"queue_timeout": -1}, "queue_timeout must be above 0 and at most 86400 seconds, got -1.0"),
        ({"queue_timeout": 86401}, "queue_timeout must be above 0 and at most 86400 seconds, got 86401.0"),
        ({"queue_timeout": [1]}, "queue_timeout"),
        ({"cache_salt": ""}, "cache_salt must have from 1 to 256 characters, got 0"),
        ({"cache_salt": "x" * 257}, "cache_salt must have from 1 to 256 characters, got 257"),
    ],
)
def test_bad_values_name_the_field_and_the_limit(
    ordered: Harness, ask: httpx.Client, route: str, fields: dict[str, Any], words: str
) -> None:
    error = refused(ask, route, **fields)
    assert error["param"] == next(iter(fields))
    assert words in error["message"]
    assert ordered.tokenizer.received == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_priority_that_has_no_effect_is_refused(server: Harness, http: httpx.Client, route: str) -> None:
    error = refused(http, route, priority=1)
    assert (error["param"], error["code"]) == ("priority", "unsupported")
    assert "--schedule-policy lpm; --schedule-policy priority obeys it" in error["message"]
    assert "from -2147483648" in refused(http, route, priority=2**40)["message"]
    assert sent(server, http, route, priority=0).scheduling == Scheduling()


def test_priorities_count_for_eviction_too(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(radix_eviction_policy="priority"))
    with client(harness) as http:
        assert sent(harness, http, "/generate", priority=3).scheduling.priority == 3


def test_nothing_can_be_kept_without_a_cache(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(disable_radix_cache=True))
    with client(harness) as http:
        error = refused(http, "/generate", keep=5)
        assert (error["param"], error["code"]) == ("keep", "unsupported")
        assert "--disable-radix-cache" in error["message"]
        assert sent(harness, http, "/generate", keep=0).scheduling == Scheduling()


def test_the_document_says_what_this_server_takes(new_server: Callable[..., Harness]) -> None:
    for config, priority, keep in (
        (make(), {"enum": [None, 0]}, {"minimum": 0, "maximum": 3600}),
        (
            make(schedule_policy="priority", disable_radix_cache=True),
            {"minimum": -(2**31), "maximum": 2**31 - 1},
            {"enum": [None, 0]},
        ),
    ):
        with client(new_server(config)) as http:
            schemas = http.get("/openapi.json").json()["components"]["schemas"]
        for name in ("ChatRequest", "CompletionRequest", "GenerateRequest", "EmbeddingRequest"):
            fields = schemas[name]["properties"]
            assert fields["priority"].items() >= priority.items()
            assert fields["keep"].items() >= keep.items()
            assert fields["queue_timeout"]["exclusiveMinimum"] == 0
