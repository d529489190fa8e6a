"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import Ask, ChatPrompt, IdsPrompt, TextPrompt, pack
from tests.api.scripted import Harness, detokenize
from tests.api.test_streams import raw_post

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def splits(server: Harness) -> Harness:
    server.tokenizer.answers = {
        "tokenize": {"tokens": [5, 6], "texts": ["a", " b"]},
        "detokenize": detokenize,
    }
    return server


def tokenize(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/tokenize", json=fields)


def asked(server: Harness) -> Any:
    return server.tokenizer.wait_for(Ask)[-1].prompt


def refused(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def test_a_text(splits: Harness, http: httpx.Client) -> None:
    answer = tokenize(http, prompt="a b").json()
    assert answer == {"count": 2, "max_model_len": 2048, "tokens": [5, 6], "token_strs": None}
    assert asked(splits) == TextPrompt("a b")
    assert tokenize(http, prompt="", add_special_tokens=False, model="tiny").status_code == 200
    assert asked(splits) == TextPrompt("", False)
    assert tokenize(http, prompt="a b", return_token_strs=True).json()["token_strs"] == ["a", " b"]


@pytest.mark.parametrize(
    ("route", "what", "body"),
    [
        ("/tokenize", "tokenize", {"prompt": "a b"}),
        ("/detokenize", "detokenize", {"tokens": [5, 6]}),
        ("/cache/explain", "explain", {"prompt": "a b"}),
    ],
)
def test_a_client_that_leaves_cancels_its_question(
    server: Harness, route: str, what: str, body: dict[str, Any]
) -> None:
    server.tokenizer.answers = {what: None}
    with raw_post(server, route, body):
        server.tokenizer.wait_for(Ask)
    asked, cancelled = server.tokenizer.wait_for(Ask, 2)
    assert (asked.what, cancelled.what) == (what, "cancel")
    assert asked.call == cancelled.call


def test_a_chat(splits: Harness, http: httpx.Client) -> None:
    assert tokenize(http, messages=CHAT, tools=None, add_special_tokens=False).json()["count"] == 2
    assert asked(splits) == ChatPrompt(CHAT, True, False, {})
    fields = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    assert tokenize(http, messages=CHAT, **fields).status_code == 200
    assert asked(splits) == ChatPrompt(CHAT, False, False, {"a": 1})


def test_ids(splits: Harness, http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [5, 6]}).json() == {"prompt": " <5> <6>"}
    assert asked(splits) == IdsPrompt(pack([5, 6]))
    splits.tokenizer.received.clear()
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert splits.tokenizer.received == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": CHAT}, "prompt"),
        ({"prompt": [5]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": CHAT, "tools": [{}]}, "tools[0].type"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "x", "zz": True}, "zz"),
    ],
)
def test_bad_values(splits: Harness, http: httpx.Client, fields: Any, param: str) -> None:
    assert refused(tokenize(http, **fields))["param"] == param
    assert splits.tokenizer.received == []


@pytest.mark.parametrize("tokens", [[1000], [-1], [10**30], ["x"], 5, None])
def test_bad_ids(splits: Harness, http: httpx.Client, tokens: Any) -> None:
    assert str(refused(http.post("/detokenize", json={"tokens": tokens}))["param"]).startswith("tokens")
    assert splits.tokenizer.received == []


def test_unknown_models(http: httpx.Client) -> None:
    assert tokenize(http, prompt="x", model="gpt-4").status_code == 404
    assert http.post("/detokenize", json={"tokens": [5], "model": "gpt-4"}).status_code == 404


def test_errors_of_the_tokenizer_are_the_answers(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers = {"tokenize": BadRequest("no chat template", param="messages").info()}
    error = refused(tokenize(http, messages=CHAT))
    assert (error["message"], error["param"]) == ("no chat template", "messages")
