"""Hugging Face transformers on the very weights that Sapwood loads: the reference of the benchmarks."""

from __future__ import annotations

from typing import Any

from sapwood.srt.config import ModelSource
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, HEAD, tensor_shapes


def transformers_model(source: ModelSource, attention: str = "sdpa") -> Any:
    """A float32 model of transformers with the dequantised tensors of `source`.

    Raises SystemExit for a position encoding that transformers does not have: a GGUF's own factors.
    """
    import transformers

    spec = spec_of(source.config)
    if spec.rope.kind == "factors":
        raise SystemExit("transformers has no position encoding with a GGUF's own factors")
    family = getattr(transformers, source.architecture)
    known = {k: v for k, v in source.config.items() if k not in ("architectures", "model_type")}
    config = family.config_class(**known)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype="float32", attn_implementation=attention
    )
    weights = open_weights(source)
    tensors = {name: weights.vector(name).float() for name in tensor_shapes(spec)}
    if spec.tied:
        tensors[HEAD] = tensors[EMBEDDING]
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def chat_ids(source: ModelSource, messages: list[dict[str, str]]) -> list[int]:
    """The prompt of a chat, rendered and encoded by transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=source.tokenizer_file, chat_template=source.chat_template, **source.template_vars
    )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
