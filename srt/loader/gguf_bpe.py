"""Byte-level BPE vocabularies of GGUF files (`tokenizer.ggml.model` "gpt2")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.vocabulary import strings, tokens_of

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_CASED[0]}{_SHORT}|{_CASED[1]}{_SHORT}|\p{{N}}{{1,3}}|{_CASED_REST}"


@dataclass(frozen=True, slots=True)
class Split:
    """How text is cut before merging: by GPT-2's rule, after cutting out each digit, or by a `pattern`.

    `whole`: a word that is a token is taken as it is. `bos`: texts begin with BOS unless the file says no.
    """

    pattern: str | None = None
    digits: bool = False
    compose: bool = False
    whole: bool = False
    bos: bool = False


_LLAMA3_SPLIT = Split(_LLAMA3, whole=True, bos=True)
SPLITS = {
    "default": Split(),
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "dbrx": Split(_LLAMA3),
    "smaug-bpe": Split(_LLAMA3),
    "qwen2": Split(_QWEN2, compose=True),
    "deepseek-r1-qwen": Split(_QWEN2),
    "tekken": Split(_TEKKEN, whole=True, bos=True),
    "gpt-4o": Split(_GPT4O),
}
"""By `tokenizer.ggml.pre`."""


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with BOS where the file does not say."""
    return _split_of(metadata).bos


def build(metadata: Mapping[str, Any], source: Path) -> Any:
    """The `tokenizers.Tokenizer`, still without its special tokens; `source` is named in errors."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ModelError(
            f"{source}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(SPLITS)}"
        )
    split = _split_of(metadata)
    vocab = {token: i for i, token in enumerate(tokens_of(metadata, source))}
    merges = _merges(metadata, vocab, source)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _split_of(metadata: Mapping[str, Any]) -> Split:
    return SPLITS[metadata.get("tokenizer.ggml.pre", "default")]


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], source: Path) -> list[tuple[str, str]]:
    merges = []
    for text in strings(metadata, "tokenizer.ggml.merges", source):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{source}: the tokenizer's merge {text!r} does not fit its tokens")
        merges.append((left, right))
    return merges


def _pre_tokenizer(split: Split) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if split.pattern is not None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split.digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    return plain
