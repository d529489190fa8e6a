"""Logprobs of `/generate` in SGLang's shape: of the prompt from a place on, of chosen tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import (
    Chunk,
    Ended,
    Finish,
    Generate,
    IdsPrompt,
    Message,
    Read,
    TextLogprob,
    TextPrompt,
    pack,
)
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import sampling
from sapwood.srt.server.outcome import Outcome
from tests.api.scripted import Harness, reading, started
from tests.api.test_chat import events
from tests.api.test_native import post, refused
from tests.serving import lines_of

TEXT = "a b c d"


@pytest.fixture
def reads(server: Harness) -> Harness:
    server.tokenizer.script = reading
    return server


def meta(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, text=TEXT, sampling_params={"max_new_tokens": 1}, return_logprob=True, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json()["meta_info"])


def test_the_prompt_from_its_beginning(reads: Harness, http: httpx.Client) -> None:
    info = meta(http, logprob_start_len=0, return_text_in_logprobs=True)
    assert info["input_token_logprobs"] == [
        [None, 200, "a"],
        [-1.0, 201, " b"],
        [-2.0, 202, " c"],
        [-3.0, 203, " d"],
    ]
    assert info["output_token_logprobs"] == [[-0.25, 50, " o0"]]
    assert info["cache"]["stopped"] == "logprobs"
    absent = {"input_top_logprobs", "output_top_logprobs", "input_token_ids_logprobs"}
    assert not absent & set(info)


@pytest.mark.parametrize(("start", "values"), [(1, [-1.0, -2.0, -3.0]), (3, [-3.0]), (4, []), (100, [])])
def test_the_prompt_from_a_later_place(reads: Harness, http: httpx.Client, start: int, values: Any) -> None:
    """Every token from there on has its value, the first of them too; beyond the prompt there are none."""
    info = meta(http, logprob_start_len=start, top_logprobs_num=2, token_ids_logprob=[7])
    assert [value for value, _token, _text in info["input_token_logprobs"]] == values
    assert [token for _value, token, _text in info["input_token_logprobs"]] == list(range(200 + start, 204))
    assert len(info["input_top_logprobs"]) == len(info["input_token_ids_logprobs"]) == len(values)


@pytest.mark.parametrize("start", [None, -1])
def test_of_the_output_alone(reads: Harness, http: httpx.Client, start: int | None) -> None:
    info = meta(http, logprob_start_len=start)
    assert "input_token_logprobs" not in info
    assert reads.tokenizer.wait_for(Generate)[-1].params.logprob_start is None


def test_tops_and_chosen_tokens_line_up(reads: Harness, http: httpx.Client) -> None:
    info = meta(http, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[7, 3])
    assert reads.tokenizer.wait_for(Generate)[-1].params.logprob_ids == [7, 3]
    tops = [[-0.5, 100, None], [-1.5, 101, None]]
    assert info["input_top_logprobs"] == [None, tops, tops, tops]
    assert info["output_top_logprobs"] == [tops]
    chosen = [[-7.0, 7, None], [-7.0, 3, None]]
    assert info["input_token_ids_logprobs"] == [None, chosen, chosen, chosen]
    assert info["output_token_ids_logprobs"] == [[[-8.0, 7, None], [-8.0, 3, None]]]


def test_each_prompt_may_ask_for_something_else(reads: Harness, http: httpx.Client) -> None:
    each = {
        "return_logprob": [True, None, True],
        "top_logprobs_num": [1, None, 0],
        "logprob_start_len": [0, None, -1],
        "token_ids_logprob": [None, None, [9]],
    }
    answers = post(http, text=["a b", "c", "d"], sampling_params={"max_new_tokens": 1}, **each).json()
    first, second, third = (answer["meta_info"] for answer in answers)
    assert len(first["input_token_logprobs"]) == 2
    assert first["output_top_logprobs"] == [[[-0.5, 100, None]]]
    assert "output_token_ids_logprobs" not in first
    assert "output_token_logprobs" not in second
    assert third["output_token_ids_logprobs"] == [[[-8.0, 9, None]]]
    assert "input_token_logprobs" not in third
    params = [g.params.logprobs for g in reads.tokenizer.wait_for(Generate, 3)]
    assert params == [1, None, 0]


def test_only_a_prompt_that_wants_logprobs_may_ask_more(http: httpx.Client, server: Harness) -> None:
    error = refused(http, text=["a", "b"], return_logprob=[True, False], top_logprobs_num=2)
    assert error["param"] == "top_logprobs_num"
    assert server.tokenizer.received == []


def test_no_output_at_all(reads: Harness, http: httpx.Client) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    answer = post(http, **body, logprob_start_len=2).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["output_token_logprobs"] == []
    assert [v for v, _id, _text in answer["meta_info"]["input_token_logprobs"]] == [-2.0, -3.0]


def test_streams_say_the_same(reads: Harness, http: httpx.Client) -> None:
    body = {
        "text": TEXT,
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    whole = post(http, **body).json()["meta_info"]
    streamed = events(post(http, **body, stream=True).text)
    for name in whole:
        if name.endswith("logprobs"):
            told = [value["meta_info"].get(name, []) for value in streamed]
            output = [item for items in told for item in items]
            assert (output if name.startswith("output") else told[-1]) == whole[name]
    assert streamed[0]["meta_info"]["input_token_logprobs"] == whole["input_token_logprobs"]


def test_the_prompts_logprobs_are_not_sent_with_every_token(server: Harness, http: httpx.Client) -> None:
    """A long prompt's would be megabytes each time, and an output's more with each token."""

    later: list[Message] = []

    def begin(g: Generate) -> list[Message]:
        said = reading(g)
        first = next(i for i, message in enumerate(said) if isinstance(message, Chunk))
        later.extend(said[first + 1 :])
        return said[: first + 1]

    server.tokenizer.script = begin
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    body |= {"logprob_start_len": 0, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        lines = (json.loads(line[6:]) for line in lines_of(response) if line.startswith("data: {"))
        values = [next(lines)]
        for message in later[:-2]:  # each is read before the next one is said
            server.tokenizer.say(message)
            values.append(next(lines))
        server.tokenizer.say(*later[-2:])
        values += lines
    told = ["input_token_logprobs" in value["meta_info"] for value in values]
    assert len(told) > 2
    assert told == [True] + [False] * (len(told) - 2) + [True]
    outputs = [value["meta_info"]["output_token_logprobs"] for value in values]
    assert [item[0] for output in outputs for item in output] == [-0.25, -0.5, -0.75, -1.0]
    assert [len(value["output_ids"]) for value in values][-1] == 4


@pytest.mark.parametrize(
    ("n", "top", "fine"), [(128, 3, True), (128, 4, False), (24, 20, True), (25, 20, False)]
)
def test_an_answer_has_a_size(reads: Harness, http: httpx.Client, n: int, top: int, fine: bool) -> None:
    """Every choice tells the prompt's logprobs again."""
    params = {"max_new_tokens": 0, "n": n}
    asked = {"return_logprob": True, "top_logprobs_num": top}
    response = post(http, text=TEXT, sampling_params=params, logprob_start_len=0, **asked)
    assert response.status_code == (200 if fine else 400)
    assert post(http, text=TEXT, sampling_params=params, **asked).status_code == 200
    body = {"prompt": TEXT, "echo": True, "logprobs": top, "n": n, "max_tokens": 0}
    assert http.post("/v1/completions", json=body).status_code == (200 if fine else 400)


BIG = {"return_logprob": True, "top_logprobs_num": 20, "token_ids_logprob": [*range(256)]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "sampling_params": {"n": 128, "max_new_tokens": 200}, **BIG}),
        ("/generate", {"text": ["x"] * 100, "sampling_params": {"n": 1, "max_new_tokens": 200}, **BIG}),
        ("/v1/completions", {"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 2000}),
        ("/v1/completions", {"prompt": ["x"] * 128, "n": 128, "logprobs": 1, "max_tokens": 200}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 128, "logprobs": True,
                                  "top_logprobs": 20}),
    ],
)  # fmt: skip
def test_an_outputs_logprobs_have_a_bound(
    server: Harness, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """Each takes 250 bytes of the server's memory until the answer goes out."""
    response = http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    words = ("top_logprobs_num", "max_new_tokens") if path == "/generate" else ("logprobs", "max_tokens")
    assert error["param"] == words[0]
    for word in (*words, " n ", "4000000"):
        assert word in error["message"]
    assert server.tokenizer.received == []


@pytest.mark.parametrize(
    ("prompts", "params", "fine"),
    [
        (1, SamplingParams(logprobs=20, max_tokens=8192), True),
        (1, SamplingParams(logprobs=20), True),
        (1, SamplingParams(n=8, logprobs=5, max_tokens=2048), True),
        (1000, SamplingParams(logprobs=1, max_tokens=256), True),
        (1000, SamplingParams(n=128), True),
        (1, SamplingParams(n=100, logprobs=0, max_tokens=40_000), True),
        (1, SamplingParams(n=101, logprobs=0, max_tokens=40_000), False),
        (1, SamplingParams(n=31, logprobs=0), False),
        (31, SamplingParams(logprobs=0), False),
    ],
)
def test_what_an_output_may_tell(prompts: int, params: SamplingParams, fine: bool) -> None:
    """Without a limit it is what is left of the context: here 131,072 tokens, and 1 in the prompt."""
    items = [(TextPrompt("x"), params)] * prompts
    if fine:
        sampling.check_told(items, 131_072, native=False)
    else:
        with pytest.raises(BadRequest, match="4000000"):
            sampling.check_told(items, 131_072, native=False)
    long = [(IdsPrompt(pack([5] * 131_000)), params)] * prompts
    sampling.check_told(long, 131_072, native=False)


def test_a_stream_keeps_no_logprobs_that_it_has_sent() -> None:
    outcome = Outcome(1, 1, keep_logprobs=False)
    item = TextLogprob(5, -1.0, "x", b"x", [])
    for _ in range(3):
        outcome.add(0, Chunk("r", 0, "x", pack([5]), [item]))
    assert (outcome.choices[0].text, outcome.choices[0].logprobs) == ("xxx", [])


def test_impossible_tokens_have_a_finite_floor(server: Harness, http: httpx.Client) -> None:
    """P20"""

    def script(g: Generate) -> list[Message]:
        low = float("-inf")
        item = TextLogprob(5, low, "x", b"x", [(6, low, "y", b"y")], [(7, low, "z", b"z")])
        chunk = Chunk(g.rid, 0, "x", pack([5]), [item], Finish("length", None, 1))
        return [started(g), Read(g.rid, 1, [item]), chunk, Ended(g.rid)]

    server.tokenizer.script = script
    info = meta(http, logprob_start_len=1, top_logprobs_num=1, token_ids_logprob=[7])
    assert info["input_token_logprobs"] == [[-9999.0, 5, None]]
    assert info["output_top_logprobs"] == [[[-9999.0, 6, None]]]
    assert info["input_token_ids_logprobs"] == [[[-9999.0, 7, None]]]


def test_what_asks_for_nothing_is_accepted(server: Harness, http: httpx.Client) -> None:
    """P06: what SGLang's clients send with every request, at its default."""
    quiet = {
        "image_data": [],
        "lora_path": None,
        "return_hidden_states": False,
        "log_metrics": True,
        "background": False,
        "modalities": [],
        "priority": None,
        "sampling_params": {"no_stop_trim": False, "spaces_between_special_tokens": True, "stop_regex": []},
    }
    assert post(http, text="x", **quiet).status_code == 200
    assert post(http, text="x").status_code == 200
    first, second = server.tokenizer.wait_for(Generate, 2)
    assert first.params == second.params
