"""What the API says of prompts, end to end on a tiny random model: all routes and ways agree, to the bit."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.decoding import reference_logits, reference_of
from tests.models import tiny_llama
from tests.serving import Server, serve

TEXT = "One night, the moon said hello to the sea 🌊 and the sea, être poli, said hello back. "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reading")
    # A chunk holds a part of the prompts below.
    with serve(
        tiny_llama(folder / "model"), folder, max_total_tokens=8192, chunked_prefill_size=16
    ) as running:
        yield running


def posted(server: Server, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def echo(server: Server, prompt: Any, **body: Any) -> dict[str, Any]:
    values = {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0, **body}
    choice: dict[str, Any] = posted(server, "/v1/completions", **values)["choices"][0]
    return choice


def flush(server: Server) -> None:
    assert httpx.post(server.url + "/flush_cache", timeout=20).status_code == 200


def test_echo_is_the_same_cold_and_cached_as_text_and_as_ids(server: Server) -> None:
    """P21: the prompt is longer than a chunk; max_tokens 0 and 1; offsets point at the tokens."""
    flush(server)
    ids = posted(server, "/tokenize", prompt=TEXT)["tokens"]
    assert len(ids) > 32
    cold = echo(server, TEXT, max_tokens=1)
    assert cold == echo(server, TEXT, max_tokens=1)
    assert cold == echo(server, ids, max_tokens=1)
    assert cold["text"].startswith(TEXT)
    shape = cold["logprobs"]
    assert len(shape["tokens"]) == len(ids) + 1
    assert shape["token_logprobs"][0] is None
    assert all(value < 0 for value in shape["token_logprobs"][1:])
    assert shape["text_offset"] == sorted(shape["text_offset"])
    whole = [(t, o) for t, o in zip(shape["tokens"], shape["text_offset"], strict=True) if "bytes:" not in t]
    assert len(whole) > 20
    assert all(cold["text"].startswith(token, offset) for token, offset in whole)
    none = echo(server, TEXT, max_tokens=0)
    assert none["text"] == TEXT
    assert none["logprobs"] == {name: values[:-1] for name, values in shape.items()}


def test_echo_logprobs_and_embeddings_are_those_of_transformers(server: Server) -> None:
    """P21: log_softmax over the same ids, within 1e-3; the state after the final norm."""
    flush(server)
    ids = posted(server, "/tokenize", prompt=TEXT)["tokens"]
    model = reference_of(server.output.parent / "model")
    want = torch.log_softmax(reference_logits(model, ids), dim=-1)[:-1].gather(
        1, torch.tensor(ids[1:], dtype=torch.int64)[:, None]
    )
    for _ in ("cold", "cached"):
        got = echo(server, ids, max_tokens=0)["logprobs"]["token_logprobs"][1:]
        torch.testing.assert_close(torch.tensor(got), want[:, 0], rtol=0, atol=1e-3)
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    for pooling, state in (("last", states[-1]), ("mean", states.mean(dim=0))):
        body = posted(server, "/v1/embeddings", input=ids, pooling=pooling, normalize=False)
        vector = torch.tensor(body["data"][0]["embedding"])
        torch.testing.assert_close(vector, state, rtol=0, atol=1e-3)


def test_a_batch_is_scored_as_its_members_alone(server: Server) -> None:
    batch = [posted(server, "/tokenize", prompt=TEXT[:n])["tokens"] for n in (40, 7, 71)]
    body = {"prompt": batch, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choices = posted(server, "/v1/completions", **body)["choices"]
    for choice, ids in zip(choices, batch, strict=True):
        flush(server)
        alone = echo(server, ids, logprobs=1, max_tokens=1)
        assert choice["logprobs"] == alone["logprobs"]
        assert choice["text"] == alone["text"]


def test_all_routes_say_the_same_of_a_prompt(server: Server) -> None:
    flush(server)
    scores = echo(server, TEXT, max_tokens=0)["logprobs"]["token_logprobs"]
    reading = posted(server, "/v1/completions", prompt=TEXT, max_tokens=1, prompt_logprobs=0)
    ids = posted(server, "/tokenize", prompt=TEXT)["tokens"]
    told = reading["choices"][0]["prompt_logprobs"]
    assert [told[0], *(told[i][str(ids[i])]["logprob"] for i in range(1, len(ids)))] == scores
    for start in (0, 1, 17, len(ids) - 1, len(ids), len(ids) + 5):
        params = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        meta = posted(server, "/generate", text=TEXT, logprob_start_len=start, **params)["meta_info"]
        expected = [[score, token, None] for score, token in zip(scores, ids, strict=True)]
        assert meta["input_token_logprobs"] == expected[start:]


def test_the_best_of_many(server: Server) -> None:
    body = {"prompt": TEXT, "seed": 7, "max_tokens": 8, "logprobs": 0}
    every = posted(server, "/v1/completions", n=6, **body)["choices"]
    means = {c["text"]: float(np.mean(c["logprobs"]["token_logprobs"])) for c in every}
    best = posted(server, "/v1/completions", n=2, best_of=6, **body)
    assert [c["text"] for c in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert best["usage"]["completion_tokens"] > sum(len(c["logprobs"]["tokens"]) for c in best["choices"])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_exact(server: Server, pooling: str) -> None:
    """Cached or not, alone or together, as text or as ids: the same bytes."""
    texts = [TEXT, TEXT[:20], TEXT[:50]]
    ids = [posted(server, "/tokenize", prompt=text)["tokens"] for text in texts]

    def vectors(value: Any) -> list[bytes]:
        body = {"input": value, "pooling": pooling, "encoding_format": "base64"}
        return [base64.b64decode(e["embedding"]) for e in posted(server, "/v1/embeddings", **body)["data"]]

    together = vectors(texts)
    assert together == vectors(ids)
    assert len(set(together)) == 3
    for text, vector in zip(texts, together, strict=True):
        flush(server)
        assert vectors(text) == [vector]
        assert np.linalg.norm(np.frombuffer(vector, "<f4")) == pytest.approx(1.0, abs=1e-6)


def test_ids_and_texts_go_both_ways(server: Server) -> None:
    ids = posted(server, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert posted(server, "/detokenize", tokens=ids["tokens"]) == {"prompt": TEXT}
    chat = posted(server, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    shown = posted(server, "/detokenize", tokens=chat["tokens"])["prompt"]
    assert "<|im_start|>user\nhi<|im_end|>" in shown


def test_an_empty_prompt_is_named_as_the_request_names_it(server: Server) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/generate", "text")):
        error = server.post(path, {field: ""}).json()["error"]
        assert error["param"] == field, error
        assert error["message"].startswith(field)
