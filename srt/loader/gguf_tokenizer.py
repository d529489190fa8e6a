"""A tokenizer.json out of a GGUF file's vocabulary."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood.srt.errors import ModelError

FORMAT = 1
"""Part of the cached file's name: raise it when the conversion changes."""

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
}
"""How text is cut before merging, by `tokenizer.ggml.pre`: GPT-2's rule, the same after cutting out each
digit, or a pattern."""


def write_tokenizer(metadata: Mapping[str, Any], source: Path, folder: Path) -> Path:
    """Make the tokenizer.json of the GGUF file `source` in `folder`, or find the one made before.

    It is known by the source's path, size and time of change. ModelError if the vocabulary's kind is not
    supported or its entries do not fit together.
    """
    stat = source.stat()
    label = f"{FORMAT}:{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    key = hashlib.sha256(label.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    target = folder / f"{key}.tokenizer.json"
    if target.is_file():
        return target
    text = build(metadata, source).to_str()
    try:
        _write(target, text)
    except OSError as e:
        raise ModelError(
            f"cannot keep a tokenizer in {folder}: {e}; set SAPWOOD_CACHE to a folder that can"
        ) from None
    return target


def _write(target: Path, text: str) -> None:
    """Put the whole text at `target` or nothing, whoever else does the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def build(metadata: Mapping[str, Any], source: Path) -> Any:
    """The `tokenizers.Tokenizer` that `tokenizer.ggml.*` describes; `source` is named in errors."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"{source}: the tokenizer kind {model!r} (tokenizer.ggml.model) is not supported yet; "
            "supported: 'gpt2' (byte-level BPE)"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ModelError(
            f"{source}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported yet; "
            f"supported: {', '.join(_SPLITS)}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = models.BPE(
        vocab=vocab,
        merges=_merges(metadata, vocab, source),
        ignore_merges=_SPLITS[pre] is _LLAMA3,  # Llama 3 takes whole words of its vocabulary as they are
    )
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(_SPLITS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_special(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()), source)
    _add_bos(tokenizer, tokens, metadata, pre)
    return tokenizer


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], source: Path) -> list[tuple[str, str]]:
    merges = []
    for text in _strings(metadata, "tokenizer.ggml.merges", source):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{source}: the tokenizer's merge {text!r} does not fit its tokens")
        merges.append((left, right))
    return merges


def _pre_tokenizer(split: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_special(tokenizer: Any, tokens: list[str], kinds: Any, source: Path) -> None:
    from tokenizers import AddedToken

    if len(kinds) not in (0, len(tokens)):
        raise ModelError(
            f"{source}: has {len(tokens)} tokens but {len(kinds)} entries in tokenizer.ggml.token_type"
        )
    marked = [(t, int(k)) for t, k in zip(tokens, kinds, strict=False) if k in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=k == _CONTROL) for t, k in marked])


def _add_bos(tokenizer: Any, tokens: list[str], metadata: Mapping[str, Any], pre: str) -> None:
    """Put the BOS token before every text, where the file says so."""
    from tokenizers import processors

    bos = metadata.get("tokenizer.ggml.bos_token_id")
    wanted = metadata.get("tokenizer.ggml.add_bos_token", _SPLITS[pre] is _LLAMA3)
    if wanted and isinstance(bos, int) and 0 <= bos < len(tokens):
        template = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, template])


def _strings(metadata: Mapping[str, Any], key: str, source: Path) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values:
        raise ModelError(f"{source}: has no {key}, which its tokenizer needs")
    return values
