"""`/v1/embeddings`: order, encodings, pooling, counts."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from sapwood.srt.config import make
from sapwood.srt.messages import Abort, Chunk, Ended, Finish, Generate, IdsPrompt, Message, TextPrompt, unpack
from sapwood.srt.params import SamplingParams
from tests.api.scripted import Harness, client, reading, refuse, source, started


@pytest.fixture
def pools(server: Harness) -> Harness:
    """Whose vectors are (3, number of tokens, 4)."""
    server.tokenizer.script = reading
    return server


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json=fields)


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def unit(*values: float) -> list[float]:
    return [value / math.hypot(*values) for value in values]


def test_through_the_openai_client(pools: Harness, ai: openai.OpenAI) -> None:
    """Which asks for base64 unless it is told otherwise."""
    answer = ai.embeddings.create(model="tiny", input=["a", "a b c"])
    assert answer.object == "list"
    assert answer.model == "tiny"
    assert [item.index for item in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx(unit(3, 1, 4), rel=1e-6)
    assert answer.data[1].embedding == pytest.approx(unit(3, 3, 4), rel=1e-6)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
    floats = ai.embeddings.create(model="tiny", input="a", encoding_format="float")
    assert floats.data[0].embedding == answer.data[0].embedding


@pytest.mark.parametrize(
    ("value", "counts"),
    [("a b", [2]), (["a", "b c"], [1, 2]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])],
)
def test_inputs_in_their_order(pools: Harness, http: httpx.Client, value: Any, counts: list[int]) -> None:
    answer = post(http, input=value, normalize=False).json()
    assert [item["embedding"] for item in answer["data"]] == [[3.0, float(n), 4.0] for n in counts]
    assert answer["usage"]["prompt_tokens"] == sum(counts)
    assert answer["usage"]["completion_tokens"] == 0


def test_encodings(pools: Harness, http: httpx.Client) -> None:
    raw = post(http, input="a", normalize=False, encoding_format="base64").json()["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(raw)) == (3.0, 1.0, 4.0)
    numbers = post(http, input="a", encoding_format="float").json()["data"][0]["embedding"]
    assert math.hypot(*numbers) == pytest.approx(1.0, abs=1e-6)


def test_a_zero_vector_stays_zero(server: Harness, http: httpx.Client) -> None:
    from sapwood.srt.messages import Read

    def script(g: Generate) -> list[Message]:
        finish = Chunk(g.rid, 0, "", b"", None, Finish("length", None, 0))
        return [started(g), Read(g.rid, pooled=bytes(12)), finish, Ended(g.rid)]

    server.tokenizer.script = script
    assert post(http, input="a").json()["data"][0]["embedding"] == [0.0, 0.0, 0.0]


def test_each_input_is_one_prompt_without_output(pools: Harness, http: httpx.Client) -> None:
    body = {"input": ["a", "b"], "cache_salt": "s", "rid": "mine", "add_special_tokens": False}
    assert post(http, **body).headers["x-request-id"] == "mine"
    sent = pools.tokenizer.wait_for(Generate, 2)
    assert [g.prompt for g in sent] == [TextPrompt("a", False), TextPrompt("b", False)]
    assert {g.namespace for g in sent} == {"salt:s"}
    assert sent[0].params == SamplingParams(max_tokens=0, pooling="last")
    assert post(http, input=[5], pooling="mean", cache_report=True).json()["usage"]["cache"]["matched"] == 0
    last = pools.tokenizer.wait_for(Generate, 3)[-1]
    assert last.params.pooling == "mean"
    assert isinstance(last.prompt, IdsPrompt)
    assert unpack(last.prompt.ids).tolist() == [5]


def test_the_flag_is_the_default(new_server: Any) -> None:
    harness = new_server(make(pooling="mean"))
    harness.tokenizer.script = reading
    with client(harness) as http:
        assert post(http, input="a").status_code == 200
        assert post(http, input="a", pooling="last").status_code == 200
    assert [g.params.pooling for g in harness.tokenizer.wait_for(Generate, 2)] == ["mean", "last"]


def test_dimensions(new_server: Any) -> None:
    for config in ({"hidden_size": 3}, {"text_config": {"hidden_size": 3}}):
        harness = new_server(model=source(config=config))
        harness.tokenizer.script = reading
        with client(harness) as http:
            assert post(http, input="a", dimensions=3).status_code == 200
            error = refused(http, input="a", dimensions=2)
            assert error["param"] == "dimensions"
            assert "3" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [1000]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "cls"}, "pooling"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "x", "timeout": 0}, "timeout"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": [5], "add_special_tokens": True}, "add_special_tokens"),
        ({"input": ["x"] * 5000}, "input"),
    ],
)
def test_bad_values(server: Harness, http: httpx.Client, fields: Any, param: str) -> None:
    assert refused(http, **fields)["param"] == param
    assert server.tokenizer.received == []


def test_an_error_of_one_input_is_the_error_of_the_request(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = lambda g: refuse(g) if g.prompt == TextPrompt("bad") else [started(g)]
    assert refused(http, input=["good", "bad"])["code"] == "context_length_exceeded"
    server.tokenizer.wait_for(Abort)


def test_an_aborted_request_has_no_vector(server: Harness, http: httpx.Client) -> None:
    def script(g: Generate) -> list[Message]:
        return [started(g), Chunk(g.rid, 0, "", b"", None, Finish("abort", None, 0)), Ended(g.rid)]

    server.tokenizer.script = script
    response = post(http, input="a")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "aborted"
