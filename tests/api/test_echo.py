"""What completions and chats say of their prompts: echo, logprobs, ids; and which choices are best."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from sapwood.srt.config import make
from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import Ask, Chunk, Ended, Finish, Generate, IdsPrompt, Message, TextLogprob, pack
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import completions, service
from sapwood.srt.server.echo import text_offsets
from sapwood.srt.server.logprobs import prompt as prompt_shape
from tests.api.clock import stopped
from tests.api.scripted import Harness, client, detokenize, pieces, reading, started
from tests.api.test_chat import ASK, events
from tests.api.test_completions import post, refused
from tests.api.test_streams import in_thread

SIX = "The quick brown fox jumps over"
WORDS = ["The", " quick", " brown", " fox", " jumps", " over"]


@pytest.fixture
def reads(server: Harness) -> Harness:
    server.tokenizer.script = reading
    server.tokenizer.answers = {"detokenize": detokenize}
    return server


def params_of(server: Harness) -> Any:
    return server.tokenizer.wait_for(Generate)[-1].params


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
def test_echo_with_logprobs(reads: Harness, http: httpx.Client, as_ids: bool, max_tokens: int) -> None:
    """P21: tokens cover the prompt and the output, the first logprob is null, offsets are right."""
    prompt: Any = [5, 6, 7, 8] if as_ids else SIX
    choice = post(http, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens).json()["choices"][0]
    params = params_of(reads)
    assert (params.max_tokens, params.logprobs, params.logprob_start) == (max_tokens, 1, 0)
    words = [" <5>", " <6>", " <7>", " <8>"] if as_ids else WORDS
    shape = choice["logprobs"]
    assert choice["text"] == "".join(words) + " o0" * max_tokens
    assert choice["finish_reason"] == "length"
    assert shape["tokens"] == words + [" o0"] * max_tokens
    assert (
        shape["token_logprobs"] == [None, *(-float(i) for i in range(1, len(words)))] + [-0.25] * max_tokens
    )
    assert shape["top_logprobs"][0] is None
    assert shape["top_logprobs"][1] == {"p0": -0.5, words[1]: -1.0}
    for token, offset in zip(shape["tokens"], shape["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert {len(values) for values in shape.values()} == {len(words) + max_tokens}


def test_the_slices_of_an_evaluation_harness(reads: Harness, http: httpx.Client) -> None:
    """P21, as lm-eval's local-completions reads it: context + continuation as ids, one token generated."""
    batch = [[5, 6, 7, 8, 9], [5, 6, 7]]
    answer = post(http, prompt=batch, echo=True, logprobs=1, max_tokens=1, temperature=0).json()
    for choice, context, total in zip(answer["choices"], (3, 1), (-7.0, -3.0), strict=True):
        scores = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        assert sum(scores) == total
        assert [max(top.values()) for top in tops] == [-0.5] * len(scores)


def test_echoed_ids_without_logprobs(reads: Harness, http: httpx.Client) -> None:
    choices = post(http, prompt=[[5, 6], [7]], echo=True, max_tokens=1, n=2).json()["choices"]
    assert [c["text"] for c in choices] == [" <5> <6> o0", " <5> <6> o0", " <7> o0", " <7> o0"]
    assert params_of(reads).logprob_start is None
    asked = [m for m in reads.tokenizer.received if isinstance(m, Ask)]
    assert [(m.prompt, m.options) for m in asked] == [(IdsPrompt(pack([5, 6, 7])), {"lengths": [2, 1]})]


def test_many_prompts_are_one_question(reads: Harness, http: httpx.Client) -> None:
    """There is room for 256 questions of all requests."""
    response = post(http, prompt=[[i] for i in range(600)], echo=True, max_tokens=0)
    assert [c["text"] for c in response.json()["choices"]] == [f" <{i}>" for i in range(600)]
    assert len([m for m in reads.tokenizer.received if isinstance(m, Ask)]) == 1


def test_long_ones_are_several(reads: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "QUESTION_TOKENS", 3)
    prompts: Any = [[1, 2], [3], [4, 5, 6, 7], [8]]
    choices = post(http, prompt=prompts, echo=True, max_tokens=0).json()["choices"]
    assert [c["text"] for c in choices] == ["".join(f" <{i}>" for i in ids) for ids in prompts]
    asked = [m.options["lengths"] for m in reads.tokenizer.received if isinstance(m, Ask)]
    assert asked == [[2, 1], [4], [1]]


@pytest.mark.parametrize(("own", "status"), [(True, 408), (False, 504)])
def test_an_echo_is_made_in_the_requests_time(
    new_server: Callable[..., Harness], own: bool, status: int
) -> None:
    harness = new_server(make(request_timeout=None if own else 0.2))
    harness.tokenizer.answers = {"detokenize": None}
    body: dict[str, Any] = {"prompt": [5], "echo": True, **({"timeout": 0.2} if own else {})}
    with client(harness) as http, stopped(harness.loop) as clock:
        asked = in_thread(lambda: http.post("/v1/completions", json=body))
        harness.tokenizer.wait_for(Ask)
        clock.passes(0.2)
        response = asked()
    assert (response.status_code, response.json()["error"]["code"]) == (status, "deadline_exceeded")
    assert not [m for m in harness.tokenizer.received if isinstance(m, Generate)]


def test_what_the_echo_took_is_not_there_for_the_rest(
    reads: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads.tokenizer.script = lambda g: []
    with stopped(reads.loop) as clock:

        def slowly(ask: Ask) -> dict[str, Any]:
            clock.passes(0.5)
            return detokenize(ask)

        reads.tokenizer.answers = {"detokenize": slowly}
        monkeypatch.setattr(completions, "time", SimpleNamespace(time=time.time, monotonic=clock))
        asked = in_thread(lambda: post(http, prompt=[5], echo=True, timeout=1.0))
        reads.until(lambda: reads.client.live == 1)
        clock.passes(0.49)
        assert reads.call(lambda: reads.client.live) == 1
        clock.passes(0.02)
        response = asked()
    assert response.status_code == 408
    assert "1 s" in response.json()["error"]["message"]


def test_nothing_is_asked_for_what_has_no_room(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(max_queued_requests=2, max_running_requests=1))
    harness.tokenizer.script = lambda g: []
    harness.tokenizer.answers = {"detokenize": detokenize}
    with client(harness) as http:
        harness.call(lambda: harness.client.submit_all([(IdsPrompt(pack([5])), SamplingParams())] * 2))
        response = post(http, prompt=[[5], [6]], echo=True)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert not [m for m in harness.tokenizer.received if isinstance(m, Ask)]


def test_ids_that_cannot_be_echoed(reads: Harness, http: httpx.Client) -> None:
    reads.tokenizer.answers = {"detokenize": BadRequest("no tokenizer", param="prompt").info()}
    assert refused(http, prompt=[5], echo=True)["message"] == "no tokenizer"
    assert not [m for m in reads.tokenizer.received if isinstance(m, Generate)]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"echo": True, "logprobs": 2}, {"return_token_ids": True}]
)
def test_a_stream_joins_to_the_whole(
    reads: Harness, http: httpx.Client, fields: dict[str, Any], max_tokens: int
) -> None:
    body = {"prompt": [SIX, "a b"], "n": 2, "max_tokens": max_tokens, **fields}
    whole = post(http, **body).json()["choices"]
    joined: list[dict[str, Any]] = [{"text": "", "logprobs": {}, "token_ids": []} for _ in whole]
    for value in events(post(http, **body, stream=True).text):
        for choice in value["choices"]:
            mine = joined[choice["index"]]
            mine["text"] += choice["text"]
            mine["token_ids"] += choice.get("token_ids", [])
            if "prompt_token_ids" in choice:
                assert "prompt_token_ids" not in mine
                mine["prompt_token_ids"] = choice["prompt_token_ids"]
            for name, values in (choice["logprobs"] or {}).items():
                mine["logprobs"].setdefault(name, []).extend(values)
    for got, wanted in zip(joined, whole, strict=True):
        assert got["text"] == wanted["text"]
        assert got["logprobs"] == (wanted["logprobs"] or {})
        assert got["token_ids"] == wanted.get("token_ids", [])
        assert got.get("prompt_token_ids") == wanted.get("prompt_token_ids")


def test_prompt_logprobs_of_completions(reads: Harness, http: httpx.Client) -> None:
    choices = post(http, prompt=["a b c", "d"], prompt_logprobs=1, max_tokens=1).json()["choices"]
    assert (params_of(reads).logprobs, params_of(reads).logprob_start) == (1, 0)
    assert choices[0]["prompt_logprobs"] == [
        None,
        {
            "100": {"logprob": -0.5, "rank": 1, "decoded_token": "p0"},
            "201": {"logprob": -1.0, "decoded_token": " b"},
        },
        {
            "100": {"logprob": -0.5, "rank": 1, "decoded_token": "p0"},
            "202": {"logprob": -2.0, "decoded_token": " c"},
        },
    ]
    assert choices[1]["prompt_logprobs"] == [None]
    assert choices[0]["logprobs"] is None


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(0, 3), (3, 0), (2, 2)])
def test_each_kind_has_its_own_number_of_alternatives(
    reads: Harness, http: httpx.Client, logprobs: int, prompt_logprobs: int
) -> None:
    body = {"max_tokens": 1, "prompt_logprobs": prompt_logprobs}
    choice = post(http, prompt="a b", **body, logprobs=logprobs).json()["choices"][0]
    assert params_of(reads).logprobs == max(logprobs, prompt_logprobs)
    assert len(choice["logprobs"]["top_logprobs"][0]) == logprobs + 1
    assert len(choice["prompt_logprobs"][1]) == prompt_logprobs + 1
    server_side = {"messages": ASK["messages"], "logprobs": True, "top_logprobs": logprobs, **body}
    reads.tokenizer.script = lambda g: reading(Generate(g.rid, IdsPrompt(pack([5, 6])), g.params))
    chat = http.post("/v1/chat/completions", json=server_side).json()
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == logprobs
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"][1]) == prompt_logprobs + 1


def test_ranks_are_told_only_where_they_are_known() -> None:
    top = [(7, -1.0, "a", b"a"), (8, -1.0, "b", b"b"), (9, -2.0, "c", b"c")]
    asked = TextLogprob(9, -2.0, "c", b"c", top)
    entry = prompt_shape([asked], 2)[1]
    assert entry is not None
    assert {token: item.rank for token, item in entry.items()} == {7: 1, 8: 1, 9: 3}
    unknown = prompt_shape([TextLogprob(5, float("-inf"), "x", b"x", top)], 0)[1]
    assert unknown is not None
    assert list(unknown) == [5]
    assert unknown[5].logprob == -9999.0
    assert not isinstance(unknown[5].rank, int)


def test_token_ids(reads: Harness, http: httpx.Client) -> None:
    choice = post(http, prompt="a b", max_tokens=2, return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([200, 201], [50, 51])
    reads.tokenizer.script = lambda g: reading(Generate(g.rid, IdsPrompt(pack([5, 6])), g.params))
    body = {**ASK, "max_tokens": 2, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([5, 6], [50, 51])
    values = events(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    assert values[0]["prompt_token_ids"] == [5, 6]
    assert [token for v in values for token in v["choices"][0].get("token_ids", [])] == [50, 51]


def test_tokens_written_as_ids(reads: Harness, http: httpx.Client) -> None:
    body = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    shape = post(http, prompt=[5, 6], echo=True, logprobs=1, **body).json()["choices"][0]["logprobs"]
    assert shape["tokens"] == ["token_id:5", "token_id:6", "token_id:50"]
    assert shape["top_logprobs"][1] == {"token_id:100": -0.5, "token_id:6": -1.0}
    reads.tokenizer.script = lambda g: reading(Generate(g.rid, IdsPrompt(pack([5, 6])), g.params))
    chat = {**ASK, **body, "logprobs": True, "top_logprobs": 1}
    token = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"][0]
    assert (token["token"], token["bytes"]) == ("token_id:50", list(b" o0"))
    assert token["top_logprobs"][0]["token"] == "token_id:100"


def ranked(g: Generate) -> list[Message]:
    """Four choices with mean logprobs -2, -1, -3, -1 over different lengths."""
    said: list[Message] = [started(g)]
    for choice, values in enumerate([[-2.0], [-0.5, -1.5], [-3.0], [-1.0, -1.0, -1.0]]):
        items = [TextLogprob(50, value, "x", b"x") for value in values]
        finish = Finish("length", None, len(values))
        said.append(Chunk(g.rid, choice, str(choice), pack([50] * len(values)), items, finish))
    return [*said, Ended(g.rid)]


def test_best_of(server: Harness, http: httpx.Client) -> None:
    """The highest logprob per token first, of equals the earlier; all that were made are counted."""
    server.tokenizer.script = ranked
    answer = post(http, prompt="x", n=2, best_of=4).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "1"), (1, "3")]
    assert {c["logprobs"] for c in answer["choices"]} == {None}
    assert answer["usage"]["completion_tokens"] == 7
    assert (params_of(server).n, params_of(server).logprobs) == (4, 0)
    answer = post(http, prompt=["x", "y"], n=3, best_of=4, logprobs=1).json()
    assert [c["text"] for c in answer["choices"]] == ["1", "3", "0"] * 2
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -1.5]
    assert [c["text"] for c in post(http, prompt="x", n=4, best_of=4).json()["choices"]] == list("0123")


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 3},
        {"best_of": 0},
        {"best_of": 129},
        {"best_of": 10**30},
        {"best_of": 2, "stream": True},
        {"best_of": "2"},
    ],
)
def test_bad_best_of(server: Harness, http: httpx.Client, fields: Any) -> None:
    assert refused(http, prompt="x", **fields)["param"] == "best_of"
    assert server.tokenizer.received == []


def test_n_is_checked_with_best_of_too(http: httpx.Client) -> None:
    """P15"""
    assert refused(http, prompt="x", n=0, best_of=2)["param"] == "n"
    assert refused(http, prompt="x", n=0)["param"] == "n"


def test_best_of_may_stream_if_all_choices_are_wanted(reads: Harness, http: httpx.Client) -> None:
    assert len(events(post(http, prompt="x", n=2, best_of=2, stream=True, max_tokens=0).text)) == 2


def test_an_abort_before_the_prompt_was_read(server: Harness, http: httpx.Client) -> None:
    def script(g: Generate) -> list[Message]:
        return [Chunk(g.rid, 0, "", b"", None, Finish("abort", None, 0)), Ended(g.rid)]

    server.tokenizer.script = script
    body = {"prompt": "a b", "echo": True, "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True}
    choice = post(http, **body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a b", "abort")
    assert choice["prompt_token_ids"] == []


def test_through_the_openai_client(reads: Harness, ai: openai.OpenAI) -> None:
    choice = ai.completions.create(
        model="tiny", prompt=SIX, echo=True, logprobs=5, max_tokens=0, best_of=1
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == WORDS


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("ab cd", [b"ab", b" cd"], [0, 2]),
        ("ab cd", [b"<s>", b"ab", b" cd"], [0, 0, 2]),  # a BOS that is not in the text
        ("ab cd", [b" ab", b" cd"], [0, 2]),  # a leading space of the tokenizer's own
        ("ab ab", [b"<s>", b" ab", b" ab"], [0, 0, 2]),
        ("é🙂x", ["é".encode(), b"\xf0\x9f", b"\x99\x82", b"x"], [0, 1, 1, 2]),
        ("ne\u0301e b", [b"n", "é".encode(), b"e", b" b"], [0, 1, 1, 4]),  # normalised: found again later
        ("", [b"<s>"], [0]),
        ("a", [b"a", b"</s>"], [0, 1]),
        ("a", [b"", b"a"], [0, 0]),
    ],
)
def test_offsets(text: str, tokens: list[bytes], offsets: list[int]) -> None:
    assert text_offsets(text, tokens) == offsets


def test_the_script_splits_as_the_tests_say() -> None:
    from sapwood.srt.messages import TextPrompt

    assert pieces(TextPrompt(SIX)) == WORDS
