"""Scores of a real model: what transformers says, and the same bits however they come about."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.srt.engine import Engine
from sapwood.srt.errors import BadRequest
from sapwood.srt.loader.weights import open_weights
from tests.decoding import reference_logits
from tests.models import default_source, default_tokenizer
from tests.serving import Server, serve

Scores = list[dict[str, Any]]

GRASS = "The colour of fresh grass is "
MORNING = "<|im_start|>user\nGood morning<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1 + (i * 37) % 4000 for i in range(90)]
CHOICES = [
    [504, 2365, 282, 4649],
    [504, 2365],
    [504, 2365, 282, 4649],
    [504, 18, 19, 20, 21],
    [900],
    [901, 902],
    [901, 903, 904],
    [5],
    [901, 903, 904, 905, 906],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("score")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(None, folder) as running:
        yield running


def ask(server: Server, choices: list[Any], **prompt: Any) -> dict[str, Any]:
    answer = server.post("/generate", {**prompt, "score": choices})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def scores(server: Server, choices: list[Any], prompt: list[int]) -> Scores:
    found: Scores = ask(server, choices, input_ids=prompt)["scores"]
    return found


def told(server: Server, prompt: list[int], choice: list[int]) -> dict[str, Any]:
    """What `/generate` tells of the choice as a part of the prompt."""
    asked = {
        "return_logprob": True,
        "logprob_start_len": len(prompt),
        "sampling_params": {"max_new_tokens": 0},
    }
    got = server.post("/generate", {"input_ids": prompt + choice, **asked}).json()
    return {"ids": choice, "logprobs": [t[0] for t in got["meta_info"]["input_token_logprobs"]]}


def flush(server: Server) -> None:
    assert server.post("/flush_cache", {}).status_code == 200


@pytest.fixture(scope="module")
def plain(server: Server) -> Scores:
    """Each choice as a part of a prompt, computed whole: what all others must be."""
    found = []
    for choice in CHOICES:
        flush(server)
        found.append(told(server, PROMPT, choice))
    return found


def test_cold_and_warm(server: Server, plain: Scores) -> None:
    flush(server)
    assert scores(server, CHOICES, PROMPT) == plain
    assert scores(server, CHOICES, PROMPT) == plain
    flush(server)
    server.generate(PROMPT[:50], max_new_tokens=1)
    assert scores(server, CHOICES, PROMPT) == plain


def test_alone_and_in_any_order(server: Server, plain: Scores) -> None:
    for choice, want in zip(CHOICES, plain, strict=True):
        flush(server)
        assert scores(server, [choice], PROMPT) == [want]
    assert scores(server, CHOICES[::-1], PROMPT) == plain[::-1]


def test_each_token_that_something_follows_is_computed_once(server: Server, plain: Scores) -> None:
    """And none that nothing follows. Judged anew, they take the prompt's last token and their own."""
    followed = {tuple(choice[:n]) for choice in CHOICES for n in range(1, len(choice))}
    flush(server)
    computed = []
    for _ in range(2):
        before = server.state()["prompt_tokens_computed"]
        assert scores(server, CHOICES, PROMPT) == plain
        computed.append(server.state()["prompt_tokens_computed"] - before)
    assert computed == [len(PROMPT) + len(followed), 1 + len(followed)]


def test_while_others_run(server: Server, plain: Scores) -> None:
    over = threading.Event()

    def others(seed: int) -> None:
        while not over.is_set():
            server.generate([seed + 7, *PROMPT[: 20 + seed]], max_new_tokens=16)

    threads = [threading.Thread(target=others, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert scores(server, CHOICES, PROMPT) == plain
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "flags",
    [
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 7, "max_running_requests": 2},
        {"max_total_tokens": 260, "chunked_prefill_size": 4, "max_running_requests": 8},
    ],
    ids=["no cache", "small chunks", "little room"],
)
def test_however_the_server_computes(folder: Path, plain: Scores, flags: dict[str, Any]) -> None:
    """With little room others are retracted, and these rows too; and the cache loses what they share."""
    with serve(None, folder, **flags) as other:
        assert scores(other, CHOICES, PROMPT) == plain
        before = other.state()["retracted"]
        threads = [
            threading.Thread(target=lambda seed=seed: other.generate([seed + 9] * 20, max_new_tokens=150))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for _ in range(3):
            assert scores(other, CHOICES, PROMPT) == plain
        for thread in threads:
            thread.join()
        if "max_total_tokens" in flags:
            assert other.state()["retracted"] > before
        state = other.state()
        assert state["slots_used"] == 0, state
        assert state["slots_private"] == 0, state


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Server]:
    """As transformers computes: in float32."""
    with serve(None, folder, dtype="float32", kv_cache_dtype="float32") as running:
        yield running


Reference = Callable[[list[int], list[int]], list[float]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Logprobs of a choice after a prompt, of transformers with the packaged model's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    source = default_source()
    weights = open_weights(source)
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**source.config)).train(False)
    model.load_state_dict({n: weights.vector(n) for n in weights.names()}, strict=False)
    model.tie_weights()

    def logprobs(prompt: list[int], choice: list[int]) -> list[float]:
        with torch.inference_mode():
            values = reference_logits(model, prompt + choice).double().log_softmax(-1)
        return [float(values[len(prompt) - 1 + i, token]) for i, token in enumerate(choice)]

    return logprobs


def check(found: dict[str, Any], choices: list[str], reference: Reference) -> list[float]:
    """The mean logprob of each choice, each as the reference has it."""
    tokenizer = default_tokenizer()
    for text, each in zip(choices, found["scores"], strict=True):
        assert each["ids"] == tokenizer.encode(text, add_special_tokens=False).ids
        want = reference(found["input_ids"], each["ids"])
        assert each["logprobs"] == pytest.approx(want, abs=1e-3)
    return [statistics.fmean(each["logprobs"]) for each in found["scores"]]


def test_p38_scores_are_those_of_the_reference(exact: Server, reference: Reference) -> None:
    """P38: tokens that follow by themselves make a long choice's mean high: each token's value is told, so
    that other methods can do without. By its first token it is green."""
    choices = ["green", "incomprehensibilities", "New", "New York", "green"]
    found = ask(exact, choices, text=GRASS)
    check(found, choices, reference)
    first = [each["logprobs"][0] for each in found["scores"]]
    assert max(first) == first[0]
    assert found["scores"][0] == found["scores"][4]
    new, york = found["scores"][2:4]
    assert york["ids"][: len(new["ids"])] == new["ids"]
    assert york["logprobs"][: len(new["logprobs"])] == new["logprobs"]
    assert ask(exact, ["green"], text=GRASS)["scores"] == [found["scores"][0]]


@pytest.mark.parametrize(("choices", "param"), [([], "score"), (["green", ""], "score[1]")])
def test_p38_no_choice_and_an_empty_one_are_refused(exact: Server, choices: list[str], param: str) -> None:
    answer = exact.post("/generate", {"text": GRASS, "score": choices})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("space", ["", " "])
def test_p39_the_first_thing_of_a_turn(exact: Server, reference: Reference, space: str) -> None:
    """P39: with a space before it or without, a choice is judged as what it is. After a space, which begins
    no answer of this model, it finds the mean of nonsense less unlikely: as the reference does. As a whole
    nonsense never is the likeliest."""
    choices = ["Good", "Bye", "%%#zq~"]
    found = ask(exact, choices, text=MORNING + space)
    means = check(found, choices, reference)
    wanted = [statistics.fmean(reference(found["input_ids"], each["ids"])) for each in found["scores"]]
    best = means.index(max(means))
    assert best == wanted.index(max(wanted)) == (2 if space else 0)
    likely = [sum(each["logprobs"]) for each in found["scores"]]
    assert likely.index(max(likely)) == 0


def test_a_turn_that_is_open_is_scored(server: Server) -> None:
    """Its tokens are those that generating has, and a choice goes on in it."""
    turns = [{"role": "user", "text": "Good morning"}, {"role": "assistant", "text": "Good", "open": True}]
    found = ask(server, [" morning", " <|im_end|>"], input=turns)
    went_on = server.post("/generate", {"input": turns, "sampling_params": {"max_new_tokens": 1}}).json()
    assert found["input_ids"] == went_on["input_ids"]
    ids = [each["ids"] for each in found["scores"]]
    assert default_tokenizer().token_to_id("<|im_end|>") not in ids[1]
    assert found["scores"] == scores(server, ids, found["input_ids"])


def test_the_engine_scores_alike(plain: Scores) -> None:
    with Engine(num_threads=1, max_queued_requests=2) as engine:
        assert engine.score(PROMPT, CHOICES)["scores"] == plain
        got = engine.score(GRASS, ["green", [5, 6]], return_text_in_logprobs=True)
        assert "".join(got["scores"][0]["texts"]) == "green"
        assert got["scores"][1]["ids"] == [5, 6]
        assert asyncio.run(engine.async_score(PROMPT, CHOICES))["scores"] == plain
        for choices in ([], [""], ["\ud800"]):
            with pytest.raises(BadRequest):
                engine.score(PROMPT, choices)
        with pytest.raises(BadRequest, match="score"):
            engine.generate("x", score=["a"])  # type: ignore[call-arg]
