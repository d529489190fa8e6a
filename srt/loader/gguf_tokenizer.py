"""A tokenizer.json out of a GGUF file's vocabulary, made once and kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood.srt.errors import ModelError
from sapwood.srt.loader import gguf_bpe, gguf_spm
from sapwood.srt.loader.kept import kept, label_of
from sapwood.srt.loader.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, token_kinds, tokens_of

FORMAT = 2
"""Part of the cached file's name: raise it when the conversion changes."""

BUILDERS = {"gpt2": gguf_bpe, "llama": gguf_spm}
"""By `tokenizer.ggml.model`: byte-level BPE, and SentencePiece's BPE."""

_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


def write_tokenizer(metadata: Mapping[str, Any], source: Path, folder: Path) -> Path:
    """Make the tokenizer.json of the GGUF file `source` in `folder`, or find the one made before.

    It is known by the source's path, size and time of change. ModelError if the vocabulary's kind is not
    supported or its entries do not fit together.
    """
    return kept(folder, label_of(source, FORMAT), lambda: str(build(metadata, source).to_str()))


def build(metadata: Mapping[str, Any], source: Path) -> Any:
    """The `tokenizers.Tokenizer` that `tokenizer.ggml.*` describes; `source` is named in errors."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in BUILDERS:
        raise ModelError(
            f"{source}: the tokenizer kind {model!r} (tokenizer.ggml.model) is not supported; "
            "supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE)"
        )
    tokenizer = BUILDERS[model].build(metadata, source)
    _add_special(tokenizer, metadata, source)
    _add_ends(tokenizer, metadata, source)
    return tokenizer


def _add_special(tokenizer: Any, metadata: Mapping[str, Any], source: Path) -> None:
    """Control tokens, and those that users of the vocabulary defined: all are found in the text first."""
    from tokenizers import AddedToken

    # Phi-3's control tokens swallow the space after them; no metadata say so.
    strips = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    marked = []
    for token, kind in zip(tokens_of(metadata, source), token_kinds(metadata, source), strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token:
            special = kind != USER_DEFINED
            strip = strips and special and token not in _PHI3_PLAIN
            marked.append(AddedToken(token, normalized=False, special=special, rstrip=strip))
    tokenizer.add_tokens(marked)


def _add_ends(tokenizer: Any, metadata: Mapping[str, Any], source: Path) -> None:
    """Put the BOS token before every text, and the EOS token behind it, where the file says so."""
    from tokenizers import processors

    tokens = tokens_of(metadata, source)
    builder = BUILDERS[metadata["tokenizer.ggml.model"]]
    ends: dict[str, str] = {}
    for name, wanted in (("bos", builder.adds_bos(metadata)), ("eos", False)):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", wanted) and isinstance(number, int):
            if not 0 <= number < len(tokens):
                raise ModelError(f"{source}: tokenizer.ggml.{name}_token_id {number} is no token")
            ends[name] = tokens[number]
    if not ends:
        return
    before = f"{ends['bos']} " if "bos" in ends else ""
    after = f" {ends['eos']}" if "eos" in ends else ""
    template = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A $B{after}",
        special_tokens=[(text, tokens.index(text)) for text in set(ends.values())],
    )
    own = tokenizer.post_processor
    tokenizer.post_processor = processors.Sequence([own, template]) if own else template
