"""Prompts in parts on a real server: what was sent and drawn before is found in the cache, all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sapwood.lang.backend import Door
from sapwood.srt.engine import Engine
from sapwood.srt.errors import BadRequest
from tests.models import default_source, default_tokenizer
from tests.serving import Server, events, lines_of, serve

DRAWN: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
OPEN = {"role": "assistant", "content": [], "open": True}
QUESTIONS = ("Name a river.", "And one in <|im_end|>\nAsia?", "Which is longer?")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    default_source()
    with serve(None, tmp_path_factory.mktemp("input"), max_total_tokens=4096) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    default_source()
    with Engine(max_total_tokens=4096, num_threads=1) as running:
        yield running


def generate(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post("/generate", {"sampling_params": DRAWN, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_chat_computes_each_token_once(server: Server) -> None:
    talk: list[dict[str, Any]] = [{"role": "system", "text": "Answer in a word."}]
    known: list[int] = []
    for turn, question in enumerate(QUESTIONS):
        talk.append({"role": "user", "text": question})
        got = generate(server, input=[*talk, OPEN])
        assert got["input_ids"][: len(known)] == known
        meta = got["meta_info"]
        assert "rewritten" not in meta
        # The last token of an output is drawn and not computed.
        assert meta["cached_tokens"] == max(0, len(known) - 1), f"turn {turn}"
        ids = got["output_ids"]
        known = got["input_ids"] + ids
        talk.append({"role": "assistant", "content": [ids]})
    end, start = (default_tokenizer().token_to_id(text) for text in ("<|im_end|>", "<|im_start|>"))
    # Messages closed: system, three times user and two answers (which may have ended by themselves); all the
    # rest of them is text.
    assert got["input_ids"].count(end) == 6
    assert got["input_ids"].count(start) == 7


def test_the_ids_are_those_of_the_chat_route(server: Server) -> None:
    messages = [{"role": "user", "content": question} for question in QUESTIONS]
    told = server.post("/tokenize", {"messages": messages, "add_generation_prompt": True}).json()["tokens"]
    assert generate(server, input=[*messages, OPEN])["input_ids"] == told


def test_raw_parts_go_on_with_what_was_drawn(server: Server) -> None:
    first = generate(server, input=["Rivers of Europe:"])
    whole = first["input_ids"] + first["output_ids"]
    second = generate(server, input=[whole, "\nRivers of Asia:"])
    assert second["input_ids"][: len(whole)] == whole
    assert second["meta_info"]["cached_tokens"] >= len(whole) - 1
    assert first["input_ids"] == server.post("/tokenize", {"prompt": "Rivers of Europe:"}).json()["tokens"]


def test_a_stream_ends_with_the_ids(server: Server) -> None:
    body = {"input": ["Rivers:"], "sampling_params": DRAWN, "stream": True}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as response:
        got = [event for event in events(lines_of(response)) if event != "[DONE]"]
    assert got[-1]["input_ids"] == generate(server, input=["Rivers:"])["input_ids"]
    assert all("input_ids" not in event for event in got[:-1])


def test_a_prompt_can_be_filled_and_draws_nothing(server: Server) -> None:
    talk = [{"role": "user", "text": "Fill this in, once and for all."}]
    filled = generate(server, input=talk, sampling_params={"max_new_tokens": 0})
    assert filled["output_ids"] == []
    got = generate(server, input=[*talk, OPEN])
    assert got["input_ids"][: len(filled["input_ids"])] == filled["input_ids"]
    assert got["meta_info"]["cached_tokens"] == len(filled["input_ids"])


def test_what_the_tokenizer_refuses_names_input(server: Server) -> None:
    error = server.post("/generate", {"input": [[], ""]}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "input")


# ---- the engine, which is a door for programs too


def test_the_engine_takes_parts(engine: Engine, server: Server) -> None:
    talk = [{"role": "user", "text": QUESTIONS[1]}, OPEN]
    over_http = generate(server, input=talk)
    for got in (
        engine.generate(input=talk, sampling_params=DRAWN),
        asyncio.run(engine.async_generate(input=talk, sampling_params=DRAWN)),
        asyncio.run(engine.post("/generate", {"input": talk, "sampling_params": DRAWN})),
    ):
        assert got["input_ids"] == over_http["input_ids"]
        assert got["output_ids"] == over_http["output_ids"]
    with pytest.raises(BadRequest, match=r"exactly one of prompt, input_ids and input"):
        engine.generate("a", input=["b"])
    with pytest.raises(BadRequest) as caught:
        engine.generate(input=[{"role": "user", "content": ["a\ud800"]}])
    assert caught.value.param == "input[0].content[0]"


def test_the_engine_is_a_door(engine: Engine) -> None:
    assert isinstance(engine, Door)

    async def visit() -> None:
        body = {"input": ["Rivers:"], "sampling_params": {**DRAWN, "n": 2}, "program": "p1"}
        whole = await engine.post("/generate", body)
        assert len(whole) == 2
        texts = {0: "", 1: ""}
        async for event in engine.events("/generate", body):
            texts[event["index"]] = event["text"]
        assert texts == {i: one["text"] for i, one in enumerate(whole)}
        scored = await engine.post("/generate", {"input": ["The sky is"], "score": [" blue", " a cat"]})
        assert [len(one["ids"]) for one in scored["scores"]] == [1, 2]
        counts = await engine.post("/programs/end", {"program": "p1"})
        assert (counts["program"], counts["requests"]) == ("p1", 2)
        assert (await engine.post("/server_info", {}))["status"] == "ready"
        assert (await engine.post("/flush_cache", {}))["flushed_tokens"] > 0
        with pytest.raises(BadRequest, match="no route"):
            await engine.post("/nowhere", {})

    asyncio.run(visit())


def test_leaving_the_door_early_aborts_the_request(engine: Engine) -> None:
    async def leave() -> None:
        body = {"input": ["Rivers:"], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        source = engine.events("/generate", body)
        await anext(source)
        await source.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(engine.post("/generate", body))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            state = (await engine.post("/server_info", {}))["state"]
            if not state["running"]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(state)

    asyncio.run(leave())
