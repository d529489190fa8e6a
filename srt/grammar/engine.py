"""The engine behind constraints, llguidance: everything that is asked of it goes through here.

A compiled grammar is its own text: the engine builds its automata as far as they are walked. So what is sent
from process to process is text, and what was compiled in one can be compiled in any other as fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance

from sapwood.srt.errors import BadRequest


class Engine:
    """Compiles grammars for one tokenizer (a tokenizer.json), whose output ends with one of `eos_ids`."""

    def __init__(self, tokenizer_file: str, vocab_size: int, eos_ids: list[int]) -> None:
        text = Path(tokenizer_file).read_text()
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids)

    @property
    def mask_words(self) -> int:
        """32-bit words in a mask of the vocabulary: token i is bit i % 32 of word i / 32."""
        return (int(self._tokenizer.vocab_size) + 31) // 32

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.tokenize_str(text)
        return ids

    def compile(self, text: str) -> Matcher:
        """A matcher at the beginning of the grammar. Raises BadRequest if the text is none, or too much."""
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise BadRequest(f"the constraint cannot be compiled: {matcher.get_error().strip()[:500]}")
        return Matcher(matcher)


class Matcher:
    """A place in a grammar. One that has failed stays so: `error` says why, and it allows nothing."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._matcher.deep_copy())

    @property
    def error(self) -> str:
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._matcher.is_stopped())

    def fill(self, address: int, size: int) -> None:
        """Write the mask of the tokens allowed next (`size` bytes) to `address`; lets other threads run."""
        self._matcher.unsafe_compute_mask_ptr(address, size)

    def accept(self, ids: list[int]) -> int:
        """Go on by those of the ids that are allowed, up to the first that is not; how many they were."""
        return int(self._matcher.try_consume_tokens(ids))

    def rollback(self, count: int) -> None:
        """Go back by so many ids."""
        self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """The tokens that must come next: the canonical ones of what the grammar leaves no choice of."""
        ids: list[int] = self._matcher.compute_ff_tokens()
        return ids
