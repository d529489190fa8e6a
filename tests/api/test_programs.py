"""`program` on every route that computes, and the routes that tell of a program and end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from sapwood.srt.config import make
from sapwood.srt.errors import ProgramNotFound
from sapwood.srt.messages import Ask, Generate, Stats
from tests.api.scripted import Harness, answer, client, reading

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
    "/v1/embeddings": {"input": "x"},
}
COUNTS = {
    "program": "p", "requests": 2, "prompt_tokens": 26, "cached_tokens": 13, "computed_tokens": 13,
    "recomputed_tokens": 0, "decoded_tokens": 3, "drafted_tokens": 5, "accepted_tokens": 4,
    "output_tokens": 8, "surplus_tokens": 1, "retracted": 0,
}  # fmt: skip


def asked(server: Harness) -> Ask:
    return server.tokenizer.wait_for(Ask)[-1]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["p", "!", "~" * 128, "a/b?c#d%20"])
def test_every_route_that_computes_takes_it(
    server: Harness, http: httpx.Client, route: str, name: str
) -> None:
    server.tokenizer.script = reading if route == "/v1/embeddings" else answer
    assert http.post(route, json={**ROUTES[route], "program": name}).status_code == 200
    assert server.tokenizer.wait_for(Generate)[0].scheduling.program == name


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_none(server: Harness, http: httpx.Client, route: str) -> None:
    server.tokenizer.script = reading if route == "/v1/embeddings" else answer
    assert http.post(route, json={**ROUTES[route], "program": None}).status_code == 200
    assert server.tokenizer.wait_for(Generate)[0].scheduling.program == ""


@pytest.mark.parametrize("route", [*ROUTES, "/programs/end"])
@pytest.mark.parametrize("name", ["", "a b", "a\n", "é", "\x7f", "x" * 129, 5, ["a"]])
def test_a_bad_name_is_refused_by_every_route(
    server: Harness, http: httpx.Client, route: str, name: Any
) -> None:
    told = http.post(route, json={**ROUTES.get(route, {}), "program": name})
    assert told.status_code == 400
    error = told.json()["error"]
    assert error["param"] == "program"
    if isinstance(name, str):
        assert "program must have from 1 to 128 visible ASCII characters, got " in error["message"]
        assert len(error["message"]) < 250
    assert server.tokenizer.received == []


def test_an_end_is_asked_for_and_told(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["program"] = {**COUNTS, "released_tokens": 24}
    told = http.post("/programs/end", json={"program": "p"})
    assert (told.status_code, told.json()) == (200, {**COUNTS, "released_tokens": 24})
    question = asked(server)
    assert (question.what, question.namespace) == ("program", "")
    assert question.options == {"program": "p", "tenant": "", "end": True}


@pytest.mark.parametrize("name", ["p", "end", "a/b?c#d%20", ".."])
def test_a_look_ends_nothing(server: Harness, http: httpx.Client, name: str) -> None:
    server.tokenizer.answers["program"] = COUNTS
    told = http.get(f"/programs/{quote(name, safe='').replace('..', '%2E%2E')}")
    assert (told.status_code, told.json()) == (200, COUNTS)
    assert asked(server).options == {"program": name, "tenant": "", "end": False}


def test_a_salt_has_programs_of_its_own(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["program"] = COUNTS
    http.post("/programs/end", json={"program": "p", "cache_salt": "s"})
    assert asked(server).namespace == "salt:s"
    http.get("/programs/p", params={"cache_salt": "t"})
    assert asked(server).namespace == "salt:t"
    assert http.get("/programs/p", params={"cache_salt": ""}).json()["error"]["param"] == "cache_salt"


def test_what_is_not_there_is_404(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["program"] = ProgramNotFound("there is no program 'p'", param="program").info()
    for told in (http.get("/programs/p"), http.post("/programs/end", json={"program": "p"})):
        assert told.status_code == 404
        assert told.json()["error"] == {
            "message": "there is no program 'p'",
            "type": "invalid_request_error",
            "code": "program_not_found",
            "param": "program",
        }


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/programs/end", {}, 400),
        ("POST", "/programs/end", {"program": "p", "id": 1}, 400),
        ("POST", "/programs/end", [], 400),
        ("GET", "/programs/", None, 400),
        ("GET", f"/programs/{'x' * 129}", None, 400),
        ("GET", "/programs/a%20b", None, 400),
        ("GET", "/programs/p?salt=1", None, 400),
        ("POST", "/programs/p", {"program": "p"}, 405),
        ("DELETE", "/programs/end", None, 405),
        ("GET", "/programs", None, 404),
    ],
)
def test_what_is_wrong_never_gets_to_the_scheduler(
    server: Harness, http: httpx.Client, method: str, path: str, body: Any, status: int
) -> None:
    told = http.request(method, path, json=body)
    assert told.status_code == status, told.text
    assert set(told.json()["error"]) == {"message", "type", "code", "param"}
    assert server.tokenizer.received == []


@pytest.mark.parametrize("isolation", ["key", "none"])
def test_each_key_sees_its_own(new_server: Callable[..., Harness], isolation: str) -> None:
    """A request and a question of one key name the same program, those of another key another one."""
    harness = new_server(make(api_key="alice,bob", cache_isolation=isolation))
    harness.tokenizer.answers["program"] = COUNTS
    places = []
    with client(harness) as http:
        for key in ("alice", "bob"):
            harness.reset()
            harness.tokenizer.answers["program"] = COUNTS
            headers = {"authorization": f"Bearer {key}"}
            http.post("/generate", json={"text": "x", "program": "p"}, headers=headers)
            http.post("/programs/end", json={"program": "p"}, headers=headers)
            http.get("/programs/p", headers=headers)
            sent = harness.tokenizer.wait_for(Generate)[0]
            place = sent.namespace, sent.scheduling.tenant
            for question in harness.tokenizer.wait_for(Ask, 2):
                assert (question.namespace, question.options["tenant"]) == place
            places.append(place)
        assert http.get("/programs/p").status_code == 401
    assert places[0] != places[1]


def test_the_metrics_tell_how_many_live_and_what_is_kept(new_server: Callable[..., Harness]) -> None:
    harness = new_server()
    numbers = dict.fromkeys(Stats.__struct_fields__, 0) | {"programs": 3, "slots_pinned": 70}
    with client(harness) as http:
        harness.tokenizer.say(Stats(**numbers))
        harness.until(lambda: harness.client.latest_stats is not None)
        lines = http.get("/metrics").text.splitlines()
    assert "sapwood_programs 3.0" in lines
    assert "sapwood_kv_slots_pinned 70.0" in lines
