"""What a stream's bytes are: events made of a mould equal those encoded whole, in every framing of a body."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from sapwood.srt.messages import Chunk as OneChunk, Generate, Message, TextLogprob, pack
from sapwood.srt.server.answers import ChatChunk, Completion, Mould
from tests.api.scripted import Harness, answer, client
from tests.api.test_chat import ASK

CHAT = "/v1/chat/completions"
TEXTS = ["a", "b", '"', "\\", "\n\r\t\x00\x7f", "é🌳\u2028", "</s>", "ab" * 500, "\ufffd", '","text":"']
NAMES = ["x", "a", "ab", 'a"b', "\\"]


def raw_stream(harness: Harness, path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    """Head and body as they came, until the connection was closed."""
    data = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", harness.port), 10) as sock:
        sock.sendall(head.encode() + data)
        got = b""
        while piece := sock.recv(65_536):
            got += piece
    return got


def unchunked(raw: bytes) -> tuple[bytes, int]:
    """The body of a chunked answer, and in how many chunks it came; it ends as it should."""
    body, count, rest = b"", 0, raw.partition(b"\r\n\r\n")[2]
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert rest == b""
            return body, count
        count += 1


def data_of(body: bytes) -> list[bytes]:
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") for event in events[:-1])
    return [event.removeprefix(b"data: ") for event in events[:-2]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_every_event_is_what_encoding_it_whole_gives(
    server: Harness, path: str, usage: bool, name: str
) -> None:
    server.tokenizer.script = lambda g: answer(g, TEXTS)
    body: dict[str, Any] = {**ASK} if path == CHAT else {"prompt": "x"}
    body |= {"n": 2, "rid": name} | ({"stream_options": {"include_usage": True}} if usage else {})
    events = data_of(unchunked(raw_stream(server, path, body))[0])
    kind = ChatChunk if path == CHAT else Completion
    said: dict[int, list[str]] = {0: [], 1: []}
    for event in events:
        value = msgspec.json.decode(event, type=kind)
        assert msgspec.json.encode(value) == event
        assert value.id == name
        for choice in value.choices:
            text = choice.text if isinstance(value, Completion) else choice.delta.content  # type: ignore[union-attr]
            if text:
                said[choice.index].append(text)
    assert said == {0: TEXTS, 1: TEXTS}


@pytest.mark.parametrize("text", TEXTS)
def test_a_mould_is_the_whole(text: str) -> None:
    def make(text: str) -> dict[str, Any]:
        return {"id": "ab", "choices": [{"text": text, "b": "a"}], "a": None}

    assert msgspec.json.encode(Mould(make).filled(text)) == msgspec.json.encode(make(text))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
def test_an_old_client_gets_the_same_without_chunks(server: Harness, path: str) -> None:
    body: dict[str, Any] = {CHAT: {**ASK}, "/generate": {"text": "x"}}.get(path, {"prompt": "x"})
    body["rid"] = "same"
    new, count = unchunked(raw_stream(server, path, body))
    old = raw_stream(server, path, body, "1.0")
    assert b"chunked" not in old.partition(b"\r\n\r\n")[0].lower()
    assert count >= 1

    def timeless(body: bytes) -> list[Any]:
        values = [json.loads(event) for event in data_of(body)]
        for value in values:
            value.pop("created", None)
            if "meta_info" in value:
                del value["meta_info"]["e2e_latency"]
        return values

    new_values, old_values = timeless(new), timeless(old.partition(b"\r\n\r\n")[2])
    if path != "/generate":  # whose events depend on what had come together
        assert old_values == new_values
    assert old_values[-1] == new_values[-1]


@pytest.mark.parametrize(
    "more",
    [{"logprobs": 1}, {"return_token_ids": True}, {"stream_options": {"continuous_usage_stats": True}}],
)
def test_chunks_that_say_more_than_text_say_it_in_each(
    server: Harness, http: httpx.Client, more: dict[str, Any]
) -> None:
    if "stream_options" in more:
        more["stream_options"]["include_usage"] = True
    body = {"prompt": "x", "stream": True, "max_tokens": 4, **more}
    events = data_of(http.post("/v1/completions", json=body).content)
    values = [json.loads(event) for event in events]
    texts = [v for v in values if v["choices"] and v["choices"][0]["text"]]
    assert len(texts) == 2
    for i, value in enumerate(texts):
        choice = value["choices"][0]
        if "logprobs" in more:
            assert choice["logprobs"]["token_logprobs"] == [-0.25 * (i + 1)]
        elif "return_token_ids" in more:
            assert choice["token_ids"] == [50 + i]
        else:
            assert i + 1 <= value["usage"]["completion_tokens"] <= 2


def test_logprobs_without_text_are_an_event(server: Harness, http: httpx.Client) -> None:
    """Of a chat that asks for those of its prompt only: its chunks bring some, which are not shown."""

    def script(g: Generate) -> Sequence[Message]:
        said = answer(g)
        item = TextLogprob(50, -1.0, "", b"\xe2", [])
        return [said[0], OneChunk(g.rid, 0, "", pack([50]), [item]), *said[1:]]

    server.tokenizer.script = script
    events = data_of(http.post(CHAT, json={**ASK, "stream": True, "logprobs": True}).content)
    shown = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    assert [len(each["content"]) for each in shown if each] == [1, 1, 1]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True, None])
def test_the_tokenizer_learns_who_sees_pieces(server: Harness, path: str, stream: bool | None) -> None:
    body: dict[str, Any] = {CHAT: {**ASK}, "/generate": {"text": "x"}}.get(path, {"prompt": "x"})
    with client(server) as http:
        assert http.post(path, json={**body, "stream": stream}).status_code == 200
    (generate,) = server.tokenizer.wait_for(Generate)
    assert generate.streamed is bool(stream)
