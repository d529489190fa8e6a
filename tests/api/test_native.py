"""`/generate` in SGLang's shape."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from sapwood.srt.messages import Chunk, Ended, Finish, Generate, IdsPrompt, Message, TextPrompt, pack, unpack
from tests.api.scripted import PROMPT_IDS, Harness, answer, started
from tests.api.test_chat import events


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/generate", json=fields)


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def test_one_text(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = lambda g: answer(g, matched=5, stopped="evicted")
    got = post(http, text="hello", rid="mine").json()
    assert set(got) == {"text", "output_ids", "meta_info"}
    assert got["text"] == "Paris"
    assert got["output_ids"] == [50, 51]
    meta = got["meta_info"]
    assert 0 < meta.pop("e2e_latency") < 5
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": 2,
        "cached_tokens": 5,
        "cache": {"matched": 5, "stopped": "evicted"},
    }


@pytest.mark.parametrize(
    ("finish", "matched", "reason"),
    [
        ("stop", "END", {"type": "stop", "matched": "END"}),
        ("length", None, {"type": "length", "length": 2}),
        ("abort", None, {"type": "abort", "message": "the request was aborted"}),
    ],
)
def test_finish_reasons(server: Harness, http: httpx.Client, finish: str, matched: Any, reason: Any) -> None:
    server.tokenizer.script = lambda g: answer(g, finish=finish, matched_stop=matched)
    assert post(http, text="x").json()["meta_info"]["finish_reason"] == reason


def test_lists_are_answered_by_lists(server: Harness, http: httpx.Client) -> None:
    assert [g["text"] for g in post(http, text=["a"]).json()] == ["Paris"]
    assert len(post(http, text=["a", "b"]).json()) == 2
    assert len(post(http, input_ids=[[5, 6], [7]]).json()) == 2
    assert post(http, input_ids=[5, 6]).json()["meta_info"]["prompt_tokens"] == 2
    sent = server.tokenizer.wait_for(Generate)[-1].prompt
    assert isinstance(sent, IdsPrompt)
    assert unpack(sent.ids).tolist() == [5, 6]


def test_choices_are_prompt_major(server: Harness, http: httpx.Client) -> None:
    """P15"""

    def script(g: Generate) -> list[Message]:
        assert isinstance(g.prompt, TextPrompt)
        finish = Finish("length", None, 1)
        said = [Chunk(g.rid, c, f"{g.prompt.text}{c}", pack([7]), None, finish) for c in range(g.params.n)]
        return [started(g), *said, Ended(g.rid)]

    server.tokenizer.script = script
    got = post(http, text=["a", "b"], sampling_params={"n": 2}).json()
    assert [g["text"] for g in got] == ["a0", "a1", "b0", "b1"]
    assert [g["text"] for g in post(http, text="a", sampling_params={"n": 2}).json()] == ["a0", "a1"]


def test_sampling_params(server: Harness, http: httpx.Client) -> None:
    assert post(http, text="x").status_code == 200
    params = server.tokenizer.wait_for(Generate)[-1].params
    assert (params.max_tokens, params.temperature, params.logprobs) == (128, 1.0, None)
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "sampling_seed": 11,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"3": 2},
        "skip_special_tokens": False,
    }
    assert post(http, text="x", sampling_params=given).status_code == 200
    params = server.tokenizer.wait_for(Generate)[-1].params
    assert (params.max_tokens, params.min_tokens, params.seed) == (9, 3, 11)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (["a", "b"], [4], {3: 2.0})
    for name in ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens"):
        assert getattr(params, name) == given[name]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(params, name) == given[name]


def test_sampling_params_of_each_prompt(server: Harness, http: httpx.Client) -> None:
    each = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    assert post(http, text=["a", "b"], sampling_params=each).status_code == 200
    assert [g.params.max_tokens for g in server.tokenizer.wait_for(Generate)] == [1, 2]
    assert refused(http, text=["a"], sampling_params=each)["param"] == "sampling_params"
    uneven = [{"n": 1}, {"n": 2}]
    assert refused(http, text=["a", "b"], sampling_params=uneven)["param"] == "sampling_params"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [5]}, "text"),
        ({"text": []}, "text"),
        ({"text": [5]}, "text[0]"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids[0]"),
        ({"input_ids": [1000]}, "input_ids"),
        ({"input_ids": [5, [6]]}, "input_ids"),
        ({"input_ids": "x"}, "input_ids"),
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "x", "sampling_params": {"stop_regex": "a*"}}, "stop_regex"),
        ({"text": "x", "sampling_params": {"no_stop_trim": True}}, "no_stop_trim"),
        ({"text": "x", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}, "min_new_tokens"),
        ({"text": "x", "sampling_params": {"top_k": -2}}, "top_k"),
        ({"text": "x", "sampling_params": {"top_k": 1.5}}, "sampling_params.top_k"),
        ({"text": "x", "sampling_params": {"wat": 1}}, "sampling_params.wat"),
        ({"text": "x", "sampling_params": {"regex": "a+", "json_schema": "{}"}}, "regex"),
        ({"text": "x", "sampling_params": {"json_schema": "{}", "max_new_tokens": 0}}, "json_schema"),
        ({"text": "x", "sampling_params": {"ebnf": "root ::= x", "json_whitespace": 1}}, "json_whitespace"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": 2**31}, "logprob_start_len"),
        ({"text": "x", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "x", "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "x", "return_logprob": True, "token_ids_logprob": [1000]}, "token_ids_logprob"),
        ({"text": "x", "return_logprob": True, "token_ids_logprob": [5, [6]]}, "token_ids_logprob"),
        ({"text": "x", "return_logprob": True, "token_ids_logprob": [[5], [6]]}, "token_ids_logprob"),
        ({"text": "x", "return_logprob": [True, True]}, "return_logprob"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": [1, 2]}, "top_logprobs_num"),
        ({"text": "x", "timeout": 0}, "timeout"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "x", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "x", "return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"text": "x", "rid": ""}, "rid"),
        ({"text": "x", "rid": ["a", "b"]}, "rid"),
        ({"text": "x", "bootstrap_room": 1}, "bootstrap_room"),
        ({"text": "x", "session_params": {}}, "session_params"),
        ({"text": "x", "lora_path": "y"}, "lora_path"),
        ({"text": "x", "image_data": "y"}, "image_data"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "x", "custom_logit_processor": "y"}, "custom_logit_processor"),
        ({"text": "x", "priority": 1}, "priority"),
        ({"text": "x", "log_metrics": False}, "log_metrics"),
        ({"text": "x", "skip_radix_cache_insert": True}, "skip_radix_cache_insert"),
    ],
)
def test_bad_values(server: Harness, http: httpx.Client, fields: Any, param: str) -> None:
    assert refused(http, **fields)["param"] == param
    assert server.tokenizer.received == []


def test_logprobs(server: Harness, http: httpx.Client) -> None:
    meta = post(http, text="x", return_logprob=True, logprob_start_len=-1).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, 50, None], [-0.5, 51, None]]
    assert "output_top_logprobs" not in meta
    meta = post(http, text="x", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True).json()[
        "meta_info"
    ]
    assert meta["output_token_logprobs"] == [[-0.25, 50, "Pa"], [-0.5, 51, "ris"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 100, "t0"], [-1.5, 101, "t1"]]] * 2


def test_a_stream_is_cumulative(server: Harness, http: httpx.Client) -> None:
    values = events(post(http, text="x", stream=True, return_logprob=True).text)
    texts = [v["text"] for v in values]
    assert texts[-1] == "Paris"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    reasons = [v["meta_info"]["finish_reason"] for v in values]
    assert reasons == [None] * (len(values) - 1) + [{"type": "stop", "matched": 2}]
    assert values[-1]["output_ids"] == [50, 51]
    assert sum(len(value["meta_info"]["output_token_logprobs"]) for value in values) == 2
    assert all("index" not in v for v in values)


def test_a_stream_of_several_says_which(server: Harness, http: httpx.Client) -> None:
    values = events(post(http, text=["a", "b"], sampling_params={"n": 2}, stream=True).text)
    last = {v["index"]: v for v in values}
    assert sorted(last) == [0, 1, 2, 3]
    assert all(v["text"] == "Paris" and v["meta_info"]["finish_reason"] for v in last.values())
    finished = [v["index"] for v in values if v["meta_info"]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


def test_rids_of_each_prompt(server: Harness, http: httpx.Client) -> None:
    got = post(http, text=["a", "b"], rid=["one", "two"]).json()
    assert [g["meta_info"]["id"] for g in got] == ["one", "two"]
    assert post(http, text=["a", "b"], rid=["same", "same"]).status_code == 409
    got = post(http, text=["a", "b"], rid="both").json()
    assert [g["meta_info"]["id"] for g in got] == ["both", "both"]
    assert len({g.rid for g in server.tokenizer.wait_for(Generate)}) == 4


def test_null_means_absent(server: Harness, http: httpx.Client) -> None:
    from sapwood.srt.server.native_protocol import GenerateRequest, NativeSampling

    nulls = dict.fromkeys(NativeSampling.__struct_fields__)
    fields = dict.fromkeys(name for name in GenerateRequest.__struct_fields__ if name != "text")
    assert post(http, text="x", **{**fields, "sampling_params": nulls}).status_code == 200
    assert post(http, text="x", **fields).status_code == 200
    first, second = server.tokenizer.wait_for(Generate)
    assert first.params == second.params
