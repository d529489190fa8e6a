"""Several API keys: whose cache a request looks into, and what its name tells."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt import namespaces
from sapwood.srt.config import make
from sapwood.srt.messages import Ask, Generate
from sapwood.srt.metrics import MAX_NAMESPACES
from sapwood.srt.params import Scheduling
from sapwood.srt.server.tenants import PlaceFields, Tenants
from tests.api.scripted import Harness, answer, client

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-operator"
KEYS = {"api_key": f"{ALICE},{BOB}", "admin_api_key": ADMIN}


def bearer(key: str | None, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more} if key else more


def digits(text: str) -> str:
    """What `printf %s TEXT | sha256sum | cut -c1-12` prints."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def ask(harness: Harness, headers: dict[str, str], **fields: Any) -> Generate:
    """What the tokenizer gets of a completion."""
    harness.reset()
    with client(harness) as http:
        told = http.post("/v1/completions", json={"prompt": "x", **fields}, headers=headers)
    assert told.status_code == 200, told.text
    return harness.tokenizer.wait_for(Generate)[0]


@pytest.fixture
def guarded(new_server: Callable[..., Harness]) -> Harness:
    return new_server(make(**KEYS))


def test_each_key_has_a_cache_of_its_own(guarded: Harness) -> None:
    found = {key: ask(guarded, bearer(key)).namespace for key in (ALICE, BOB, ADMIN)}
    assert len(set(found.values())) == 3
    for key, namespace in found.items():
        assert ask(guarded, bearer(key)).namespace == namespace, "the same in every request"
        assert ask(guarded, {"x-api-key": key}).namespace == namespace, "however the key is sent"
        assert namespaces.label(namespace) == f"key:{digits(key)}"


def test_a_salt_narrows_and_never_leads_out(guarded: Harness) -> None:
    of_bob = ask(guarded, bearer(BOB)).namespace
    seen = {of_bob, "", namespaces.LISTED}
    salts = ["a", "b", of_bob, of_bob.removeprefix("key:"), namespaces.LISTED, "salt:a", "\0" + "1"]
    for key in (ALICE, BOB):
        for salt in salts:
            message = ask(guarded, bearer(key), cache_salt=salt)
            assert message.namespace not in seen
            seen.add(message.namespace)
            label = namespaces.label(message.namespace)
            assert label == f"key:{digits(key)}:{digits(salt)}"
            assert message.namespace == ask(guarded, bearer(key), cache_salt=salt).namespace
    assert len(seen) == 3 + 2 * len(salts)


def test_the_scheduler_is_told_whose_it_is_and_never_the_key(guarded: Harness) -> None:
    for key in (ALICE, BOB, ADMIN):
        plain, salted = ask(guarded, bearer(key)), ask(guarded, bearer(key), cache_salt="pepper")
        assert plain.scheduling == Scheduling(tenant=digits(key), unsalted=plain.namespace)
        assert salted.scheduling == plain.scheduling, "its own cache without the salt, and no other's"
        for said in (plain.namespace, salted.namespace, repr(plain.scheduling)):
            assert key not in said
            assert "pepper" not in said


def test_names_are_new_at_each_start() -> None:
    digest = hashlib.sha256(ALICE.encode()).digest()
    first, second = (Tenants(make(**KEYS)).caches(None, digest)[0] for _ in range(2))
    assert first != second
    assert namespaces.label(first) == namespaces.label(second)


def test_who_shows_both_keys_is_the_admin_in_the_tenants_cache(guarded: Harness) -> None:
    of_bob = ask(guarded, bearer(BOB)).namespace
    for headers in (bearer(BOB, **{"x-api-key": ADMIN}), bearer(ADMIN, **{"x-api-key": BOB})):
        assert ask(guarded, headers).namespace == of_bob
        guarded.tokenizer.answers["explain"] = {
            "prompt_tokens": 1, "matched": 0, "stopped": "cold", "reason": "", "place": None,
            "matched_text_tail": [], "next": [],
        }  # fmt: skip
        with client(guarded) as http:
            assert http.post("/cache/explain", json={"prompt": "x"}, headers=headers).status_code == 200
            question = guarded.tokenizer.wait_for(Ask)[-1]
            assert (question.namespace, question.options["reveal"]) == (of_bob, True)
        guarded.reset()


def test_explain_looks_where_a_request_would(guarded: Harness) -> None:
    found = {"prompt_tokens": 1, "matched": 0, "stopped": "cold", "reason": "", "place": None,
             "matched_text_tail": [], "next": []}  # fmt: skip
    for fields in ({}, {"cache_salt": "pepper"}):
        message = ask(guarded, bearer(ALICE), **fields)
        guarded.tokenizer.answers["explain"] = found
        with client(guarded) as http:
            told = http.post("/cache/explain", json={"prompt": "x", **fields}, headers=bearer(ALICE)).json()
        question = guarded.tokenizer.wait_for(Ask)[-1]
        assert question.namespace == message.namespace
        assert question.options == {"reveal": False, "unsalted": message.scheduling.unsalted}
        assert told["namespace"] == namespaces.label(message.namespace)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"api_key": ALICE},
        {"api_key": f"{ALICE},{ALICE}"},
        {"api_key": ALICE, "admin_api_key": ADMIN},
        {"admin_api_key": f"{ADMIN},another"},
    ],
)
def test_with_one_key_or_none_salts_alone_keep_caches_apart(
    new_server: Callable[..., Harness], options: dict[str, str]
) -> None:
    harness = new_server(make(**options))
    key = ALICE if "api_key" in options else None
    assert ask(harness, bearer(key)).namespace == ""
    salted = ask(harness, bearer(key), cache_salt="a")
    assert (salted.namespace, salted.scheduling) == ("salt:a", Scheduling())
    if "admin_api_key" in options:
        assert ask(harness, bearer(ADMIN)).namespace == ""


def test_without_isolation_keys_are_tenants_of_one_cache(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(**KEYS, cache_isolation="none"))
    for key in (ALICE, BOB):
        message = ask(harness, bearer(key), cache_salt="a")
        assert (message.namespace, message.scheduling) == ("salt:a", Scheduling(tenant=digits(key)))
        assert ask(harness, bearer(key)).namespace == ""


def labels(harness: Harness, key: str) -> set[str]:
    """The namespaces that the metrics tell of."""
    with client(harness) as http:
        page = http.get("/metrics", headers=bearer(key)).text
    lines = [line for line in page.splitlines() if line.startswith("sapwood_prompt_tokens_total{")]
    return {line.partition('namespace="')[2].partition('"')[0] for line in lines}


def test_metrics_tell_keys_apart_only_to_an_admin(new_server: Callable[..., Harness]) -> None:
    for options, reader, wanted in (
        (KEYS, ADMIN, {f"key:{digits(ALICE)}", f"key:{digits(BOB)}", f"key:{digits(BOB)}:{digits('s')}"}),
        ({"api_key": KEYS["api_key"]}, BOB, {"keys"}),
        ({"api_key": KEYS["api_key"], "cache_isolation": "none"}, BOB, {"", digits("s")}),
    ):
        harness = new_server(make(**options))
        harness.tokenizer.script = answer
        for key, salt in ((ALICE, None), (BOB, None), (BOB, "s")):
            ask(harness, bearer(key), cache_salt=salt)
        for i in range(MAX_NAMESPACES if "keys" in wanted else 0):
            ask(harness, bearer(ALICE), cache_salt=f"{i}")  # which leave a place for the others still to come
            ask(harness, bearer(BOB), cache_salt=f"{i}")
        assert labels(harness, reader) == wanted


def test_a_request_without_a_key_has_no_tenant() -> None:
    """The offline Engine's, whatever keys its configuration has."""
    place = Tenants(make(**KEYS)).place(PlaceFields(cache_salt="a"))
    assert place == ("salt:a", Scheduling())


def test_no_client_names_the_listed_namespace(guarded: Harness, http: httpx.Client, server: Harness) -> None:
    for salt in (namespaces.LISTED, "listed", "\1listed"):
        assert ask(guarded, bearer(ALICE), cache_salt=salt).namespace != namespaces.LISTED
        assert ask(server, {}, cache_salt=salt).namespace == "salt:" + salt
    assert http.post("/v1/completions", json={"prompt": "x", "namespace": "x"}).status_code == 400
