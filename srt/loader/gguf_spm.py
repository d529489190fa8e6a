"""SentencePiece BPE vocabularies of GGUF files (`tokenizer.ggml.model` "llama").

SentencePiece joins, of all neighbours whose union is a token, those with the best score, the leftmost first.
That is a BPE whose merges are ranked by the score of what they make: each way to cut a token into two tokens
is a merge. It differs in one thing: of two overlapping ways to the same token SentencePiece takes the left
one, a ranked list the one that stands first in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.vocabulary import BYTE, NORMAL, UNKNOWN, UNUSED, numbers, token_kinds, tokens_of

SPACE = "\u2581"
"""What stands for a space in a token."""


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with BOS where the file does not say."""
    return True


def build(metadata: Mapping[str, Any], source: Path) -> Any:
    """The `tokenizers.Tokenizer`, still without its special tokens; `source` is named in errors."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, kinds = tokens_of(metadata, source), token_kinds(metadata, source)
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    number = metadata.get("tokenizer.ggml.unknown_token_id")
    if isinstance(number, int) and 0 <= number < len(tokens):
        unknown = tokens[number]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_of(metadata, source),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    # The prefix comes before every stretch of text, those after special tokens too.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return tokenizer


def merges_of(metadata: Mapping[str, Any], source: Path) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, in the order in which SentencePiece would join them.

    Control tokens, bytes and what users of the vocabulary defined neither join nor arise.
    """
    tokens, kinds = tokens_of(metadata, source), token_kinds(metadata, source)
    scores = numbers(metadata, "tokenizer.ggml.scores", len(tokens), source)
    if scores is None:
        raise ModelError(f"{source}: has no tokenizer.ggml.scores, which its tokenizer needs")
    if any(math.isnan(score) for score in scores):
        raise ModelError(f"{source}: tokenizer.ggml.scores hold a value that is no number")
    plain = [i for i, kind in enumerate(kinds) if kind in (NORMAL, UNUSED)]
    known = {tokens[i] for i in plain}
    plain.sort(key=lambda i: -scores[i])  # a stable sort: of equal ones the lower id first
    merges = []
    for i in plain:
        token = tokens[i]
        merges += [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in known and token[cut:] in known
        ]
    return merges
