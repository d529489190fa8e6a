"""`stop_regex` end to end: through every door the output is that without it, cut before the first match."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from sapwood import LLM, Engine, SamplingParams
from sapwood.srt.errors import BadRequest
from tests.models import tiny_llama
from tests.serving import Server, events, lines_of, serve

PROMPTS = ["The sapwood of a tree", "A river is", "Numbers: 1, 2"]
GREEDY = {"temperature": 0, "ignore_eos": True}
TOKENS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("stop_regex") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve(model, model.parent, max_total_tokens=4096) as running:
        yield running


def native(server: Server, prompt: str | list[str], **params: Any) -> Any:
    body = {"text": prompt, "sampling_params": {**GREEDY, "max_new_tokens": TOKENS, **params}}
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pattern_in(text: str) -> str:
    """One that is found in the text, first somewhere behind its beginning."""
    place = next(i for i in range(12, len(text) - 3) if text[i : i + 3].isascii())
    first, _, last = map(re.escape, text[place : place + 3])
    return f"{first}.?{last}"


def cut(text: str, pattern: str) -> str:
    """The text before the match that ends first, of those the one that begins first."""
    compiled = re.compile(pattern)
    return next(
        text[:start]
        for end in range(len(text) + 1)
        for start in range(end)
        if compiled.fullmatch(text, start, end)
    )


def test_an_output_is_cut_before_its_first_match(server: Server, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for prompt in PROMPTS:
        plain = native(server, prompt)
        pattern = pattern_in(plain["text"])
        got = native(server, prompt, stop_regex=pattern)
        meta = got["meta_info"]
        assert got["text"] == cut(plain["text"], pattern)
        assert meta["finish_reason"] == {"type": "stop", "matched": pattern}
        count = meta["completion_tokens"]
        assert got["output_ids"] == plain["output_ids"][:count]
        assert 0 < count < TOKENS
        kept = meta["kept"]
        assert tokenizer.decode(got["output_ids"][: kept["tokens"]]) + kept["rest"] == got["text"]
        assert "kept" not in plain["meta_info"]


def test_nothing_of_a_match_is_streamed(server: Server) -> None:
    plain = native(server, PROMPTS[0])["text"]
    pattern = pattern_in(plain)
    asked = {"max_tokens": TOKENS, "stop_regex": [pattern, "never"], "stream": True}
    body = {"prompt": PROMPTS[0], **GREEDY, **asked}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        choices = [event["choices"][0] for event in list(events(lines_of(answer)))[:-1]]
    assert "".join(choice["text"] for choice in choices) == cut(plain, pattern)
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", pattern)


def test_a_chat_and_its_choices_end_alike(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **GREEDY, "max_tokens": TOKENS, "n": 2}
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    pattern = pattern_in(plain)
    answer = server.post("/v1/chat/completions", {**body, "stop_regex": pattern}).json()
    for choice in answer["choices"]:
        assert choice["message"]["content"] == cut(plain, pattern)
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", pattern)
    assert answer["usage"]["completion_tokens"] < 2 * TOKENS


def test_each_prompt_may_have_its_own(server: Server) -> None:
    plain = [one["text"] for one in native(server, PROMPTS)]
    patterns = [pattern_in(text) for text in plain]
    each = [{**GREEDY, "max_new_tokens": TOKENS, "stop_regex": pattern} for pattern in patterns]
    got = server.post("/generate", {"text": PROMPTS, "sampling_params": each}).json()
    assert [one["text"] for one in got] == [*map(cut, plain, patterns)]


def test_min_tokens_come_first(server: Server) -> None:
    got = native(server, PROMPTS[0], stop_regex=r"[\s\S]+", min_new_tokens=9)
    assert got["meta_info"]["completion_tokens"] in range(9, 14)  # a token may be part of a character
    assert got["text"] == ""


def test_offline(model: Path) -> None:
    with Engine(str(model), max_total_tokens=2048, log_level="warning") as engine:
        plain = engine.generate(PROMPTS[0], {**GREEDY, "max_new_tokens": TOKENS})["text"]
        pattern = pattern_in(plain)
        given = {**GREEDY, "max_new_tokens": TOKENS, "stop_regex": pattern}
        vllm = SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS, stop_regex=[pattern])
        for params in (given, vllm):
            got = engine.generate(PROMPTS[0], params)
            assert got["text"] == cut(plain, pattern)
            assert "kept" in got["meta_info"]
        with pytest.raises(BadRequest, match="matches the empty text"):
            engine.generate(PROMPTS[0], {"stop_regex": "a*"})
    with LLM(str(model), max_total_tokens=2048, log_level="warning") as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS, stop_regex=pattern)
        (output,) = llm.generate(PROMPTS[0], params)[0].outputs
        assert (output.text, output.stop_reason) == (cut(plain, pattern), pattern)
        for wrong, told in (
            ({"stop_regex": "a$"}, "anchor"),
            ({"stop_regex": [""]}, "length of a stop_regex"),
            ({"stop_regex": "a", "include_stop_str_in_output": True}, "works with stop, not with stop_regex"),
        ):
            with pytest.raises(BadRequest, match=told):
                llm.generate(PROMPTS[0], SamplingParams(**wrong))
