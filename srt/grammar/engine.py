"""The engine behind constraints, llguidance: everything that is asked of it goes through here.

A compiled grammar is its own text: the engine builds its automata as far as they are walked. So what is sent
from process to process is text, and what was compiled in one can be compiled in any other as fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from sapwood.srt.errors import BadRequest

Masks = npt.NDArray[np.int32]
"""One a line: token i is bit i % 32 of word i / 32."""

ITEMS_IN_ROW = 420
"""Parser items after one terminal. To accept a token may take their square: at 420 up to 30 ms, at the
engine's own 2,000 half a second. As many optional properties as schemas may have make 403, at 0.5 ms; places
of 200 schemas from the wild have 147 at most."""
ITEMS_IN_MASK = 20_000
FUEL_IN_MASK = 200_000
"""Of the lexer. Both bound one mask to about 20 ms: ordinary ones take 3 to 300 us."""
LEXER_STATES = 32_000
"""Of all copies of a matcher together, up to 1 KiB each. Schemas from the wild need less than 4,000."""
FUEL_AT_FIRST = 1_000_000
"""Of the lexer before the first mask, and for each of its patterns: 20 ms."""
SYMBOLS = 500_000

_TOO_MUCH = {
    "too many expressions constructed": f"one token takes more than {FUEL_IN_MASK} steps of its patterns",
    "too many states": f"its patterns lead to more than {LEXER_STATES} states",
    "fuel exhausted": f"to see what its patterns can match takes more than {FUEL_AT_FIRST} steps",
    "initial lexer configuration": f"to read its patterns takes more than {FUEL_AT_FIRST} steps",
    "grammar size": f"it has more than {SYMBOLS} symbols",
    "too many items (limit": f"one token takes more than {ITEMS_IN_MASK} parser items",
    "items; max is": f"one place of it takes more than {ITEMS_IN_ROW} parser items",
}
"""What the engine's own words (a part of them) for its limits mean."""


def _told(error: str) -> str:
    """An error of the engine as a client is told it."""
    found = next((ours for theirs, ours in _TOO_MUCH.items() if theirs in error.lower()), None)
    return error if found is None else f"it is too complex: {found}"


class Engine:
    """Compiles grammars for one tokenizer (a tokenizer.json), whose output ends with one of `eos_ids`."""

    def __init__(self, tokenizer_file: str, vocab_size: int, eos_ids: list[int]) -> None:
        text = Path(tokenizer_file).read_text(encoding="utf-8")
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids)
        self.eos_ids = tuple(eos_ids)
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=FUEL_AT_FIRST,
            max_grammar_size=SYMBOLS,
            max_items_in_row=ITEMS_IN_ROW,
            step_max_items=ITEMS_IN_MASK,
            step_lexer_fuel=FUEL_IN_MASK,
            max_lexer_states=LEXER_STATES,
            verbose_errors=False,
        )

    @property
    def mask_words(self) -> int:
        """32-bit words in a mask of the vocabulary."""
        return (int(self._tokenizer.vocab_size) + 31) // 32

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.tokenize_str(text)
        return ids

    def special(self, text: str) -> int | None:
        """The special token that is written so; None if there is none, and it is ordinary text, or an end."""
        pieces = self.pieces(text)
        return pieces[0][1] if len(pieces) == 1 else None

    def compile(self, text: str) -> Matcher:
        """A matcher at the beginning of the grammar. Raises BadRequest if the text is none, or too much."""
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BadRequest(f"the constraint cannot be compiled: {Matcher(matcher).error[:500]}")
        return Matcher(matcher)

    def pieces(self, text: str) -> list[tuple[str, int | None]]:
        """A text cut at what special tokens but the ends are written as, with the token of such a piece."""
        found: list[tuple[str, int | None]] = []
        for token in self._tokenizer.tokenize_str(text, parse_special=True):
            special = self._tokenizer.is_special_token(token) and token not in self.eos_ids
            name = self._tokenizer.decode_str([token]) if special else ""
            before, there, after = text.partition(name) if name else (text, "", "")
            if there:
                found += [(before, None)] if before else []
                found.append((name, token))
                text = after
        return found + ([(text, None)] if text else [])

    def admits(self, text: str) -> bool:
        """Whether a grammar has any text, the empty one included. Raises BadRequest as `compile` does."""
        matcher = self.compile(text)
        return self.goes_on(matcher) or matcher.complete

    def goes_on(self, matcher: Matcher) -> bool:
        """Whether any token but the end may come next. Raises BadRequest if the engine cannot tell."""
        mask = np.zeros(self.mask_words, dtype=np.int32)
        matcher.fill(mask.ctypes.data, mask.nbytes)
        if matcher.error and not matcher.dead_end:
            raise BadRequest(f"the constraint cannot be followed: {matcher.error}")
        for token in self.eos_ids:  # a grammar without any text allows the end alone, without being complete
            mask.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        return not matcher.dead_end and bool(mask.any())


class Matcher:
    """A place in a grammar. One that has failed stays so: `error` says why, and its masks mean nothing.

    It fails where the grammar asks for too much in one step, or where no token can follow (`dead_end`).
    Copies share their automata, and the bounds of these: one may fail of what others have walked, as it
    would not in a grammar compiled anew.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._matcher.deep_copy())

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        return _told(str(self._matcher.get_error()).removesuffix("<non-verbose/>").strip())

    @property
    def dead_end(self) -> bool:
        """Whether it has failed because no token of the vocabulary can follow."""
        return self.error.startswith("NoExtension")

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end, which alone masks allow. So it is when it has failed."""
        return bool(self._matcher.is_stopped())

    def fill(self, address: int, size: int) -> None:
        """Write the mask of the tokens allowed next (`size` bytes) to `address`; lets other threads run."""
        self._matcher.unsafe_compute_mask_ptr(address, size)

    def accept(self, ids: list[int]) -> int:
        """Go on by those of the ids that are allowed, up to the first that is not; how many they were."""
        return int(self._matcher.try_consume_tokens(ids))

    def forced(self) -> list[int]:
        """The tokens that must come next: the canonical ones of what the grammar leaves no choice of."""
        ids: list[int] = self._matcher.compute_ff_tokens()
        return ids


class Filler:
    """Fills masks in up to `threads` threads at a time, while others run."""

    def __init__(self, threads: int) -> None:
        self._executor = llguidance.LLExecutor(threads)

    def fill(self, wanted: list[tuple[Matcher, int, list[int]]], masks: Masks) -> None:
        """For each (matcher, line, drafts) its mask goes to that line of `masks`, and to the lines after it
        the masks after each draft, up to the first that is not allowed. The matchers stay where they are."""
        lines, words = masks.shape
        for _matcher, line, drafts in wanted:
            if line < 0 or line + len(drafts) >= lines:  # the engine would write there
                raise IndexError(f"line {line} and {len(drafts)} more are not among {lines}")
        address, size = masks.ctypes.data, words * masks.itemsize
        plain = [(m._matcher, line) for m, line, drafts in wanted if not drafts]
        ahead = [(m._matcher, line, drafts) for m, line, drafts in wanted if drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, size, lines)
        if ahead:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(ahead, address, size, lines)
