"""Prompts in parts: text, token ids and messages, each with tokens of its own.

The ids of [A, B] begin with those of [A]: a part is never joined with its neighbour, so that all that begin
alike share what is cached. Text at the beginning gets the BOS token, as a bare text does; any other goes on
(see continuation.py). A special token's string in a text is text, whatever --split-special-tokens says of
chats: who means the token says `special`. Messages are the chat template's (see turns.py).
"""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from sapwood.srt.config import ModelSource
from sapwood.srt.errors import BadRequest, require_unicode
from sapwood.srt.messages import Ids, IdsPart, PartsPrompt, Spoken, TextPart, pack, unpack
from sapwood.srt.tokenizer.continuation import Continuation
from sapwood.srt.tokenizer.isolation import IsolatedTemplate, Work
from sapwood.srt.tokenizer.placing import Parts
from sapwood.srt.tokenizer.specials import SpecialStrings, encode
from sapwood.srt.tokenizer.turn_cache import Turn
from sapwood.srt.tokenizer.turns import Turns, Words
from sapwood.srt.tokenizer.vocabulary import Vocabulary

FIELD = "input"


class Encoded(NamedTuple):
    """A prompt's ids. Of one in parts `lengths` are the numbers of each part's tokens, and `rewritten` the
    messages, by their number among them, at which the template changed what came before: the tokens of all
    messages up to there are counted with that one."""

    ids: Ids
    rewritten: Sequence[int] = ()
    lengths: Sequence[int] = ()


class PartsEncoder:
    """PartsPrompts to ids, from any thread. Without a template there are no messages."""

    def __init__(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        specials: SpecialStrings,
        template: IsolatedTemplate | None,
    ) -> None:
        self._model = source.name
        self._tokenizer = tokenizer
        self._specials = specials
        self._go_on = Continuation(specials.encode)
        self._go_on_special = Continuation(lambda text: encode(tokenizer, text))
        self._opening = self._put_before()
        self._vocabulary = Vocabulary(tokenizer)
        self._ends = frozenset(source.eos_ids)
        self._turns: Turns | None = None
        if template is not None:
            words = Words(specials.encode, self._after, specials.ending, specials.mark, self._say)
            leading = tokenizer.token_to_id(source.template_vars.get("bos_token", ""))
            end = source.template_vars.get("eos_token", "")
            self._turns = Turns(template, words, leading, self._ends, end)

    def encode(self, prompt: PartsPrompt, namespace: str = "") -> Encoded:
        """The ids, which may be none; raises BadRequest. The prompt is what can be told to stop."""
        parts = [*map(_checked, prompt.parts)]
        if any(isinstance(part, Spoken) and part.open for part in parts[:-1]):
            raise BadRequest("an open message must be the last part of input", param=FIELD)
        with contextlib.nullcontext() if self._turns is None else self._turns.work(prompt) as work:
            pieces: list[Ids] = []
            first = True
            for part in parts:
                if isinstance(part, Spoken):
                    first = False
                    pieces.append(b"")
                    continue
                if work is not None:
                    work.check()
                pieces.append(pack(self._raw(part, first)))
                first = first and not pieces[-1]
            rewritten = self._speak(prompt, namespace, parts, pieces, work)
        return Encoded(b"".join(pieces), rewritten, [len(piece) // 4 for piece in pieces])

    def _speak(
        self,
        prompt: PartsPrompt,
        namespace: str,
        parts: Sequence[TextPart | IdsPart | Spoken],
        pieces: list[Ids],
        work: Work | None,
    ) -> list[int]:
        """Put the messages' ids into `pieces`, which has those of the other parts; which are rewritten."""
        numbers = [i for i, part in enumerate(parts) if isinstance(part, Spoken)]
        if not numbers:
            return []
        if self._turns is None or work is None:
            raise BadRequest(f"model {self._model} has no chat template; send no messages", param=FIELD)
        chat = [part for part in parts if isinstance(part, Spoken)]
        led = any(pieces[: numbers[0]])
        turns = self._turns.encode(chat, prompt.template_kwargs, led, work, namespace)
        _check_order(turns, numbers, [i for i, piece in enumerate(pieces) if piece])
        rewritten = [number for number, turn in enumerate(turns) if turn.rewritten]
        for number in range(rewritten[-1] if rewritten else 0, len(turns)):
            ids = turns[number].ids
            assert ids is not None
            pieces[numbers[number]] = ids
        return rewritten

    def _raw(self, part: TextPart | IdsPart, first: bool) -> list[int]:
        if isinstance(part, IdsPart):
            ids: list[int] = unpack(part.ids).tolist()
            return ids
        if not part.special:
            marked = self._specials.mark(part.text)
            return self._opening + self._specials.encode(marked) if first else self._go_on(marked)
        if not first:
            return self._go_on_special(part.text)
        ids = encode(self._tokenizer, part.text)
        return ids if ids[: len(self._opening)] == self._opening else self._opening + ids

    def _after(self, before: str, text: str) -> list[int]:
        """The ids of a chat's text after what comes before it. After a special token a tokenizer may put a
        space before a word, as it does where a text begins: what a chat's ids are is as it says."""
        ending = self._specials.ending(before)
        if not ending:
            return self._go_on(text)
        known, ids = self._specials.encode(ending), self._specials.encode(ending + text)
        return ids[len(known) :] if ids[: len(known)] == known else self._go_on(text)

    def _put_before(self) -> list[int]:
        """What the tokenizer puts before a text: a BOS token, or nothing."""
        bare, whole = encode(self._tokenizer, "a"), encode(self._tokenizer, "a", add_special_tokens=True)
        for begin in range(len(whole) - len(bare) + 1):
            if whole[begin : begin + len(bare)] == bare:
                return whole[:begin]
        return []

    def _say(self, parts: Parts) -> str:
        """Without an end that was drawn: the template puts its own after what is said."""
        said = []
        for i, part in enumerate(parts):
            if isinstance(part, TextPart):
                said.append(part.text.encode())
                continue
            ids = unpack(part.ids).tolist()
            while i == len(parts) - 1 and ids and ids[-1] in self._ends:
                ids.pop()
            said += [self._vocabulary.describe(token)[1] for token in ids]
        return b"".join(said).decode(errors="replace")


def _check_order(turns: Sequence[Turn], numbers: Sequence[int], raw: Sequence[int]) -> None:
    """Refuse what would move. Messages are the parts with these `numbers`, `raw` are those that are none and
    have tokens, which stay where they are: none may be among messages whose tokens are one message's."""
    waits: int | None = None
    for number, turn in zip(numbers, turns, strict=True):
        waits = number if waits is None else waits
        if turn.refusal is not None:
            continue
        among = bisect(raw, numbers[0] if turn.rewritten else waits)
        if among < len(raw) and raw[among] < number:
            raise BadRequest(
                f"input[{number}]: the chat template changes what came before this message, and there is"
                f" input[{raw[among]}], which is no message, among that; send it in a message",
                param=f"input[{number}]",
            )
        waits = None


def _checked(part: TextPart | IdsPart | Spoken) -> TextPart | IdsPart | Spoken:
    """The part, without what is empty in it. Raises BadRequest if it cannot be encoded."""
    if isinstance(part, Spoken):
        content = [_checked(piece) for piece in part.content if piece not in (TextPart(""), IdsPart(b""))]
        return Spoken(require_unicode(part.role, FIELD), content, part.open)  # type: ignore[arg-type]
    if isinstance(part, IdsPart):
        if len(part.ids) % 4:
            raise BadRequest("input holds what is not a list of token ids", param=FIELD)
        return part
    return TextPart(require_unicode(part.text, FIELD), part.special)
