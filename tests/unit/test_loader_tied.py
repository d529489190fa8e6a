"""P51: a model without a head of its own says what transformers says with the embedding as its head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.cpu_ops import CpuOps
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import HEAD
from tests.decoding import Sequence, reference_logits
from tests.models import default_source, default_tokenizer

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about trees.",
    "def fibonacci(n):",
    "Count from one to twenty.",
    "Why is the sky blue?",
]


@pytest.fixture(scope="module")
def both() -> tuple[Decoder, Any]:
    """The packaged model, and transformers with the same dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    source = default_source()
    weights = open_weights(source)
    assert HEAD not in weights.names()
    with no_init_weights():
        model = LlamaForCausalLM(LlamaConfig(**source.config)).train(False)
    unset = model.load_state_dict({n: weights.vector(n) for n in weights.names()}, strict=False)
    assert unset.missing_keys == [HEAD]
    model.tie_weights()
    return Decoder(spec_of(source.config), weights, CpuOps("float32"), source.context_length), model


@torch.inference_mode()
def test_64_tokens_are_those_of_transformers(both: tuple[Decoder, Any]) -> None:
    decoder, reference = both
    tokenizer = default_tokenizer()
    chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS]
    prompts = [tokenizer.encode(chat).ids for chat in chats]
    room = max(map(len, prompts)) + 64
    answers = Sequence(decoder, room, len(prompts)).greedy_together(prompts, 64)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, last = prompt + answer[:-1], len(prompt) - 1
        expected = reference_logits(reference, ids)[last:]
        assert (Sequence(decoder, len(ids)).extend(ids)[last:] - expected).abs().max() < 1e-3
        assert expected.argmax(-1).tolist() == answer
    assert tokenizer.decode(answers[0]).startswith("The capital of France is Paris.")
