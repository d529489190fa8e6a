"""Real servers: API keys find nothing of each other, shared prefixes are for all, fields do their work."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import sapwood
from sapwood.srt.errors import ConfigError
from tests.models import tiny_llama
from tests.serving import Server, command, free_port, held, serve

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-operator"
SYSTEM = "You are the river that flows to the sea; answer in one sentence."
PROMPT = list(range(5, 65))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("isolation")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_llama(folder / "model", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def prefixes(folder: Path) -> Path:
    path = folder / "prefixes.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": SYSTEM}]}) + "\n")
    return path


@pytest.fixture(scope="module")
def shared(model: Path, folder: Path, prefixes: Path) -> Iterator[Server]:
    with serve(
        model,
        folder,
        max_total_tokens=4000,
        api_key=f"{ALICE},{BOB}",
        admin_api_key=ADMIN,
        shared_prefixes=prefixes,
    ) as running:
        yield running


@pytest.fixture
def server(shared: Server) -> Server:
    call(shared, ADMIN, "/flush_cache", {})
    return shared


def call(server: Server, key: str, path: str, body: Any = None, **headers: str) -> Any:
    """The JSON that a route answers with."""
    told = httpx.request(
        "GET" if body is None else "POST",
        server.url + path,
        json=body,
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=60,
    )
    assert told.status_code == 200, told.text
    return told.json()


def cache(server: Server, key: str, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    """What a request found."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "cache_report": True}
    usage = call(server, key, "/v1/completions", {**body, **fields})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["cache"]["matched"]
    found: dict[str, Any] = usage["cache"]
    return found


def explain(server: Server, key: str, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = call(server, key, "/cache/explain", {"prompt": prompt, **fields})
    return found


def digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_two_keys_find_nothing_of_each_other(server: Server) -> None:
    assert cache(server, ALICE) == {"matched": 0, "stopped": "cold"}
    assert cache(server, ALICE) == {"matched": 59, "stopped": "last_token"}
    before = explain(server, BOB)
    assert (before["matched"], before["stopped"]) == (0, "cold")
    assert before["reason"] == "Nothing is cached under this API key without a cache_salt."
    assert cache(server, BOB) == {"matched": 0, "stopped": "cold"}
    assert cache(server, ADMIN) == {"matched": 0, "stopped": "cold"}
    assert cache(server, BOB) == {"matched": 59, "stopped": "last_token"}


def test_what_bob_is_told_is_the_same_whatever_alice_has_cached(server: Server) -> None:
    """P: neither numbers nor sentences depend on another key's cache."""
    asked: list[dict[str, Any]] = [{}, {"cache_salt": "s"}, {"cache_salt": ALICE}]
    alone = [explain(server, BOB, **fields) for fields in asked]
    for fields in ({}, {"cache_salt": "s"}, {"cache_salt": ALICE}):
        cache(server, ALICE, **fields)
        cache(server, ADMIN, **fields)
    assert [explain(server, BOB, **fields) for fields in asked] == alone
    assert [cache(server, BOB, **fields)["matched"] for fields in asked] == [0, 0, 0]


def test_salts_under_keys(server: Server) -> None:
    cache(server, ALICE, cache_salt="s")
    assert cache(server, ALICE, cache_salt="s")["matched"] == 59
    assert cache(server, ALICE) == {"matched": 0, "stopped": "cold"}
    assert cache(server, ALICE, cache_salt="t") == {"matched": 0, "stopped": "namespace"}
    told = explain(server, ALICE, cache_salt="u")
    assert told["stopped"] == "namespace"
    assert "The cache of this API key (of requests without a cache_salt)" in told["reason"]
    # Bob has sent nothing without a salt: what Alice and the admin have is not his to know.
    assert cache(server, BOB, cache_salt="t") == {"matched": 0, "stopped": "cold"}


def test_the_admin_tells_caches_apart(server: Server) -> None:
    for key, salt in ((ALICE, None), (BOB, None), (BOB, "s")):
        cache(server, key, cache_salt=salt)
    shown = call(server, ADMIN, "/cache/tree")
    names = {namespace["namespace"] for namespace in shown["namespaces"]}
    mine = {f"key:{digits(ALICE)}", f"key:{digits(BOB)}", f"key:{digits(BOB)}:{digits('s')}"}
    assert mine <= names
    assert "listed" in names
    (one,) = call(server, ADMIN, f"/cache/tree?namespace=key:{digits(BOB)}")["namespaces"]
    assert one["tokens"] == len(PROMPT) + 1
    for secret in (ALICE, BOB, ADMIN):
        assert secret not in str(shown)
    page = httpx.get(server.url + "/metrics", headers={"x-api-key": ADMIN}).text
    assert f'namespace="key:{digits(ALICE)}"' in page
    assert ALICE not in page


def test_the_admin_explains_a_tenants_cache_with_both_keys(server: Server) -> None:
    cache(server, BOB)
    told = call(server, BOB, "/cache/explain", {"prompt": [*PROMPT[:30], 7, 8]}, **{"x-api-key": ADMIN})
    assert (told["matched"], told["stopped"]) == (30, "diverged")
    assert [token["id"] for token in told["cached_instead"][0]][:3] == PROMPT[30:33]
    assert "cached_instead" not in explain(server, BOB, [*PROMPT[:30], 7, 8])
    assert explain(server, ADMIN, [*PROMPT[:30], 7, 8])["matched"] == 0


def chat(server: Server, key: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_report": True, **fields}
    answer: dict[str, Any] = call(server, key, "/v1/chat/completions", body)
    return answer


def test_shared_prefixes_are_there_at_once_for_all_keys_and_salts(server: Server) -> None:
    system = {"messages": [{"role": "system", "content": SYSTEM}], "add_generation_prompt": False}
    listed = call(server, ALICE, "/tokenize", system)["count"]
    asked = [(ALICE, "Why?", {}), (BOB, "Why?", {}), (BOB, "Why?", {"cache_salt": "s"}), (ADMIN, "Why?", {})]
    for key, question, fields in asked:
        found = chat(server, key, question, **fields)["usage"]["cache"]
        assert found["matched"] >= listed, (key, fields)
        assert found["matched"] < listed + 8, "what Alice has asked is not shared"
    again = chat(server, ALICE, "Why?")["usage"]
    assert again["cache"] == {"matched": again["prompt_tokens"] - 1, "stopped": "last_token"}
    (shown,) = call(server, ADMIN, "/cache/tree?namespace=listed")["namespaces"]
    assert shown["tokens"] == listed
    call(server, ADMIN, "/flush_cache", {})
    assert chat(server, BOB, "Another?")["usage"]["cache"]["matched"] >= listed


def test_a_shared_prefix_changes_no_answer(server: Server, model: Path, folder: Path) -> None:
    with serve(model, folder, api_key=ALICE, disable_radix_cache=True) as plain:
        for question in ("Why?", "What is the capital of France?"):
            mine, other = (chat(one, ALICE, question)["choices"] for one in (server, plain))
            assert mine == other


def test_health_and_facts_tell_of_them(server: Server) -> None:
    assert httpx.get(server.url + "/health").status_code == 200
    assert call(server, ADMIN, "/server_info")["facts"]["shared prefixes"].startswith("1, of ")
    assert "shared prefixes" in server.output.read_text()


def test_a_new_worker_has_them_again(model: Path, folder: Path, prefixes: Path) -> None:
    with serve(model, folder, api_key=ALICE, shared_prefixes=prefixes, restart_worker=True) as one:
        first = chat(one, ALICE, "Why?", cache_salt="a")["usage"]["cache"]["matched"]
        assert first > 0
        one.children()["worker"].kill()
        deadline = time.monotonic() + 60
        while "worker 1 is ready" not in one.output.read_text():
            assert time.monotonic() < deadline, one.output.read_text()
            time.sleep(0.05)
        while httpx.get(one.url + "/health").status_code != 200:
            assert time.monotonic() < deadline, one.output.read_text()
            time.sleep(0.05)
        question = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why?"}]}
        while call(one, ALICE, "/cache/explain", question)["matched"] != first:
            assert time.monotonic() < deadline, "they are not listed again"
            time.sleep(0.05)
        assert chat(one, ALICE, "Why?", cache_salt="b")["usage"]["cache"]["matched"] == first


def test_a_wrong_file_ends_the_start_with_2(model: Path, folder: Path) -> None:
    wrong = folder / "wrong.jsonl"
    for line, words in (
        ({"prompt": "x"}, "line 1: Object contains unknown field `prompt`"),
        ({"ids": [5] * 300}, "line 1: with it the prefixes take 300 tokens; they may take 250"),
        ({"ids": [5] * 2000}, "line 1: it has 2000 tokens; a prompt may have 1000"),
    ):
        wrong.write_text(json.dumps(line) + "\n")
        argv = command(model, port=free_port(), num_threads=1, max_total_tokens=1000, shared_prefixes=wrong)
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=folder)
        assert ended.returncode == 2, ended.stderr
        assert f"sapwood: error: --shared-prefixes {wrong}, {words}" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_the_engine_lists_them_too(model: Path, prefixes: Path, folder: Path) -> None:
    options: dict[str, Any] = {"num_threads": 1, "max_total_tokens": 4000, "log_level": "warning"}
    with sapwood.Engine(str(model), shared_prefixes=str(prefixes), **options) as engine:
        system = [{"role": "system", "content": SYSTEM}]
        assert engine.server_info()["facts"]["shared prefixes"].startswith("1, of ")
        for salt in (None, "a", "b"):
            told = engine.cache_explain([*system, {"role": "user", "content": "Why?"}], cache_salt=salt)
            assert told["matched"] > 20
    wrong = folder / "wrong-too.jsonl"
    wrong.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1: exactly one of"):
        sapwood.Engine(str(model), shared_prefixes=str(wrong), **options)


def test_what_is_kept_outlives_what_is_not(model: Path, folder: Path) -> None:
    with serve(model, folder, max_total_tokens=600) as small:
        kept, gone = [7] * 60, [9] * 60
        for prompt, seconds in ((kept, 3600), (gone, 0)):
            body = {"input_ids": prompt, "keep": seconds, "sampling_params": {"max_new_tokens": 1}}
            assert small.post("/generate", body).status_code == 200
        for i in range(12):
            small.generate([50 + i] * 150, max_new_tokens=1)
        told = [small.post("/cache/explain", {"prompt": prompt}).json() for prompt in (kept, gone)]
        assert told[0]["matched"] == 59
        assert told[1]["matched"] < 59


@pytest.mark.parametrize(("low_first", "order"), [(None, ["high", "low"]), (True, ["low", "high"])])
def test_who_goes_first_by_priority(
    model: Path, folder: Path, low_first: bool | None, order: list[str]
) -> None:
    flags = {"schedule_policy": "priority", "schedule_low_priority_values_first": low_first}
    with serve(model, folder, max_running_requests=1, **flags) as one, ThreadPoolExecutor(3) as pool:

        def run(token: int, priority: int) -> int:
            """How much it found in the cache."""
            body = {
                "input_ids": [token] * 20,
                "priority": priority,
                "sampling_params": {"max_new_tokens": 40, "ignore_eos": True},
            }
            told = one.post("/generate", body)
            assert told.status_code == 200
            cached: int = told.json()["meta_info"]["cached_tokens"]
            return cached

        def wait_for(what: str, count: int) -> None:
            while one.state()[what] < count:
                assert not running.done(), "it has ended too soon"
                time.sleep(0.01)

        with held(one.children()["worker"]):
            # The most urgent of all, so that nobody takes its place.
            running = pool.submit(run, 7, -9 if low_first else 9)
            wait_for("running", 1)
            others = {name: pool.submit(run, 8, priority) for name, priority in (("low", 1), ("high", 5))}
            wait_for("waiting", 2)
        assert running.result() == 0
        # Who goes first finds nothing yet of the prompt that both have.
        assert [others[name].result() for name in order] == [0, 19]
