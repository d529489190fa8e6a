"""A real server explains its cache: what a prompt would find, why no more, and what the tree holds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood.srt import namespaces
from tests.models import tiny_llama
from tests.serving import Server, held, serve

SYSTEM = "You are the river that flows to the sea; answer in one sentence."
ASK = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "cache_report": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_llama(folder / "model", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def shared(model: Path, folder: Path) -> Iterator[Server]:
    with serve(model, folder, max_total_tokens=6000) as running:
        yield running


@pytest.fixture
def server(shared: Server) -> Server:
    assert shared.post("/flush_cache", {}).status_code == 200
    return shared


def talk(system: str, *turns: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"]
    said = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


def chat(server: Server, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", {"messages": messages, **ASK, **fields})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def explain(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post("/cache/explain", body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def tree(server: Server, **query: Any) -> dict[str, Any]:
    answer = httpx.get(server.url + "/cache/tree", params=query, timeout=20)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def text(tokens: list[dict[str, Any]]) -> str:
    return "".join(token["text"] for token in tokens)


def metrics(server: Server) -> dict[str, float]:
    lines = httpx.get(server.url + "/metrics", timeout=20).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_what_is_explained_is_what_the_request_then_reports(server: Server) -> None:
    first = chat(server, talk(SYSTEM, "What is the capital of France?"))
    assert first["usage"]["cache"] == {"matched": 0, "stopped": "cold"}
    for messages in (
        talk(SYSTEM, "What is the capital of France?"),
        talk(SYSTEM, "What is the capital of Italy?"),
        talk(SYSTEM.replace("river", "tree"), "What is the capital of Italy?"),
        [{"role": "user", "content": "What is the capital of Italy?"}],
    ):
        told = explain(server, messages=messages)
        usage = chat(server, messages)["usage"]
        assert usage["cache"] == {"matched": told["matched"], "stopped": told["stopped"]}
        assert usage["prompt_tokens"] == told["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == told["matched"]


def test_explain_and_generate_agree_on_plain_prompts_and_ids(server: Server) -> None:
    for prompt in ("A river is a stream of water", "A river is a stream of wood", list(range(5, 60))):
        kind = "text" if isinstance(prompt, str) else "input_ids"
        for _ in range(2):
            told = explain(server, prompt=prompt)
            body = {kind: prompt, "sampling_params": {"max_new_tokens": 2}}
            meta = server.post("/generate", body).json()["meta_info"]
            assert meta["cache"] == {"matched": told["matched"], "stopped": told["stopped"]}
            assert meta["cached_tokens"] == told["matched"]
            assert meta["prompt_tokens"] == told["prompt_tokens"]


def test_a_changed_system_prompt_is_found_to_the_token(server: Server) -> None:
    chat(server, talk(SYSTEM, "What is the capital of France?"))
    told = explain(server, messages=talk(SYSTEM.replace("to the sea", "to the plain"), "What now?"))
    assert told["stopped"] == "diverged"
    assert told["place"] == "in messages[0].content"
    assert text(told["matched_text_tail"]).endswith("that flows to the")
    assert text(told["next"]).startswith(" plain")
    # No keys, and the call comes from this machine: what is cached there may be shown.
    (instead,) = told["cached_instead"]
    assert text(instead).startswith(" sea; answer")
    assert " sea; answer" in told["reason"]
    assert sum(segment["tokens"] for segment in told["segments"]) == told["matched"]


def test_a_date_in_the_template_is_blamed_on_the_template(model: Path, folder: Path) -> None:
    template = folder / "dated.jinja"
    template.write_text(
        "<|im_start|>system\nToday is {{ today }}.<|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    with serve(model, folder, chat_template=template) as dated:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        chat(dated, question, chat_template_kwargs={"today": "Monday"})
        told = explain(dated, messages=question, chat_template_kwargs={"today": "Tuesday"})
        assert told["place"] == "in what the chat template writes before messages[0].content"
        assert text(told["matched_text_tail"]).endswith("Today is ")
        assert "Monday" in told["reason"]


def test_a_longer_chat_is_said_to_be_new_only_at_its_end(server: Server) -> None:
    messages = talk(SYSTEM, "What is the capital of France?")
    first = chat(server, messages)
    answer = first["choices"][0]["message"]["content"]
    longer = [*messages, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "Why?"}]
    told = explain(server, messages=longer)
    assert told["matched"] >= first["usage"]["prompt_tokens"]
    assert told["place"] is None or "messages[2]" in told["place"]
    assert answer != "Paris"


def test_asking_changes_nothing(server: Server) -> None:
    chat(server, talk(SYSTEM, "What is the capital of France?"))
    before, state = tree(server, depth=64, ids=256, max_nodes=200), server.state()
    for _ in range(3):
        explain(server, messages=talk(SYSTEM, "Something else"))
        explain(server, prompt="cold", cache_salt="never used")
    assert tree(server, depth=64, ids=256, max_nodes=200) == before
    after = server.state()
    names = ("slots_cached", "nodes", "prompt_tokens_cached", "prompt_tokens_computed", "steps")
    assert {n: after[n] for n in names} == {n: state[n] for n in names}


def test_salts_share_nothing_and_are_told_nothing_of_each_other(server: Server) -> None:
    messages = talk(SYSTEM, "What is the capital of France?")
    chat(server, messages, cache_salt="alice")
    assert explain(server, messages=messages, cache_salt="alice")["stopped"] == "last_token"
    for salt in ("bob", None):
        told = explain(server, messages=messages, cache_salt=salt)
        assert (told["matched"], told["stopped"]) == (0, "cold")
        assert told["cached_instead"] == []
        assert "Nothing is cached" in told["reason"]
    chat(server, messages)
    assert explain(server, messages=messages, cache_salt="bob")["stopped"] == "namespace"
    label = namespaces.label("salt:alice")
    assert explain(server, messages=messages, cache_salt="alice")["namespace"] == label
    shown = tree(server, depth=64)
    assert {n["namespace"] for n in shown["namespaces"]} == {"", label}
    assert "alice" not in str(shown)
    assert [n["namespace"] for n in tree(server, namespace=label)["namespaces"]] == [label]
    assert [n["namespace"] for n in tree(server, namespace="")["namespaces"]] == [""]


def test_evicted_prompts_are_said_to_be(model: Path, folder: Path) -> None:
    with serve(model, folder, max_total_tokens=300) as small:
        prompt = list(range(5, 155))
        small.generate(prompt, max_new_tokens=1)
        for i in range(3):
            small.generate([50 + i] * 140, max_new_tokens=1)
        told = explain(small, prompt=prompt)
        assert told["stopped"] == "evicted"
        assert "evicted to make room" in told["reason"]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        cache = small.post("/generate", body).json()["meta_info"]["cache"]
        assert cache == {"matched": told["matched"], "stopped": "evicted"}


def test_logprobs_of_the_prompt_explain_a_miss(server: Server) -> None:
    prompt = list(range(5, 60))
    server.generate(prompt, max_new_tokens=1)
    told = explain(server, prompt=prompt, logprob_start_len=10)
    assert (told["matched"], told["stopped"]) == (9, "logprobs")
    assert "from token 10 on" in told["reason"]
    body = {
        "input_ids": prompt,
        "return_logprob": True,
        "logprob_start_len": 10,
        "sampling_params": {"max_new_tokens": 1},
    }
    assert server.post("/generate", body).json()["meta_info"]["cache"] == {
        "matched": 9,
        "stopped": "logprobs",
    }


def test_without_a_cache_nothing_is_kept(model: Path, folder: Path) -> None:
    with serve(model, folder, disable_radix_cache=True) as plain:
        prompt = list(range(5, 60))
        plain.generate(prompt, max_new_tokens=1)
        told = explain(plain, prompt=prompt)
        assert (told["matched"], told["stopped"]) == (0, "disabled")
        assert "--disable-radix-cache" in told["reason"]
        assert tree(plain)["tokens"] == 0


def test_the_tree_shows_texts_hits_locks_and_totals(server: Server) -> None:
    shared = talk(SYSTEM, "What is the capital of France?")
    for _ in range(3):
        chat(server, shared)
    chat(server, talk(SYSTEM, "A river?"))
    (namespace,) = tree(server, depth=9)["namespaces"]
    (first,) = namespace["children"]
    assert first["text"].startswith("<|im_start|>system\nYou are")
    assert first["hits"] == 3, "two repeats and the other question"
    assert first["locks"] == 0
    assert first["num_children"] == 2
    whole = tree(server, depth=64, max_nodes=2000)

    def tokens(node: dict[str, Any]) -> int:
        return int(node["tokens"]) + sum(map(tokens, node["children"]))

    assert sum(map(tokens, whole["namespaces"][0]["children"])) == whole["tokens"]
    assert whole["namespaces"][0]["tokens"] == whole["tokens"] == server.state()["slots_cached"]
    cut = tree(server, depth=64, max_nodes=1)
    assert cut["truncated"]
    assert not whole["truncated"]


def test_a_running_request_locks_its_path(server: Server) -> None:
    prompt = list(range(5, 60))
    server.generate(prompt, max_new_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        with held(server.children()["worker"]):
            running = pool.submit(server.generate, prompt, max_new_tokens=8)
            while not server.state()["running"]:
                assert not running.done()
            (namespace,) = tree(server)["namespaces"]
            assert [child["locks"] for child in namespace["children"]] == [1]
        running.result()
    (namespace,) = tree(server)["namespaces"]
    assert [child["locks"] for child in namespace["children"]] == [0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/cache/explain", {}),
        ("/cache/explain", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/cache/explain", {"prompt": ""}),
        ("/cache/explain", {"prompt": []}),
        ("/cache/explain", {"prompt": [999_999]}),
        ("/cache/explain", {"prompt": ["a", "b"]}),
        ("/cache/explain", {"prompt": "a", "temperature": 1}),
        ("/cache/explain", {"prompt": "a", "cache_salt": ""}),
        ("/cache/explain", {"prompt": "a", "logprob_start_len": -5}),
        ("/cache/explain", {"prompt": "a", "continue_final_message": True}),
        ("/cache/explain", {"prompt": [5], "add_special_tokens": False}),
        ("/cache/explain", {"messages": []}),
        ("/cache/tree?depth=x", None),
        ("/cache/tree?depth=65", None),
        ("/cache/tree?limit=0", None),
        ("/cache/tree?ids=-1", None),
        ("/cache/tree?ids=256&max_nodes=5000", None),
        ("/cache/tree?nonsense=1", None),
    ],
)
def test_bad_questions_are_400_and_name_what_is_wrong(server: Server, path: str, body: Any) -> None:
    answer = httpx.get(server.url + path) if body is None else server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert "/site-packages/" not in answer.text
    assert ".py" not in answer.text


def test_metrics_count_by_namespace_and_by_reason(model: Path, folder: Path) -> None:
    with serve(model, folder, served_model_name="sap") as fresh:
        prompt = list(range(5, 105))
        for salt in (None, None, "alice", "alice", "alice"):
            body = {"input_ids": prompt, "cache_salt": salt, "sampling_params": {"max_new_tokens": 1}}
            assert fresh.post("/generate", body).status_code == 200
        assert httpx.get(fresh.url + "/nowhere").status_code == 404
        now = metrics(fresh)
        for label, requests in (("", 2), (namespaces.label("salt:alice"), 3)):
            where = f'{{model="sap",namespace="{label}"}}'
            assert now[f"sapwood_prompt_tokens_total{where}"] == 100 * requests
            assert now[f"sapwood_cached_prompt_tokens_total{where}"] == 99 * (requests - 1)
            assert now[f"sapwood_prefill_saved_seconds_total{where}"] > 0
        assert now['sapwood_prefix_lookups_total{stopped="last_token"}'] == 3
        assert now['sapwood_prefix_lookups_total{stopped="cold"}'] == 1
        assert now['sapwood_prefix_lookups_total{stopped="namespace"}'] == 1
        counted = 'sapwood_http_requests_total{method="POST",route="/generate",status="200"}'
        assert now[counted] == 5
        assert now['sapwood_http_requests_total{method="GET",route="unrouted",status="404"}'] == 1
        assert "alice" not in str(now)


def test_only_the_admin_sees_what_others_have_sent(model: Path, folder: Path) -> None:
    with serve(model, folder, api_key="user-key", admin_api_key="admin-key") as guarded:

        def call(key: str | None, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            if body is None:
                return httpx.get(guarded.url + path, headers=headers, timeout=20)
            return httpx.post(guarded.url + path, json=body, headers=headers, timeout=20)

        secret = talk(SYSTEM, "The answer to the question is in the first book")
        assert call("user-key", "/v1/chat/completions", {"messages": secret, **ASK}).status_code == 200
        probe = {"messages": talk(SYSTEM, "The answer to the question is not")}
        seen = call("user-key", "/cache/explain", probe).json()
        assert seen["stopped"] == "diverged"
        assert seen["matched"] > 20
        assert "cached_instead" not in seen
        assert "segments" not in seen
        assert "first book" not in str(seen)
        shown = call("admin-key", "/cache/explain", probe).json()
        assert "first book" in text(shown["cached_instead"][0])
        own = {key: shown[key] for key in seen if key != "reason"}
        assert own == {key: seen[key] for key in seen if key != "reason"}
        assert call(None, "/cache/explain", probe).status_code == 401
        assert call("user-key", "/cache/tree").status_code == 403
        assert call(None, "/cache/tree").status_code == 401
        assert "first book" in call("admin-key", "/cache/tree?depth=9&ids=128&max_nodes=99").text


def test_a_user_key_alone_shows_no_prompts_of_others(model: Path, folder: Path) -> None:
    """Without an admin key nobody may see them over HTTP: a shared key is everybody's."""
    with serve(model, folder, api_key="user-key") as shared_key:
        headers = {"authorization": "Bearer user-key"}
        body = {"prompt": "What is the capital of France?", "max_tokens": 2}
        httpx.post(shared_key.url + "/v1/completions", json=body, headers=headers).raise_for_status()
        probe = httpx.post(
            shared_key.url + "/cache/explain",
            json={"prompt": "What is the capital of Italy?"},
            headers=headers,
        ).json()
        assert probe["matched"] > 0
        assert "cached_instead" not in probe
        assert "France" not in str(probe)
        assert httpx.get(shared_key.url + "/cache/tree", headers=headers).status_code == 403
