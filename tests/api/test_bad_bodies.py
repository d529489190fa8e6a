"""No body crashes the server or gets anything but a JSON error with the right status (P47)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import ChatPrompt, Generate
from sapwood.srt.server import guard
from sapwood.srt.server.protocol import CompletionRequest
from sapwood.srt.server.service import Service
from tests.api.scripted import Harness, client

CHAT = "/v1/chat/completions"
ROUTES = (
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/cache/explain",
    "/abort_request",
)


def chat_body(content: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"' + content + b'"}]}'


def send(http: httpx.Client, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json", **headers})


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert "Traceback" not in response.text
    return dict(error)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"text"',
        b"null",
        b"{} x",
        b"{'a': 1}",
        b'{"a": NaN}',
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b'{"rid": "\xff"}',
        b'{"rid": "\\ud800"}',
        b"[" * 100_000,
        b'{"x":' * 100_000,
        b"\x00" * 100,
    ],
)
def test_what_is_no_json_object(server: Harness, http: httpx.Client, path: str, body: bytes) -> None:
    error = error_of(send(http, body, path))
    assert error["type"] == "invalid_request_error"
    assert server.tokenizer.received == []


@pytest.mark.parametrize("text", [rb"\ud800", rb"a\udfffb", rb"\ud83d\ud83d\ude42", rb"\udc00\ud800"])
def test_lone_surrogates(http: httpx.Client, text: bytes) -> None:
    error = error_of(send(http, chat_body(text)))
    assert error["code"] == "invalid_json"
    assert "lone surrogate" in error["message"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (rb"\ud83d\ude42", "🙂"),
        (rb"\u0000", "\0"),
        ("é🙂".encode(), "é🙂"),
        (rb"\\ud800", "\\ud800"),
        (b"x" * 4_000_000, "x" * 4_000_000),
    ],
    ids=["pair", "nul", "raw", "escaped", "large"],
)
def test_text_that_is_fine(server: Harness, http: httpx.Client, text: bytes, read: str) -> None:
    assert send(http, chat_body(text)).status_code == 200
    prompt = server.tokenizer.wait_for(Generate)[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["content"] == read


def test_bad_utf8_in_text(http: httpx.Client) -> None:
    assert error_of(send(http, chat_body(b"a\xffb")))["code"] == "invalid_json"


def test_of_duplicate_keys_the_last_counts(server: Harness, http: httpx.Client) -> None:
    body = b'{"seed":1,"messages":[{"role":"user","content":"x"}],"seed":2}'
    assert send(http, body).status_code == 200
    assert server.tokenizer.wait_for(Generate)[-1].params.seed == 2


def test_free_form_values_have_a_depth_limit(http: httpx.Client) -> None:
    def body(depth: int) -> bytes:
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        return chat_body(b"x")[:-1] + b',"chat_template_kwargs":' + deep + b"}"

    assert send(http, body(30)).status_code == 200
    assert error_of(send(http, body(100)))["param"] == "chat_template_kwargs"
    assert error_of(send(http, body(100_000)))["code"] == "invalid_json"


def test_too_large_a_body(server: Harness, http: httpx.Client) -> None:
    limit = server.config.max_body_bytes
    body = chat_body(b"x" * 5_000_000)
    error = error_of(send(http, body), 413)
    assert error["code"] == "request_too_large"
    assert str(limit) in error["message"]
    assert str(len(body)) in error["message"]
    assert send(http, chat_body(b"x")).status_code == 200


def test_too_large_a_body_without_a_length(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    assert error_of(send(http, pieces()), 413)["code"] == "request_too_large"
    assert send(http, chat_body(b"x")).status_code == 200


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_wrong_content_types(http: httpx.Client, media: str) -> None:
    error = error_of(send(http, chat_body(b"x"), **{"content-type": media}), 415)
    assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "media", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_content_types_that_are_json(http: httpx.Client, media: str) -> None:
    assert send(http, chat_body(b"x"), **{"content-type": media}).status_code == 200


def test_no_content_type(http: httpx.Client) -> None:
    assert http.post(CHAT, content=chat_body(b"x")).status_code == 200


@pytest.mark.parametrize("path", ["/", "/nope", "/v1", "/v1/chat", "/v1/chat/completions/x"])
def test_unknown_routes(http: httpx.Client, path: str) -> None:
    error = error_of(http.get(path), 404)
    assert error["code"] == "not_found"
    assert path in error["message"]


def test_wrong_methods(http: httpx.Client) -> None:
    response = http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(http.delete("/health"), 405)["param"] is None


def test_an_internal_error_shows_no_traceback(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(server.client, "submit_all", fail)
    with client(server) as own:  # the server closes its connection
        error = error_of(send(own, chat_body(b"x")), 500)
    assert error == {
        "message": "internal error",
        "type": "server_error",
        "code": "internal_error",
        "param": None,
    }


@pytest.mark.parametrize("digits", [20, 400, 1000, 4300, 100_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages":[{"role":"user","content":"x"}],"n":%s}'),
        (CHAT, '{"messages":[{"role":"user","content":"x"}],"logit_bias":{"%s":1}}'),
        (CHAT, '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":%s}}'),
        (CHAT, '{"messages":[{"role":"user","content":"x"}],"prompt_logprobs":%s}'),
        (CHAT, '{"messages":[{"role":"user","content":"x"}],"priority":%s}'),
        (CHAT, '{"messages":[{"role":"user","content":"x"}],"timeout":%s}'),
        ("/v1/completions", '{"prompt":[%s]}'),
        ("/v1/completions", '{"prompt":"x","best_of":%s}'),
        ("/v1/completions", '{"prompt":"x","max_tokens":%s}'),
        ("/v1/embeddings", '{"input":"x","dimensions":%s}'),
        ("/generate", '{"text":"x","return_logprob":true,"logprob_start_len":%s}'),
        ("/generate", '{"text":"x","return_logprob":true,"token_ids_logprob":[%s]}'),
        ("/detokenize", '{"tokens":[%s]}'),
    ],
)
def test_numbers_of_many_digits(
    server: Harness, http: httpx.Client, path: str, body: str, digits: int
) -> None:
    for sign in ("", "-"):
        number = sign + "9" * digits
        error_of(send(http, body.replace("%s", number).encode(), path))
    assert server.tokenizer.received == []


def test_a_long_list_of_ids_is_refused_before_it_is_looked_at(
    new_server: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million ids fit in a body."""

    def fail(*_args: object) -> None:
        raise RuntimeError("the ids were looked at")

    harness = new_server()
    harness.service.max_request_tokens = 2048
    with client(harness) as http:
        assert http.post("/v1/completions", json={"prompt": [5] * 2048}).status_code == 200
        monkeypatch.setattr(Service, "packed", fail)
        body = b"[" + b"5," * 1_000_000 + b"5]"
        for path, field in (
            ("/v1/completions", b"prompt"),
            ("/generate", b"input_ids"),
            ("/v1/embeddings", b"input"),
        ):
            error = error_of(send(http, b'{"' + field + b'":' + body + b"}", path))
            assert error["code"] == "context_length_exceeded"
            assert "1000001" in error["message"]
            assert "2048" in error["message"]


def test_the_collector_rests_while_a_large_body_is_read() -> None:
    """It made a million small lists take two seconds, in which no stream goes on."""
    runs: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        runs.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        guard.decode(b'{"prompt":[' + b"[1]," * 300_000 + b"[1]]}", CompletionRequest)
        assert len(runs) <= 4
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    with pytest.raises(BadRequest):
        guard.decode(b"[" * 100_000, CompletionRequest)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]},
            "messages[0].content",
        ),
        ({"chat_template_kwargs": {"a": [1] * 100_000}}, "chat_template_kwargs"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [5] * 257}, "stop_token_ids"),
        ({"n": 129}, "n"),
    ],
)
def test_long_lists(server: Harness, http: httpx.Client, fields: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert error_of(http.post(CHAT, json=body))["param"] == param
    assert server.tokenizer.received == []


@pytest.mark.parametrize(
    "kind", ["image_url", "input_audio", "file", "video_url", "refusal", "xyz", "é" * 500]
)
def test_parts_that_are_not_text(server: Harness, http: httpx.Client, kind: str) -> None:
    content = [{"type": "text", "text": "look"}, {"type": kind, "url": "http://localhost/x.png"}]
    error = error_of(http.post(CHAT, json={"messages": [{"role": "user", "content": content}]}))
    assert (error["code"], error["param"]) == ("unsupported", "messages[0].content[1].type")
    assert kind[:100] in error["message"]
    assert "text parts only" in error["message"]
    assert server.tokenizer.received == []


def test_a_template_of_the_request_is_refused(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}
    assert "templates come from --chat-template" in error_of(http.post(CHAT, json=body))["message"]


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("/generate", "input_ids", [5]),
        ("/generate", "text", ""),
        ("/v1/completions", "prompt", [5]),
        ("/v1/completions", "prompt", ""),
        ("/v1/embeddings", "input", [5]),
        ("/v1/embeddings", "input", ""),
    ],
)
def test_too_many_prompts_are_refused_before_they_are_looked_at(
    server: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, field: str, prompt: Any
) -> None:
    """900,000 short prompts fit in a body; to make each one ready held up every stream for nine seconds."""

    def fail(*_args: object) -> None:
        raise RuntimeError("a prompt was looked at")

    monkeypatch.setattr(Service, "prompts", fail)
    too_many = [prompt] * (server.config.max_queued_requests + 1)
    error = error_of(http.post(path, json={field: too_many}))
    assert error["code"] == "invalid_value"
    assert str(len(too_many)) in error["message"]
    assert server.tokenizer.received == []
