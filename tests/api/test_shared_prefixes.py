"""The file of `--shared-prefixes`: what is read, what is wrong with it, and what is sent to compute it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt import namespaces
from sapwood.srt.client import Client
from sapwood.srt.config import make
from sapwood.srt.errors import BadRequest, ConfigError, Unavailable
from sapwood.srt.messages import (
    Ask,
    ChatPrompt,
    Ended,
    Generate,
    IdsPrompt,
    Message,
    TextPrompt,
    pack,
    unpack,
)
from sapwood.srt.params import SamplingParams, Scheduling
from sapwood.srt.server import shared_prefixes
from sapwood.srt.server.service import Service
from sapwood.srt.server.shared_prefixes import MAX_PREFIXES, read, tokens_of
from tests.api.scripted import Harness, answer, refuse, source

SYSTEM = {"role": "system", "content": "You are a river."}


def written(folder: Path, *lines: Any) -> Path:
    """A file with these lines: texts as they are, all else as JSON."""
    path = folder / "prefixes.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def service(path: Path | str | None, **options: Any) -> Service:
    config = make(shared_prefixes=None if path is None else str(path), **options)
    return Service(config, source(), Client(config, "/nowhere"))


def test_every_kind_of_prompt_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"messages": [SYSTEM]},
        "",
        {"messages": [SYSTEM], "add_generation_prompt": True, "chat_template_kwargs": {"day": "Monday"}},
        {"text": "You are a tree."},
        '  {"text": "a", "add_special_tokens": false}\r',
        {"ids": [5, 6, 7]},
    )
    assert read(service(path)) == [
        (1, ChatPrompt([SYSTEM], add_generation_prompt=False)),
        (3, ChatPrompt([SYSTEM], add_generation_prompt=True, template_kwargs={"day": "Monday"})),
        (4, TextPrompt("You are a tree.")),
        (5, TextPrompt("a", False)),
        (6, IdsPrompt(pack([5, 6, 7]))),
    ]
    assert read(service(None)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "exactly one of text, messages and ids must be given"),
        ({"text": "a", "ids": [5]}, "exactly one of text, messages and ids must be given"),
        ({"prompt": "a"}, "unknown field `prompt`"),
        ({"text": 5}, "Expected `str | null`, got `int` - at `$.text`"),
        ({"ids": []}, "ids is an empty list of token ids"),
        ({"ids": [1000]}, "a token id in ids must be from 0 to 999, got 1000"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "`$.messages[0].role`"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"text": "a", "add_generation_prompt": False}, "add_generation_prompt needs messages"),
        ({"ids": [5], "add_special_tokens": True}, "add_special_tokens needs text"),
        ("{'text': 'a'}", "JSON is malformed"),
        ('{"messages": [], "chat_template_kwargs": {"a": ' + "[" * 100_000, "recursion"),
        ('{"text": "\\ud800"}', "truncated"),
        ("text", "JSON is malformed"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path, {"text": "good"}, line)
    with pytest.raises(ConfigError) as caught:
        read(service(path))
    assert caught.value.message.startswith(f"--shared-prefixes {path}, line 2: ")
    assert words.lower() in caught.value.message.lower()
    assert caught.value.param == "shared_prefixes"


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "none.jsonl", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (written(tmp_path, "", " "), "holds no prompt"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            read(service(path))
        assert str(path) in caught.value.message
    with pytest.raises(ConfigError, match="--disable-radix-cache is set"):
        read(service(written(tmp_path, {"text": "a"}), disable_radix_cache=True))


def test_there_may_be_so_many(tmp_path: Path) -> None:
    lines = [{"text": str(i)} for i in range(MAX_PREFIXES)]
    assert len(read(service(written(tmp_path, *lines)))) == MAX_PREFIXES
    with pytest.raises(ConfigError, match=f"line {MAX_PREFIXES + 1}: there may be {MAX_PREFIXES} prefixes"):
        read(service(written(tmp_path, *lines, {"text": "one more"})))


def test_what_prompts_share_counts_once() -> None:
    assert tokens_of([]) == 0
    assert tokens_of([[1, 2, 3]]) == 3
    assert tokens_of([[1, 2, 3], [1, 2, 3], [1, 2]]) == 3
    assert tokens_of([[1, 2, 9], [5], [1, 2, 3, 4]]) == 6
    assert tokens_of([[10, 1], [9, 1], [10, 2]]) == 5


# ---- computed by a scripted tokenizer


def words_as_ids(ask: Ask) -> dict[str, Any]:
    assert isinstance(ask.prompt, TextPrompt)
    return {"tokens": [len(word) for word in ask.prompt.text.split()]}


def compute(harness: Harness) -> dict[str, str]:
    prefixes = read(harness.service)
    work = shared_prefixes.compute(harness.service, prefixes)
    return asyncio.run_coroutine_threadsafe(work, harness.loop).result(10)


@pytest.fixture
def begin(new_server: Callable[..., Harness], tmp_path: Path) -> Callable[..., Harness]:
    """A server with a pool of 100 slots and a file of these lines."""

    def make_one(*lines: Any, slots: int = 100, longest: int = 100, **options: Any) -> Harness:
        harness = new_server(make(shared_prefixes=str(written(tmp_path, *lines)), **options))
        for tokenizer in harness.tokenizers:  # questions go round
            tokenizer.answers = {
                "state": {"slots_total": slots, "max_request_tokens": longest},
                "tokenize": words_as_ids,
            }
        return harness

    return make_one


def test_each_is_one_request_that_only_the_server_can_send(begin: Callable[..., Harness]) -> None:
    harness = begin({"text": "a bb ccc"}, {"ids": [7, 8]}, tokenizer_workers=2)
    other: list[Generate] = []
    harness.tokenizers[1].script = lambda g: (other.append(g), answer(g))[1]
    assert compute(harness) == {"shared prefixes": "2, of 5 tokens together"}
    sent = [*harness.tokenizer.wait_for(Generate), *other]
    assert sorted(unpack(g.prompt.ids).tolist() for g in sent if isinstance(g.prompt, IdsPrompt)) == [
        [1, 2, 3],
        [7, 8],
    ]
    for message in sent:
        assert message.namespace == namespaces.LISTED
        assert message.params == SamplingParams(max_tokens=0, temperature=0.0)
        assert message.scheduling == Scheduling(unsalted=namespaces.LISTED)


def test_one_after_the_other(begin: Callable[..., Harness]) -> None:
    harness = begin({"ids": [5]}, {"ids": [6]}, {"ids": [7]})
    running: list[int] = []

    def script(g: Generate) -> list[Message]:
        running.append(harness.client.live)
        return answer(g)

    harness.tokenizer.script = script
    compute(harness)
    assert running == [1, 1, 1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"ids": [5] * 26}], "line 1: with it the prefixes take 26 tokens; they may take 25, 25% of the KV"),
        ([{"ids": [5] * 20}, {"ids": [5] * 25}, {"ids": [6]}], "line 3: with it the prefixes take 26 tokens"),
        ([{"text": "a"}, {"text": " "}], "line 2: it has no tokens"),
    ],
)
def test_too_much_is_refused_before_anything_is_computed(
    begin: Callable[..., Harness], lines: list[Any], words: str
) -> None:
    harness = begin(*lines)
    with pytest.raises(ConfigError, match=words):
        compute(harness)
    assert not [m for m in harness.tokenizer.received if isinstance(m, Generate)]


def test_one_that_is_longer_than_a_request_may_be(begin: Callable[..., Harness]) -> None:
    harness = begin({"ids": [5]}, {"ids": [5] * 11}, longest=10)
    with pytest.raises(ConfigError, match="line 2: it has 11 tokens; a prompt may have 10"):
        compute(harness)


def test_errors_of_other_processes_name_the_line(begin: Callable[..., Harness]) -> None:
    harness = begin({"text": "a"})
    harness.tokenizer.answers["tokenize"] = BadRequest("no template").info()
    with pytest.raises(ConfigError, match="line 1: no template"):
        compute(harness)
    harness.tokenizer.answers["tokenize"] = words_as_ids
    harness.tokenizer.script = refuse
    with pytest.raises(ConfigError, match="line 1: 800 tokens, limit 512"):
        compute(harness)
    harness.tokenizer.script = lambda g: [Ended(g.rid, Unavailable("the worker has died").info())]
    with pytest.raises(Unavailable, match="the worker has died"):
        compute(harness)


def test_the_time_limit_of_clients_is_none_of_theirs(begin: Callable[..., Harness]) -> None:
    harness = begin({"ids": [5]}, request_timeout=0.05)
    late: list[Generate] = []
    harness.tokenizer.script = lambda g: late.append(g) or []  # type: ignore[func-returns-value]
    work = shared_prefixes.compute(harness.service, read(harness.service))
    future = asyncio.run_coroutine_threadsafe(work, harness.loop)
    harness.tokenizer.wait_for(Generate)
    with pytest.raises(TimeoutError):
        future.result(0.3)
    harness.tokenizer.say(*answer(late[0]))
    assert future.result(20) == {"shared prefixes": "1, of 1 tokens together"}
