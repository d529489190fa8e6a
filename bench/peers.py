"""Hugging Face transformers on the very weights that Sapwood loads: the reference of the benchmarks.

    python -m bench.peers FOLDER [--model MODEL]

writes those weights as a Hugging Face folder in float32, for servers that read no GGUF. Without --model: the
packaged one's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader.sources import resolve
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


def transformers_tokenizer(source: ModelSource) -> Any:
    """The tokenizer of transformers with the vocabulary and the chat template of `source`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=source.tokenizer_file,
        chat_template=source.chat_template,
        model_max_length=source.context_length,
        clean_up_tokenization_spaces=False,
        **source.template_vars,
    )


def write_folder(source: ModelSource, folder: Path) -> None:
    """Write `source` as a Hugging Face folder: float32 safetensors, configuration and tokenizer."""
    model = transformers_model(source)
    model.generation_config.eos_token_id = source.eos_ids
    model.save_pretrained(folder)
    transformers_tokenizer(source).save_pretrained(folder)


def chat_ids(source: ModelSource, messages: list[dict[str, str]]) -> list[int]:
    """The prompt of a chat, rendered and encoded by transformers."""
    tokenizer = transformers_tokenizer(source)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.peers")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="default: the packaged one")
    args = parser.parse_args()
    write_folder(resolve(make(model_path=args.model)), args.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
