"""What ends a `score` before it is done, whatever of it runs just then: aborts, timeouts, gone clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt.errors import Unavailable
from sapwood.srt.messages import Abort, Ask, Generate, IdsPrompt, Message
from sapwood.srt.server import score
from sapwood.srt.server.native_protocol import GenerateRequest
from tests.api.clock import stopped
from tests.api.scripted import Harness, answer_aborts, client
from tests.api.test_score import PROMPT, expected, judge, post, scores, sent, tokenize


@pytest.fixture(autouse=True)
def scripted(server: Harness) -> None:
    server.tokenizer.script = judge
    server.tokenizer.answers["tokenize"] = tokenize


def hang(g: Generate) -> list[Message]:
    """A row that begins and goes no further, if it is not the first one."""
    assert isinstance(g.prompt, IdsPrompt)
    return judge(g) if g.params.logprob_start == len(PROMPT) else judge(g)[:2]


def test_an_abort_ends_it(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = hang
    aborts = answer_aborts(server.tokenizer)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(post(http, input_ids=PROMPT, score=[[5, 6], [7, 8]], rid="x"))
    )
    asking.start()
    server.tokenizer.wait_for(Generate, 2)
    with client(server) as other:
        assert other.post("/abort_request", json={"rid": "x"}).status_code == 200
    asking.join()
    aborts.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "aborted"
    server.until(lambda: server.client.live == 0)


def ask_in_background(server: Harness, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def run() -> None:
        with client(server) as http:
            answers.append(post(http, **fields))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


@pytest.mark.parametrize("everything", [False, True])
def test_an_abort_while_it_is_tokenised_ends_it(
    server: Harness, http: httpx.Client, everything: bool
) -> None:
    """No stream is live then, and yet the name is."""
    server.tokenizer.answers["tokenize"] = None
    asking, answers = ask_in_background(server, text="ab", score=["c"], rid="x")
    server.tokenizer.wait_for(Ask)
    aborted = http.post("/abort_request", json={"abort_all": True} if everything else {"rid": "x"})
    assert aborted.json() == {"aborted": 1}
    asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "aborted")
    assert not sent(server)
    assert http.post("/abort_request", json={"rid": "x"}).json() == {"aborted": 0}


def test_an_abort_between_two_rows_ends_it(server: Harness, http: httpx.Client) -> None:
    aborted: list[int] = []

    async def start(count: int, begin: Callable[[], list[Any]]) -> list[Any]:
        if sent(server):
            aborted.append(server.client.abort("x"))
        return begin()

    body = GenerateRequest(input_ids=PROMPT, score=[[5, 6], [7, 8], [9, 8]], rid="x")
    asking = asyncio.run_coroutine_threadsafe(score.answer(server.service, body, start=start), server.loop)
    with pytest.raises(Unavailable, match="aborted"):
        asking.result(20)
    assert aborted == [1]
    server.until(lambda: server.client.live == 0)
    assert scores(http, input_ids=PROMPT, score=[[5]], rid="x") == [expected(PROMPT, [5])]


def test_its_name_is_its_own_until_it_ends(server: Harness, http: httpx.Client) -> None:
    """Another request of that name is refused, whether a row runs or none does; the first goes on."""
    go = threading.Event()

    def later(ask: Ask) -> dict[str, Any]:
        go.wait(20)
        return tokenize(ask)

    server.tokenizer.answers["tokenize"] = later
    asking, answers = ask_in_background(server, text="ab", score=["cd", "ef"], rid="x")
    server.tokenizer.wait_for(Ask)
    try:
        for fields in ({"score": [[5]]}, {}):
            assert post(http, input_ids=PROMPT, rid="x", **fields).status_code == 409
    finally:
        go.set()
    asking.join()
    assert answers[0].status_code == 200
    assert len(sent(server)) == 2


def test_a_timeout_is_for_all_rows_together(server: Harness) -> None:
    with stopped(server.loop) as clock:

        def script(g: Generate) -> list[Message]:
            said = hang(g)
            clock.passes(0.2 if len(said) > 2 else 0.0)
            return said

        server.tokenizer.script = script
        choices = [[5, 6], [7, 8], [9, 8]]
        asking, answers = ask_in_background(server, input_ids=PROMPT, score=choices, timeout=0.3)
        server.tokenizer.wait_for(Generate, 3)
        clock.passes(0.09)
        assert server.call(lambda: server.client.live) == 2
        clock.passes(0.02)
        asking.join()
    assert answers[0].status_code == 408
    server.until(lambda: server.client.live == 0)
    assert len(server.tokenizer.wait_for(Abort, 2)) == 2


def test_a_timeout_while_it_is_tokenised(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.answers["tokenize"] = None
    assert post(http, text="a", score=[[5]], timeout=0.2).status_code == 408


def test_a_client_that_goes_away_ends_it(server: Harness) -> None:
    server.tokenizer.script = hang
    body = b'{"input_ids": [10, 11, 12], "score": [[5, 6], [7, 8]]}'
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        server.tokenizer.wait_for(Generate, 2)
    server.until(lambda: server.client.live == 0)
    assert len(server.tokenizer.wait_for(Abort)) == 1
    server.until(lambda: server.client._idle.is_set())


def test_what_has_begun_ends_though_the_server_is_to_end(new_server: Callable[..., Harness]) -> None:
    """Between two rows nothing is live: it is waited for all the same, and its rows still begin."""
    server = new_server()
    idle: list[bool] = []

    def script(g: Generate) -> list[Message]:
        server.service.state = "draining"
        idle.append(server.client._idle.is_set())
        return judge(g)

    server.tokenizer.script = script
    with client(server) as http:
        assert len(scores(http, input_ids=PROMPT, score=[[5, 6], [7, 8], [9, 8]])) == 3
        assert post(http, input_ids=PROMPT, score=[[5]]).status_code == 503
    assert not any(idle)
    server.until(lambda: server.client._idle.is_set())
