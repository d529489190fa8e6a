"""`score` of `/generate`: what is asked of the tokenizers, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt.config import make
from sapwood.srt.errors import ErrorInfo, OwnDeadlineExceeded
from sapwood.srt.messages import (
    Ask,
    Chunk,
    Ended,
    Finish,
    Generate,
    IdsPart,
    IdsPrompt,
    Message,
    PartsPrompt,
    Read,
    Started,
    TextLogprob,
    TextPart,
    TextPrompt,
    Verdict,
    unpack,
)
from sapwood.srt.server import score
from sapwood.srt.server.native_protocol import GenerateRequest
from tests.api.clock import stopped
from tests.api.scripted import VOCAB, Harness, client

PROMPT = [10, 11, 12]


def value(before: list[int], token: int) -> float:
    """A logprob that depends on all that came before."""
    return -float((sum(before) * 31 + len(before) * 7 + token) % 97) - 0.5


def judge(g: Generate) -> list[Message]:
    """What a tokenizer says of a row that judges its prompt's end."""
    assert isinstance(g.prompt, IdsPrompt)
    ids: list[int] = unpack(g.prompt.ids).tolist()
    start = g.params.logprob_start
    assert start is not None
    values = []
    for i in range(start, len(ids)):
        beside = [(t, value(ids[:i], t), f"<{t}>", b"") for t in g.params.logprob_ids]
        values.append(TextLogprob(ids[i], value(ids[:i], ids[i]), f"<{ids[i]}>", b"", [], beside))
    half = len(values) // 2
    return [
        Started(g.rid, g.prompt.ids, Verdict(2, "diverged"), 0.25),
        Read(g.rid, start, values[:half]),
        Read(g.rid, start + half, values[half:]),
        Chunk(g.rid, 0, "", b"", None, Finish("length", None, 0)),
        Ended(g.rid),
    ]


def tokenize(ask: Ask) -> dict[str, Any]:
    """Each character is a token; a prompt begins with token 1."""
    prompt = ask.prompt
    if isinstance(prompt, TextPrompt):
        return {"tokens": [1, *map(ord, prompt.text)] if prompt.text else []}
    assert isinstance(prompt, PartsPrompt)
    parts = []
    for part in prompt.parts:
        assert isinstance(part, (TextPart, IdsPart))
        parts.append([*map(ord, part.text)] if isinstance(part, TextPart) else unpack(part.ids).tolist())
    return {"tokens": [token for part in parts for token in part], "parts": [*map(len, parts)]}


@pytest.fixture(autouse=True)
def scripted(server: Harness) -> None:
    server.tokenizer.script = judge
    server.tokenizer.answers["tokenize"] = tokenize


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/generate", json=fields)


def scores(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = post(http, **fields)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["scores"]
    return found


def expected(prompt: list[int], choice: list[int]) -> dict[str, Any]:
    values = [value(prompt + choice[:i], token) for i, token in enumerate(choice)]
    return {"ids": choice, "logprobs": values}


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = post(http, **fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def test_the_answer_is_whole(http: httpx.Client) -> None:
    response = post(http, input_ids=PROMPT, score=[[20, 21], [22]], rid="mine")
    assert response.headers["x-request-id"] == "mine"
    got = response.json()
    assert 0 < got["meta_info"].pop("e2e_latency") < 5
    assert got == {
        "text": "",
        "output_ids": [],
        "input_ids": PROMPT,
        "scores": [expected(PROMPT, [20, 21]), expected(PROMPT, [22])],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "cached_tokens": 2,
            "cache": {"matched": 2, "stopped": "diverged"},
        },
    }


def test_equal_choices_prefixes_and_branches(server: Harness, http: httpx.Client) -> None:
    choices = [[5, 6], [5], [5, 6], [5, 7, 8], [9, 9, 9], [5, 7, 8, 1], [4]]
    assert scores(http, input_ids=PROMPT, score=choices) == [expected(PROMPT, c) for c in choices]
    rows = [(unpack(g.prompt.ids).tolist(), g.params.logprob_start) for g in sent(server)]
    assert rows == [([*PROMPT, 5, 7, 8, 1], 3), ([*PROMPT, 9, 9, 9], 4)]


def sent(server: Harness) -> list[Generate]:
    return [message for message in server.tokenizer.received if isinstance(message, Generate)]


def test_each_row_only_judges(server: Harness, http: httpx.Client) -> None:
    scores(http, input_ids=PROMPT, score=[[5, 6], [7, 8], [9]])
    first, second = sent(server)
    assert first.params.logprob_ids == [7, 9]
    assert second.params.logprob_ids == []
    for g in (first, second):
        assert (g.params.max_tokens, g.params.judges_last, g.params.logprobs) == (0, True, 0)
    assert first.scheduling.keep == score.KEEP_SECONDS
    assert second.scheduling.keep == 0


def test_one_row_keeps_nothing(server: Harness, http: httpx.Client) -> None:
    scores(http, input_ids=PROMPT, score=[[5, 6], [7]])
    assert [g.scheduling.keep for g in sent(server)] == [0]


def test_texts_have_tokens_of_their_own(http: httpx.Client) -> None:
    """The prompt's are those of its text alone, and each choice goes on after that."""
    got = post(http, text="ab", score=["c", [7, 8], "cd"]).json()
    prompt = [1, 97, 98]
    assert got["input_ids"] == prompt
    assert got["meta_info"]["prompt_tokens"] == 3
    assert got["scores"] == [expected(prompt, [99]), expected(prompt, [7, 8]), expected(prompt, [99, 100])]


def test_texts_of_tokens_only_if_they_are_asked_for(http: httpx.Client) -> None:
    got = scores(http, input_ids=PROMPT, score=[[5, 6], [7]], return_text_in_logprobs=True)
    assert [each["texts"] for each in got] == [["<5>", "<6>"], ["<7>"]]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"score": []}, "score", "from 1 to 256 choices, got 0"),
        ({"score": [[5]] * 257}, "score", "from 1 to 256 choices, got 257"),
        ({"score": ["a", ""]}, "score[1]", "is empty"),
        ({"score": [[5], []]}, "score[1]", "is empty"),
        ({"score": [[5], [VOCAB]]}, "score[1]", f"from 0 to {VOCAB - 1}, got {VOCAB}"),
        ({"score": [[5] * 40_000, [5] * 40_000]}, "score", "65536 tokens together, got 80000"),
        ({"score": [[5], [5] * 2046]}, "score[1]", "together they may have 2048"),
        ({"score": [[5]], "stream": True}, "stream", "draws nothing"),
        ({"score": [[5]], "sampling_params": {"temperature": 0}}, "sampling_params", "draws nothing"),
        ({"score": [[5]], "return_logprob": True}, "return_logprob", "draws nothing"),
        ({"score": [[5]], "top_logprobs_num": 1}, "top_logprobs_num", "draws nothing"),
        ({"score": [[5]], "logprob_start_len": 0}, "logprob_start_len", "draws nothing"),
        ({"score": [[5]], "token_ids_logprob": [5]}, "token_ids_logprob", "draws nothing"),
        ({"score": [[5]], "input_ids": [[5]]}, "input_ids", "one prompt"),
        ({"score": [[5]], "rid": ["a"]}, "rid", "one name"),
        ({"score": [[5]], "input_ids": None}, "text", "exactly one of"),
        ({"score": [[5]], "timeout": 0}, "timeout", "above 0"),
    ],
)
def test_refusals(server: Harness, http: httpx.Client, fields: dict[str, Any], param: str, told: str) -> None:
    error = refused(http, **{"input_ids": PROMPT, **fields})
    assert error["param"] == param
    assert told in error["message"]
    assert not sent(server)


def test_values_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    for name, neutral in score.OF_OUTPUT.items():
        for value in neutral:
            assert scores(http, input_ids=PROMPT, score=[[5]], **{name: value}) == [expected(PROMPT, [5])]
    assert score.OF_OUTPUT["top_logprobs_num"] == (None, 0)
    assert score.OF_OUTPUT["logprob_start_len"] == (None, -1)


def test_a_score_of_the_wrong_type_is_named(http: httpx.Client) -> None:
    error = refused(http, input_ids=PROMPT, score=[["x"]])
    assert "score" in error["param"]


def test_an_empty_prompt_is_refused(http: httpx.Client) -> None:
    """The first token of all has no logprob."""
    assert refused(http, text="", score=[[5]])["param"] == "text"


def test_a_tokenizer_may_find_no_tokens_in_a_choice(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["tokenize"] = {"tokens": [0, 5], "parts": [1, 1, 0]}
    error = refused(http, input_ids=PROMPT, score=["a", "\0"])
    assert error["param"] == "score[1]"


def test_text_needs_a_tokenizer(new_server: Callable[..., Harness]) -> None:
    server = new_server(make(skip_tokenizer_init=True))
    server.tokenizer.script = judge
    with client(server) as http:
        assert refused(http, input_ids=PROMPT, score=[[5], "a"])["param"] == "score[1]"
        assert scores(http, input_ids=PROMPT, score=[[5]]) == [expected(PROMPT, [5])]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_any_row_is_the_answer(server: Harness, http: httpx.Client, failing: int) -> None:
    """In the midst of the others, too: a full queue, for one. Nothing is left running."""
    count = 0

    def script(g: Generate) -> list[Message]:
        nonlocal count
        count += 1
        if count - 1 == failing:
            return [Ended(g.rid, ErrorInfo(429, "server_error", "queue_full", "4096 are waiting"))]
        return judge(g)

    server.tokenizer.script = script
    response = post(http, input_ids=PROMPT, score=[[5, 6], [7, 8], [9, 8]])
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    server.until(lambda: server.client.live == 0)


def test_a_prompt_of_another_process_has_the_fields_name(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = lambda g: [
        Ended(g.rid, ErrorInfo(400, "invalid_request_error", "context_length_exceeded", "too long", "prompt"))
    ]
    assert refused(http, input_ids=PROMPT, score=[[5]])["param"] == "input_ids"


@pytest.mark.parametrize(("prompt", "param"), [({"text": "ab"}, "text"), ({"input_ids": PROMPT}, "score")])
def test_what_a_tokenizer_refuses_has_the_fields_name(
    server: Harness, http: httpx.Client, prompt: dict[str, Any], param: str
) -> None:
    """A prompt is asked for as one, choices as parts of another; the body has neither."""
    told = "prompt" if param == "text" else "input"
    server.tokenizer.answers["tokenize"] = ErrorInfo(400, "invalid_request_error", "bad", "no", told)
    error = refused(http, **prompt, score=["c", "d"])
    assert (error["param"], error["code"], error["message"]) == (param, "bad", "no")


def test_a_prompt_takes_as_long_as_it_takes(server: Harness, http: httpx.Client) -> None:
    """The tokenizer drops questions that nobody waits for: to these somebody listens until they are
    answered or cancelled."""
    scores(http, text="ab", score=["c"])
    asked = server.tokenizer.wait_for(Ask, 2)
    assert [(ask.what, ask.patient) for ask in asked] == [("tokenize", True)] * 2
    server.tokenizer.answers["tokenize"] = None
    assert post(http, text="a", score=[[5]], timeout=0.2).status_code == 408
    last, cancel = server.tokenizer.wait_for(Ask, 4)[2:]
    assert (last.what, cancel.what) == ("tokenize", "cancel")
    assert last.call == cancel.call


def test_all_tokenizers_take_their_share(new_server: Callable[..., Harness]) -> None:
    server = new_server(make(tokenizer_workers=2))
    for tokenizer in server.tokenizers:
        tokenizer.script = judge
        tokenizer.answers["tokenize"] = tokenize
    with client(server) as http:
        for _ in range(4):
            scores(http, text="ab", score=[[5]])
    for tokenizer in server.tokenizers:
        assert len(tokenizer.wait_for(Ask, 2)) == 2


def test_the_prompt_is_packed_once(
    server: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows come after it: a long one would hold up all streams."""
    packed = 0
    pack = score.pack

    def counted(ids: list[int]) -> bytes:
        nonlocal packed
        packed += len(ids)
        return pack(ids)

    monkeypatch.setattr(score, "pack", counted)
    text, choices = "ab" * 500, [[5 + i, 6] for i in range(40)]
    prompt = [1, *map(ord, text)]
    assert scores(http, text=text, score=choices) == [expected(prompt, choice) for choice in choices]
    assert len(sent(server)) == 40
    assert packed <= len(prompt) + sum(map(len, choices))


def test_no_more_rows_than_run_are_sent_at_once(new_server: Callable[..., Harness]) -> None:
    """However short the queue may be: 41 rows are no reason to refuse a request."""
    server = new_server(make(max_queued_requests=3))
    most = 0

    def script(g: Generate) -> list[Message]:
        nonlocal most
        most = max(most, server.client.live)
        return judge(g)

    server.tokenizer.script = script
    choices = [[5 + i, 6] for i in range(41)]
    with client(server) as http:
        assert scores(http, input_ids=PROMPT, score=choices) == [expected(PROMPT, c) for c in choices]
    assert 1 < most <= 3


def test_many_wait_for_their_turn_at_the_tokenizer(server: Harness) -> None:
    """Which refuses more than 256 questions: as many programs as like may score at the same time."""
    server.tokenizer.answers["tokenize"] = None
    body = GenerateRequest(text="a", score=["b"], timeout=0.5)

    async def ask() -> list[Any]:
        asked = (score.answer(server.service, body) for _ in range(300))
        return await asyncio.gather(*asked, return_exceptions=True)

    with stopped(server.loop) as clock:
        asking = asyncio.run_coroutine_threadsafe(ask(), server.loop)
        server.tokenizer.wait_for(Ask, 64)
        time.sleep(0.1)
        assert sum(m.what == "tokenize" for m in server.tokenizer.wait_for(Ask)) == 64
        clock.passes(0.5)
        assert {type(error) for error in asking.result(10)} == {OwnDeadlineExceeded}
    server.tokenizer.answers["tokenize"] = tokenize
    with client(server) as http:
        assert scores(http, text="a", score=["b"]) == [expected([1, 97], [98])]


def test_rewritten_messages_are_told(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["tokenize"] = {"tokens": PROMPT, "parts": [3], "rewritten": [1]}
    got = post(http, input=[{"role": "user", "text": "x"}], score=[[5]]).json()
    assert got["meta_info"]["rewritten"] == [1]
    assert got["input_ids"] == PROMPT
    assert got["scores"] == [expected(PROMPT, [5])]


def test_requests_that_score_run_side_by_side(server: Harness, http: httpx.Client) -> None:
    answers: dict[int, list[dict[str, Any]]] = {}

    def ask(i: int) -> None:
        with client(server) as own:
            answers[i] = scores(own, input_ids=[*PROMPT, i], score=[[5, 6], [7, 8]])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20, 28)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, got in answers.items():
        assert got == [expected([*PROMPT, i], [5, 6]), expected([*PROMPT, i], [7, 8])]
    assert len(answers) == 8
