"""What the cache's routes ask and answer, and how requests and lookups are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt import namespaces
from sapwood.srt.config import make
from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import (
    Ask,
    ChatPrompt,
    Generate,
    IdsPrompt,
    Message,
    Started,
    TextPrompt,
    Verdict,
    pack,
)
from sapwood.srt.metrics import MAX_NAMESPACES, Metrics
from tests.api.scripted import Harness, answer, client, started

FOUND = {
    "prompt_tokens": 5,
    "matched": 2,
    "stopped": "diverged",
    "reason": "Because.",
    "place": None,
    "matched_text_tail": [{"id": 1, "text": "a"}],
    "next": [{"id": 2, "text": " b"}],
}
TREE = {
    "nodes": 1, "tokens": 3, "evictable": 3, "slots_total": 9, "clock": 4, "num_namespaces": 1,
    "truncated": False,
    "namespaces": [{
        "namespace": "", "nodes": 1, "tokens": 3, "num_children": 1,
        "children": [{
            "text": "abc", "ids": [1, 2, 3], "tokens": 3, "depth": 3, "hits": 2, "locks": 0, "last_use": 4,
            "num_children": 0, "children": [],
        }],
    }],
}  # fmt: skip


def asked(server: Harness) -> Ask:
    return server.tokenizer.wait_for(Ask)[-1]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": "hello"}, TextPrompt("hello")),
        ({"prompt": "hello", "add_special_tokens": False}, TextPrompt("hello", False)),
        ({"prompt": [5, 6]}, IdsPrompt(pack([5, 6]))),
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            ChatPrompt([{"role": "user", "content": "hi"}], True),
        ),
        (
            {
                "messages": [{"role": "user", "content": "hi"}],
                "continue_final_message": True,
                "chat_template_kwargs": {"day": "Monday"},
            },
            ChatPrompt([{"role": "user", "content": "hi"}], False, True, {"day": "Monday"}),
        ),
    ],
)
def test_explain_asks_about_the_prompt_as_a_request_would_have_it(
    server: Harness, http: httpx.Client, body: dict[str, Any], prompt: Any
) -> None:
    server.tokenizer.answers["explain"] = FOUND
    told = http.post("/cache/explain", json=body)
    assert told.status_code == 200, told.text
    assert told.json() == {**{k: v for k, v in FOUND.items() if v is not None}, "namespace": ""}
    question = asked(server)
    assert (question.what, question.prompt, question.namespace) == ("explain", prompt, "")


def test_explain_passes_on_the_salt_and_where_logprobs_begin(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["explain"] = FOUND
    body = {"prompt": "a", "cache_salt": "pepper", "logprob_start_len": 3}
    assert http.post("/cache/explain", json=body).json()["namespace"] == namespaces.label("salt:pepper")
    assert asked(server).namespace == "salt:pepper"
    assert asked(server).options["logprob_start_len"] == 3
    http.post("/cache/explain", json={"prompt": "a", "logprob_start_len": -1})
    assert "logprob_start_len" not in asked(server).options


def test_only_who_is_admin_asks_for_what_others_sent(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(api_key="user", admin_api_key="admin"))
    harness.tokenizer.answers["explain"] = FOUND
    with client(harness) as http:
        for key, reveal in (("user", False), ("admin", True)):
            headers = {"authorization": f"Bearer {key}"}
            assert http.post("/cache/explain", json={"prompt": "a"}, headers=headers).status_code == 200
            assert asked(harness).options["reveal"] is reveal
        count = len(harness.tokenizer.received)
        assert http.post("/cache/explain", json={"prompt": "a"}).status_code == 401
        assert http.get("/cache/tree", headers={"authorization": "Bearer user"}).status_code == 403
        assert len(harness.tokenizer.received) == count, "refused before anything was asked"


def test_a_call_through_a_proxy_is_nobodys_own_machine(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["explain"] = FOUND
    http.post("/cache/explain", json={"prompt": "a"})
    assert asked(server).options["reveal"] is True
    http.post("/cache/explain", json={"prompt": "a"}, headers={"x-forwarded-for": "203.0.113.9"})
    assert asked(server).options["reveal"] is False


def test_the_tokenizers_error_is_the_answer(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["explain"] = BadRequest("prompt is empty", param="prompt").info()
    told = http.post("/cache/explain", json={"prompt": "a"})
    assert told.status_code == 400
    assert told.json()["error"]["param"] == "prompt"


def test_the_tree_is_asked_for_with_its_bounds(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["tree"] = TREE
    assert http.get("/cache/tree").json() == TREE
    usual = {"depth": 3, "limit": 16, "ids": 16, "max_nodes": 1000, "namespace": None}
    assert asked(server).options == usual
    http.get("/cache/tree?depth=1&limit=2&ids=3&max_nodes=4&namespace=health")
    wanted = {"depth": 1, "limit": 2, "ids": 3, "max_nodes": 4, "namespace": "health"}
    assert asked(server).options == wanted


def test_the_document_has_both_routes_and_their_shapes(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["paths"]["/cache/explain"]["post"]["requestBody"]
    names = {parameter["name"] for parameter in document["paths"]["/cache/tree"]["get"]["parameters"]}
    assert names == {"depth", "limit", "ids", "max_nodes", "namespace"}
    assert {"ExplainRequest", "Explanation", "Tree", "TreeNode"} <= set(document["components"]["schemas"])


# ---- metrics


def values(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_lookups_are_counted_by_namespace_and_reason(new_server: Callable[..., Harness]) -> None:
    harness = new_server()

    def script(g: Generate) -> list[Message]:
        begun = Started(g.rid, started(g).prompt_ids, Verdict(30, "last_token"), 0.25, 1.5)
        return [begun, *answer(g)[1:]]

    harness.tokenizer.script = script
    with client(harness) as http:
        for salt in (None, "pepper", "pepper"):
            body = {"prompt": [5] * 40, "cache_salt": salt}
            assert http.post("/v1/completions", json=body).status_code == 200
        now = values(http)
    for label, requests in (("", 1), (namespaces.label("salt:pepper"), 2)):
        where = f'{{model="tiny",namespace="{label}"}}'
        assert now[f"sapwood_prompt_tokens_total{where}"] == 40 * requests
        assert now[f"sapwood_cached_prompt_tokens_total{where}"] == 30 * requests
        assert now[f"sapwood_prefill_saved_seconds_total{where}"] == 1.5 * requests
    assert now['sapwood_prefix_lookups_total{stopped="last_token"}'] == 3


def test_labels_are_bounded_however_many_salts_there_are() -> None:
    metrics = Metrics("m")
    for i in range(3 * MAX_NAMESPACES):
        metrics.on_started(Started(f"r{i}", pack([1, 2]), Verdict(1, "diverged"), 0.0), f"salt:{i}")
    lines = [line for line in metrics.page().decode().splitlines() if "sapwood_prompt_tokens_total{" in line]
    assert len(lines) == MAX_NAMESPACES + 1
    (other,) = [line for line in lines if 'namespace="other"' in line]
    assert float(other.rpartition(" ")[2]) == 2 * 2 * MAX_NAMESPACES


def test_answers_are_counted_by_the_routes_template_and_never_by_paths(
    new_server: Callable[..., Harness],
) -> None:
    harness = new_server()
    with client(harness) as http:
        http.get("/v1/models/tiny")
        http.get("/v1/models/other")
        for i in range(5):
            http.get(f"/wp-admin/{i}")
        http.request("BREW", "/health")
        http.post("/v1/completions", json={"prompt": 5})
        now = values(http)
    counted = {name: value for name, value in now.items() if name.startswith("sapwood_http_requests_total")}
    assert counted == {
        'sapwood_http_requests_total{method="GET",route="/v1/models/{model:path}",status="200"}': 1,
        'sapwood_http_requests_total{method="GET",route="/v1/models/{model:path}",status="404"}': 1,
        'sapwood_http_requests_total{method="GET",route="unrouted",status="404"}': 5,
        'sapwood_http_requests_total{method="other",route="/health",status="405"}': 1,
        'sapwood_http_requests_total{method="POST",route="/v1/completions",status="400"}': 1,
    }
