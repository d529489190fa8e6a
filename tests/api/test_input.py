"""`input` of `/generate`: what a prompt in parts becomes, what its answer tells, what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt.config import make
from sapwood.srt.messages import (
    Generate,
    IdsPart,
    IdsPrompt,
    Message,
    PartsPrompt,
    Spoken,
    Started,
    TextPart,
    Verdict,
    pack,
)
from sapwood.srt.server.parts import MAX_MESSAGES, MAX_PARTS
from tests.api.scripted import PROMPT_IDS, VOCAB, Harness, answer, client
from tests.api.test_chat import events
from tests.api.test_native import post, refused


def sent(server: Harness, http: httpx.Client, **fields: Any) -> Any:
    """The prompt that the tokenizer gets."""
    seen: list[Any] = []

    def script(g: Generate) -> Any:
        seen.append(g.prompt)
        return answer(g)

    server.tokenizer.script = script
    response = post(http, **fields)
    assert response.status_code == 200, response.text
    (prompt,) = seen
    return prompt


def test_parts_are_texts_ids_and_messages(server: Harness, http: httpx.Client) -> None:
    given = [
        "a<|end|>", 5, 6, [7], [], {"special": "<|end|>"},
        {"role": "system", "text": "b"},
        {"role": "user", "content": ["c", [8, 9], ""]},
        {"role": "assistant", "content": "", "open": True},
    ]  # fmt: skip
    assert sent(server, http, input=given, chat_template_kwargs={"day": 1}) == PartsPrompt(
        [
            TextPart("a<|end|>"), IdsPart(pack([5, 6])), IdsPart(pack([7])), IdsPart(b""),
            TextPart("<|end|>", special=True),
            Spoken("system", [TextPart("b")]),
            Spoken("user", [TextPart("c"), IdsPart(pack([8, 9])), TextPart("")]),
            Spoken("assistant", [TextPart("")], open=True),
        ],
        {"day": 1},
    )  # fmt: skip


def test_ids_alone_need_no_tokenizer(
    server: Harness, http: httpx.Client, new_server: Callable[..., Harness]
) -> None:
    assert sent(server, http, input=[5, [6, 7], 8]) == IdsPrompt(pack([5, 6, 7, 8]))
    bare = new_server(make(model_path="tiny", skip_tokenizer_init=True))
    with client(bare) as other:
        assert sent(bare, other, input=[5, [6, 7], 8]) == IdsPrompt(pack([5, 6, 7, 8]))
        for given, where in ((["a"], "input[0]"), ([5, {"role": "user", "text": "b"}], "input[1].role")):
            error = refused(other, input=given)
            assert "token ids only" in error["message"]
            assert error["param"] == where


def rewritten(g: Generate) -> list[Message]:
    first, *rest = answer(g)
    assert isinstance(first, Started)
    return [Started(g.rid, pack(PROMPT_IDS), Verdict(3, "diverged"), 0.1, rewritten=[1, 3]), *rest]


def test_the_answer_has_the_ids_and_what_was_rewritten(server: Harness, http: httpx.Client) -> None:
    got = post(http, input=["hello"]).json()
    assert got["input_ids"] == PROMPT_IDS
    assert got["text"] == "Paris"
    assert "rewritten" not in got["meta_info"]
    server.tokenizer.script = rewritten
    got = post(http, input=["hello"]).json()
    assert got["meta_info"]["rewritten"] == [1, 3]
    assert "input_ids" not in post(http, text="hello").json()
    assert "input_ids" not in post(http, input_ids=[5]).json()


def test_the_ids_are_told_once_however_many_choices_there_are(server: Harness, http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": ["hello"], "sampling_params": {"n": 3}}
    got = http.post("/generate", json=body).json()
    assert [each.get("input_ids") for each in got] == [PROMPT_IDS, None, None]
    got = events(http.post("/generate", json={**body, "stream": True}).text)
    (told,) = [event for event in got if "input_ids" in event]
    assert told["input_ids"] == PROMPT_IDS
    assert told["index"] == 0
    assert told["meta_info"]["finish_reason"] is not None


def test_short_lists_of_ids_are_no_arrays(
    server: Harness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,384 of them would hold up every stream for a tenth of a second."""
    arrays: list[int] = []
    packed = server.service.packed

    def counted(ids: Any, param: str) -> IdsPrompt:
        arrays.append(len(ids))
        return packed(ids, param)

    monkeypatch.setattr(server.service, "packed", counted)
    given: list[Any] = [[i % VOCAB] for i in range(500)]
    content = {"role": "user", "content": given}
    prompt = sent(server, http, input=[*given, content, [5] * 300])
    assert prompt.parts[:500] == prompt.parts[500].content == [IdsPart(pack(ids)) for ids in given]
    assert prompt.parts[501] == IdsPart(pack([5] * 300))
    assert arrays == [300]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ([], "input", "empty list"),
        ([[]], "input", "at least one token"),
        (["a", VOCAB], "input", f"from 0 to {VOCAB - 1}, got {VOCAB}"),
        (["a", [5, -1]], "input[1]", "got -1"),
        ([{"role": "user", "content": ["a", [VOCAB]]}], "input[0].content[1]", f"got {VOCAB}"),
        ([{"text": "a"}], "input[0].role", "needs special or a role"),
        ([{"role": "user"}], "input[0].content", "exactly one of text and content"),
        ([{"role": "user", "text": "a", "content": "b"}], "input[0].content", "exactly one"),
        ([{"special": "a", "role": "user"}], "input[0].role", "special and role"),
        ([{"special": "a", "open": True}], "input[0].open", "is for messages"),
        ([{"role": "user", "text": "a", "open": True}, "b"], "input[0].open", "not the last part"),
        ([{"role": "user", "text": "a"}] * (MAX_MESSAGES + 1), "input", f"{MAX_MESSAGES} messages"),
        (["a"] * (MAX_PARTS + 1), "input", f"{MAX_PARTS} parts"),
        ([{"role": "user", "content": ["a"] * MAX_PARTS}], "input", f"got {MAX_PARTS + 1}"),
    ],
)
def test_refusals_name_the_place(http: httpx.Client, given: Any, param: str, words: str) -> None:
    error = refused(http, input=given)
    assert words in error["message"]
    assert error["param"] == param


def test_other_fields_that_do_not_go_with_it(http: httpx.Client) -> None:
    assert "exactly one of text" in refused(http, input=["a"], text="b")["message"]
    assert "exactly one of text" in refused(http)["message"]
    for fields in ({"input": ["a"]}, {"text": "a"}):
        error = refused(http, chat_template_kwargs={"a": 1}, **fields)
        assert error["param"] == "chat_template_kwargs"
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    error = refused(http, input=[{"role": "user", "text": "a"}], chat_template_kwargs={"a": deep})
    assert "deeper" in error["message"]
    assert "unknown" in refused(http, input=[{"role": "user", "text": "a", "name": "b"}])["message"]


def test_more_ids_than_any_request_may_have_are_refused_at_once(new_server: Callable[..., Harness]) -> None:
    server = new_server()
    server.service.max_request_tokens = 100
    with client(server) as http:
        error = refused(http, input=[[5] * 60, 6, {"role": "user", "content": [[6] * 40]}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert "101 token ids" in error["message"]
