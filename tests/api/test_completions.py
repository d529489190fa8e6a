"""`/v1/completions`: prompts and choices in order, echo, logprobs, defaults."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from sapwood.srt.messages import (
    Chunk,
    Ended,
    Finish,
    Generate,
    IdsPrompt,
    Message,
    TextLogprob,
    TextPrompt,
    pack,
    unpack,
)
from sapwood.srt.server.logprobs import CompletionWriter, chat
from tests.api.scripted import Harness, answer, client, started
from tests.api.test_chat import events


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json=fields)


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def by_prompt(g: Generate) -> list[Message]:
    """Each choice says its prompt's text and its own number, in one token."""
    assert isinstance(g.prompt, TextPrompt)
    said: list[Message] = [started(g, matched=3)]
    for choice in reversed(range(g.params.n)):
        said.append(
            Chunk(g.rid, choice, f"{g.prompt.text}{choice}", pack([7]), None, Finish("length", None, 1))
        )
    return [*said, Ended(g.rid)]


def test_through_the_openai_client(server: Harness, ai: openai.OpenAI) -> None:
    completion = ai.completions.create(model="tiny", prompt="Paris is", max_tokens=9)
    assert completion.object == "text_completion"
    assert completion.choices[0].text == "Paris"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (40, 2)
    chunks = list(ai.completions.create(model="tiny", prompt="Paris is", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Paris"
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, "stop"]


def test_choices_are_prompt_major(server: Harness, http: httpx.Client) -> None:
    """P15"""
    server.tokenizer.script = by_prompt
    body = {"prompt": ["a", "b", "c"], "n": 3, "cache_report": True}
    whole = post(http, **body).json()
    texts = ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]
    assert [c["text"] for c in whole["choices"]] == texts
    assert [c["index"] for c in whole["choices"]] == list(range(9))
    assert {c["finish_reason"] for c in whole["choices"]} == {"length"}
    assert whole["usage"] == {
        "prompt_tokens": 120,
        "completion_tokens": 9,
        "total_tokens": 129,
        "prompt_tokens_details": {"cached_tokens": 9},
        "cache": [{"matched": 3, "stopped": "cold"}] * 3,
    }
    values = events(post(http, **body, stream=True, stream_options={"include_usage": True}).text)
    streamed = {c["index"]: c["text"] for v in values for c in v["choices"]}
    assert [streamed[i] for i in range(9)] == texts
    assert values[-1]["usage"] == whole["usage"]
    assert all(v["usage"] is None for v in values[:-1])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_in_streams(server: Harness, http: httpx.Client, options: Any, n: int) -> None:
    """P22"""
    values = events(post(http, prompt="x", stream=True, stream_options=options, n=n).text)
    if options == {"include_usage": True}:
        assert values[-1]["choices"] == []
        assert values[-1]["usage"] == post(http, prompt="x", n=n).json()["usage"]
        assert all(v["usage"] is None and v["choices"] for v in values[:-1])
    else:
        assert all("usage" not in v and v["choices"] for v in values)
    assert refused(http, prompt="x", stream_options={})["param"] == "stream_options"


def test_n_below_one(http: httpx.Client) -> None:
    """P15"""
    for n in (0, -1):
        assert refused(http, prompt="x", n=n)["param"] == "n"


def test_one_finish_for_each_choice(server: Harness, http: httpx.Client) -> None:
    """P09"""
    for n in (1, 2):
        values = events(post(http, prompt="x", n=n, stream=True).text)
        finishes = [c["index"] for v in values for c in v["choices"] if c["finish_reason"]]
        assert sorted(finishes) == list(range(n))


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]]), ([0], [[0]]), ([[999]], [[999]])],
)
def test_token_id_prompts(server: Harness, http: httpx.Client, prompt: Any, ids: Any) -> None:
    whole = post(http, prompt=prompt).json()
    sent = [g.prompt for g in server.tokenizer.wait_for(Generate)]
    assert [unpack(p.ids).tolist() for p in sent if isinstance(p, IdsPrompt)] == ids
    assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1000], "prompt"),
        ([5, -1], "prompt"),
        ([10**30], "prompt"),
        ([[5], [1000]], "prompt[1]"),
        (["a", 5], "prompt"),
        ([5, [5]], "prompt"),
        ([["a"]], "prompt[0][0]"),
        (None, "prompt"),
        (5, "prompt"),
        ([1.5], "prompt[0]"),
    ],
)
def test_bad_prompts(server: Harness, http: httpx.Client, prompt: Any, param: str) -> None:
    assert refused(http, prompt=prompt)["param"] == param
    assert server.tokenizer.received == []


def test_a_prompt_is_required(http: httpx.Client) -> None:
    assert refused(http)["param"] == "prompt"


def test_token_limits(server: Harness, http: httpx.Client) -> None:
    """Without a limit OpenAI's 16; 0 computes the prompt and nothing else."""
    for value, limit in ((None, 16), (0, 0), (1, 1), (5000, 5000)):
        assert post(http, prompt="x", max_tokens=value).status_code == 200
        assert server.tokenizer.wait_for(Generate)[-1].params.max_tokens == limit
    for bad in (-1, "5", 10**30):
        assert refused(http, prompt="x", max_tokens=bad)["param"] == "max_tokens"


def test_what_is_not_supported(http: httpx.Client) -> None:
    assert refused(http, prompt="x", suffix="y")["param"] == "suffix"
    assert refused(http, prompt="x", allowed_token_ids=[5])["code"] == "unsupported"
    assert refused(http, prompt="x", truncate_prompt_tokens=5)["code"] == "unsupported"
    assert refused(http, prompt="x", logprobs=21)["param"] == "logprobs"
    assert refused(http, prompt="x", logprobs=True)["param"] == "logprobs"
    assert refused(http, prompt="x", messages=[])["code"] == "unknown_field"
    assert refused(http, prompt="x", max_token=5)["message"].endswith(
        "`max_token`; did you mean max_tokens or min_tokens?"
    )
    assert refused(http, prompt=[5], add_special_tokens=True)["param"] == "add_special_tokens"


def test_special_tokens_of_text_prompts(server: Harness, http: httpx.Client) -> None:
    for value, added in ((None, True), (True, True), (False, False)):
        assert post(http, prompt=["x"], add_special_tokens=value).status_code == 200
        assert server.tokenizer.wait_for(Generate)[-1].prompt == TextPrompt("x", added)
    assert post(http, prompt=[5], add_special_tokens=False).status_code == 200


def test_null_means_absent_for_every_optional_field(server: Harness, http: httpx.Client) -> None:
    """P25"""
    from sapwood.srt.server.protocol import CompletionRequest

    names = [name for name in CompletionRequest.__struct_fields__ if name != "prompt"]
    assert post(http, prompt="x", **dict.fromkeys(names)).status_code == 200
    assert post(http, prompt="x").status_code == 200
    first, second = server.tokenizer.wait_for(Generate)
    assert first.params == second.params


def test_echo(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = by_prompt
    body = {"prompt": ["ab", "cd"], "n": 2, "echo": True}
    texts = ["abab0", "abab1", "cdcd0", "cdcd1"]
    assert [c["text"] for c in post(http, **body).json()["choices"]] == texts
    streamed = dict.fromkeys(range(4), "")
    for value in events(post(http, **body, stream=True).text):
        for choice in value["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


def test_logprobs(server: Harness, http: httpx.Client) -> None:
    shape = post(http, prompt="x", logprobs=2).json()["choices"][0]["logprobs"]
    assert shape == {
        "tokens": ["Pa", "ris"],
        "token_logprobs": [-0.25, -0.5],
        "top_logprobs": [{"t0": -0.5, "t1": -1.5, "Pa": -0.25}, {"t0": -0.5, "t1": -1.5, "ris": -0.5}],
        "text_offset": [0, 2],
    }


def test_streamed_logprobs_join_to_the_whole_ones(server: Harness, http: httpx.Client) -> None:
    joined: dict[str, list[Any]] = {}
    for value in events(post(http, prompt="x", logprobs=2, stream=True).text):
        for name, items in value["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(items)
    assert joined == post(http, prompt="x", logprobs=2).json()["choices"][0]["logprobs"]


def test_impossible_tokens_have_a_finite_floor(server: Harness, http: httpx.Client) -> None:
    """P20"""

    def script(g: Generate) -> list[Message]:
        item = TextLogprob(5, float("-inf"), "x", b"x", [(6, float("-inf"), "y", b"y")])
        finish = Finish("length", None, 1)
        return [started(g), Chunk(g.rid, 0, "x", pack([5]), [item], finish), Ended(g.rid)]

    server.tokenizer.script = script
    shape = post(http, prompt="x", logprobs=1).json()["choices"][0]["logprobs"]
    assert shape["token_logprobs"] == [-9999.0]
    assert shape["top_logprobs"] == [{"y": -9999.0, "x": -9999.0}]


def test_tokens_that_are_not_whole_characters() -> None:
    """Offsets count characters that are complete; a part of one is written as bytes."""
    raws = [b"a", b"\xe2\x82", b"\xac", b"b", b""]
    items = [TextLogprob(i, -1.0, raw.decode(errors="replace"), raw) for i, raw in enumerate(raws)]
    writer = CompletionWriter(0)
    first, second = writer.write(items[:2]), writer.write(items[2:])
    assert first.tokens + second.tokens == ["a", "bytes:\\xe2\\x82", "bytes:\\xac", "b", ""]
    assert first.text_offset + second.text_offset == [0, 1, 1, 2, 3]
    assert [entry.bytes for entry in chat(items, 0).content] == [list(raw) for raw in raws]


def test_too_many_prompts(new_server: Any) -> None:
    from sapwood.srt.config import make

    harness = new_server(make(max_queued_requests=4))
    with client(harness) as http:
        assert post(http, prompt=["x"] * 4).status_code == 200
        message = refused(http, prompt=["x"] * 5)["message"]
    assert "4" in message
    assert "5" in message


def test_more_requests_than_may_run_and_wait(new_server: Any) -> None:
    from sapwood.srt.config import make

    harness = new_server(make(max_queued_requests=2, max_running_requests=1))
    harness.tokenizer.script = lambda g: [started(g)]
    with client(harness) as http, ThreadPoolExecutor(3) as pool:
        held = [pool.submit(post, http, prompt="x", rid=f"r{i}") for i in range(3)]
        harness.until(lambda: harness.service.client.live == 3)
        full = post(http, prompt="x")
        assert full.status_code == 429
        assert "--max-queued-requests" in full.json()["error"]["message"]
        for g in harness.tokenizer.wait_for(Generate, 3):
            harness.tokenizer.say(*answer(g)[1:])
        assert {one.result().status_code for one in held} == {200}


def test_too_many_choices(server: Harness, http: httpx.Client) -> None:
    assert refused(http, prompt=["x"] * 200, n=128)["param"] == "n"
    assert server.tokenizer.received == []


def test_a_server_without_a_tokenizer_takes_ids_only(new_server: Any) -> None:
    from sapwood.srt.config import make

    harness = new_server(make(skip_tokenizer_init=True))
    with client(harness) as http:
        error = refused(http, prompt="x")
        assert "token ids only" in error["message"]
        assert error["param"] == "prompt"
        assert post(http, prompt=[5]).status_code == 200


def test_an_error_of_one_prompt_is_the_error_of_the_request(server: Harness, http: httpx.Client) -> None:
    from sapwood.srt.messages import Abort
    from tests.api.scripted import refuse

    def script(g: Generate) -> list[Message]:
        assert isinstance(g.prompt, TextPrompt)
        return refuse(g) if g.prompt.text == "bad" else [started(g)]

    server.tokenizer.script = script
    assert refused(http, prompt=["good", "bad"])["code"] == "context_length_exceeded"
    server.tokenizer.wait_for(Abort)
    assert server.call(lambda: server.client.live) == 0
    server.tokenizer.script = answer
