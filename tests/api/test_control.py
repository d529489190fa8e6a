"""Models, health, cache, what was chosen, metrics, the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest

import sapwood
from sapwood.srt.config import make
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import Chunk, Ended, Generate, IdsPrompt, Stats, pack, unpack
from sapwood.srt.server import health
from tests.api.scripted import Harness, answer, client, refuse, started
from tests.api.test_chat import ASK

CHAT = "/v1/chat/completions"


def test_models(server: Harness, ai: openai.OpenAI, http: httpx.Client) -> None:
    assert [m.id for m in ai.models.list()] == ["tiny"]
    card = ai.models.retrieve("tiny")
    assert (card.object, card.owned_by) == ("model", "sapwood")
    response = http.get("/v1/models/org/other")
    assert response.status_code == 404
    assert "'tiny'" in response.json()["error"]["message"]


def test_the_served_name(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(served_model_name="org/my-model"))
    harness.service.max_request_tokens = 512
    with client(harness) as http:
        assert http.get("/v1/models/org/my-model").json()["max_model_len"] == 512
        assert http.post(CHAT, json={**ASK, "model": "tiny"}).status_code == 404
        assert http.post(CHAT, json={**ASK, "model": "org/my-model"}).json()["model"] == "org/my-model"


def test_health_follows_the_state(new_server: Callable[..., Harness]) -> None:
    harness = new_server()
    with client(harness) as http:
        assert http.get("/health").status_code == 200
        states: tuple[Literal["loading"], Literal["draining"]] = ("loading", "draining")
        for state in states:
            harness.service.state = state
            for response in (http.get("/health"), http.get("/health_generate"), http.post(CHAT, json=ASK)):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == state
                assert state in response.json()["error"]["message"]
                assert response.headers["retry-after"] == "1"
            assert http.get("/live").status_code == 200
            assert http.get("/metrics").status_code == 200
            assert http.get("/v1/models").status_code == 200
        assert harness.tokenizer.received == []


def test_health_generate_generates(server: Harness, http: httpx.Client) -> None:
    assert http.get("/health_generate").status_code == 200
    (generate,) = server.tokenizer.wait_for(Generate)
    assert isinstance(generate.prompt, IdsPrompt)
    assert unpack(generate.prompt.ids).tolist() == [2]
    assert generate.params.max_tokens == 1
    assert generate.namespace == health.PROBE_NAMESPACE != ""


def test_health_generate_without_a_token(
    server: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tokenizer.script = refuse
    assert "800 tokens" in http.get("/health_generate").json()["error"]["message"]
    server.tokenizer.script = lambda g: answer(g, texts=())
    assert http.get("/health_generate").status_code == 503
    monkeypatch.setattr(health.probe, "__defaults__", (0.1,))
    server.tokenizer.script = lambda g: [started(g)]
    response = http.get("/health_generate")
    assert response.status_code == 503
    assert "within 0.1 s" in response.json()["error"]["message"]
    assert server.call(lambda: server.client.live) == 0


def test_flush_cache(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["flush"] = {"flushed_tokens": 77}
    assert http.get("/flush_cache").json() == {"flushed_tokens": 77}
    assert http.post("/flush_cache").json() == {"flushed_tokens": 77}
    server.tokenizer.answers["flush"] = ErrorInfo(500, "server_error", "oops", "cannot flush")
    response = http.post("/flush_cache")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "cannot flush"


def test_server_info(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["state"] = {"nodes": 3}
    server.service.facts = {"attention": "cpu"}
    info = http.get("/server_info").json()
    assert info["version"] == sapwood.__version__
    assert info["status"] == "ready"
    assert info["config"]["stream_buffer"] == 4096
    assert info["source"]["vocab_size"] == 1000
    assert info["facts"] == {"attention": "cpu"}
    assert info["state"] == {"nodes": 3}
    assert http.get("/get_server_info").json() == info
    assert http.get("/get_model_info").json()["model_path"] == "tiny"
    assert http.get("/version").json() == {"version": sapwood.__version__}


STATS = Stats(
    running=3,
    waiting=2,
    slots_used=100,
    slots_cached=50,
    slots_total=500,
    retracted=4,
    steps=10,
    prompt_tokens_cached=70,
    prompt_tokens_computed=30,
    output_tokens=20,
    surplus_tokens=1,
    evicted_tokens=6,
    seconds_saved=1.5,
)


def values(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_of_the_scheduler(new_server: Callable[..., Harness]) -> None:
    harness = new_server()
    with client(harness) as http:
        assert "sapwood_running_requests" not in values(http)
        harness.tokenizer.say(STATS)
        harness.until(lambda: harness.client.latest_stats is not None)
        now = values(http)
    wanted = {
        "sapwood_running_requests": 3,
        "sapwood_waiting_requests": 2,
        "sapwood_retracted_total": 4,
        "sapwood_kv_slots_used": 100,
        "sapwood_kv_slots_cached": 50,
        "sapwood_kv_slots_capacity": 500,
        "sapwood_prompt_tokens_computed_total": 30,
        "sapwood_output_tokens_total": 20,
    }
    assert {name: now[name] for name in wanted} == wanted


def test_metrics_of_requests(new_server: Callable[..., Harness]) -> None:
    harness = new_server()
    with client(harness) as http:
        http.post(CHAT, json={**ASK, "n": 2})
        harness.tokenizer.script = lambda g: answer(g, finish="length")
        http.post(CHAT, json={**ASK, "stream": True})
        harness.tokenizer.script = lambda g: [
            started(g),
            Chunk(g.rid, 0, "abc", pack([1, 2, 3])),
            Chunk(g.rid, 0, "de", pack([4, 5])),
            Ended(g.rid, ErrorInfo(500, "server_error", "x", "y")),
        ]
        http.post(CHAT, json=ASK)
        now = values(http)
    assert now['sapwood_requests_total{finish_reason="stop"}'] == 2
    assert now['sapwood_requests_total{finish_reason="length"}'] == 1
    assert now['sapwood_requests_total{finish_reason="error"}'] == 1
    assert now["sapwood_time_to_first_token_seconds_count"] == 3
    assert now["sapwood_request_duration_seconds_count"] == 3
    assert now["sapwood_queue_time_seconds_sum"] == 0.75
    assert now["sapwood_inter_token_latency_seconds_count"] == 2 + 1 + 2


def test_the_openapi_document(server: Harness, http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["info"] == {"title": "Sapwood", "version": sapwood.__version__}
    schemas = document["components"]["schemas"]
    for path, name in (
        (CHAT, "ChatRequest"),
        ("/v1/completions", "CompletionRequest"),
        ("/generate", "GenerateRequest"),
    ):
        post = document["paths"][path]["post"]
        schema = post["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert "200" in post["responses"]
        assert schemas[name]["additionalProperties"] is False
    used = set(re.findall(r'"#/components/schemas/([^"]+)"', http.get("/openapi.json").text))
    assert used <= set(schemas)


def test_answers_obey_the_document(server: Harness, http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()

    def check(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.validate(value, schema)

    fields = {"logprobs": True, "top_logprobs": 1, "cache_report": True}
    check("ChatRequest", {**ASK, **fields})
    check("ChatCompletion", http.post(CHAT, json={**ASK, **fields}).json())
    check("Completion", http.post("/v1/completions", json={"prompt": "x", "logprobs": 1}).json())
    check("Generated", http.post("/generate", json={"text": "x", "return_logprob": True}).json())
    with pytest.raises(jsonschema.ValidationError):
        check("ChatRequest", {"messages": [], "nope": 1})
