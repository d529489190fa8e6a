"""Prompts in parts: text, token ids and messages, each with tokens of its own.

The ids of [A, B] begin with those of [A]: a part is never joined with its neighbour, so that all that begin
alike share what is cached. Text at the beginning gets the BOS token, as a bare text does; any other goes on
(see continuation.py). A special token's string in a text is text, whatever --split-special-tokens says of
chats: who means the token says `special`. Messages are the chat template's (see turns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from sapwood.srt.config import ModelSource
from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import Ids, IdsPart, PartsPrompt, Spoken, TextPart, pack, unpack
from sapwood.srt.tokenizer.continuation import Continuation
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.placing import Parts
from sapwood.srt.tokenizer.specials import SpecialStrings
from sapwood.srt.tokenizer.templates import lone_surrogate
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
        self._go_on_special = Continuation(self._plain)
        self._opening = self._put_before()
        self._vocabulary = Vocabulary(tokenizer)
        self._turns: Turns | None = None
        if template is not None:
            words = Words(specials.encode, self._after, specials.mark, self._say)
            leading = tokenizer.token_to_id(source.template_vars.get("bos_token", ""))
            end = source.template_vars.get("eos_token", "")
            self._turns = Turns(template, words, leading, frozenset(source.eos_ids), end)

    def encode(self, prompt: PartsPrompt, namespace: str = "") -> Encoded:
        """The ids, which may be none; raises BadRequest. The prompt is what can be told to stop."""
        parts = [*map(_checked, prompt.parts)]
        if any(isinstance(part, Spoken) and part.open for part in parts[:-1]):
            raise BadRequest("an open message must be the last part of input", param=FIELD)
        pieces: list[Ids] = []
        numbers = [i for i, part in enumerate(parts) if isinstance(part, Spoken)]
        for part in parts:
            begins = not numbers or len(pieces) < numbers[0]
            first = begins and not any(pieces)
            pieces.append(b"" if isinstance(part, Spoken) else pack(self._raw(part, first)))
        rewritten = self._speak(prompt, namespace, parts, numbers, pieces) if numbers else []
        return Encoded(b"".join(pieces), rewritten, [len(piece) // 4 for piece in pieces])

    def _speak(
        self,
        prompt: PartsPrompt,
        namespace: str,
        parts: Sequence[TextPart | IdsPart | Spoken],
        numbers: Sequence[int],
        pieces: list[Ids],
    ) -> list[int]:
        """Put the messages' ids, which are the `parts` with these numbers, into `pieces`."""
        if self._turns is None:
            raise BadRequest(f"model {self._model} has no chat template; send no messages", param=FIELD)
        chat = [part for part in parts if isinstance(part, Spoken)]
        led = any(pieces[: numbers[0]])
        turns = self._turns.encode(chat, prompt.template_kwargs, led, prompt, namespace)
        rewritten = [number for number, turn in enumerate(turns) if turn.rewritten]
        for number, turn in zip(numbers, turns, strict=True):
            if turn.rewritten:
                among = [i for i in range(numbers[0], number) if i not in numbers and pieces[i]]
                if among:
                    raise BadRequest(
                        f"input[{number}]: the chat template changes what came before this message, and there"
                        f" is input[{among[0]}], which is no message, among that; send it in a message",
                        param=f"input[{number}]",
                    )
                pieces[numbers[0] : number] = [b""] * (number - numbers[0])
            pieces[number] = turn.ids
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
        ids = self._plain(part.text)
        return ids if ids[: len(self._opening)] == self._opening else self._opening + ids

    def _after(self, before: str, text: str) -> list[int]:
        """The ids of a chat's text after what comes before it. After a special token a tokenizer may put a
        space before a word, as it does where a text begins: what a chat's ids are is as it says."""
        ending = self._specials.ending(before)
        if not ending:
            return self._go_on(text)
        known, ids = self._specials.encode(ending), self._specials.encode(ending + text)
        return ids[len(known) :] if ids[: len(known)] == known else self._go_on(text)

    def _plain(self, text: str, add_special_tokens: bool = False) -> list[int]:
        # The batch call is the one that lets other threads run meanwhile.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        return ids

    def _put_before(self) -> list[int]:
        """What the tokenizer puts before a text: a BOS token, or nothing."""
        bare, whole = self._plain("a"), self._plain("a", add_special_tokens=True)
        for begin in range(len(whole) - len(bare) + 1):
            if whole[begin : begin + len(bare)] == bare:
                return whole[:begin]
        return []

    def _say(self, parts: Parts) -> str:
        said = b"".join(
            part.text.encode() if isinstance(part, TextPart) else self._bytes(part.ids) for part in parts
        )
        return said.decode(errors="replace")

    def _bytes(self, ids: Ids) -> bytes:
        return b"".join(self._vocabulary.describe(token)[1] for token in unpack(ids).tolist())


def _checked(part: TextPart | IdsPart | Spoken) -> TextPart | IdsPart | Spoken:
    """The part, without what is empty in it. Raises BadRequest if it cannot be encoded."""
    if isinstance(part, Spoken):
        content = [_checked(piece) for piece in part.content if piece not in (TextPart(""), IdsPart(b""))]
        return Spoken(_text(part.role), content, part.open)  # type: ignore[arg-type]
    if isinstance(part, IdsPart):
        if len(part.ids) % 4:
            raise BadRequest("input holds what is not a list of token ids", param=FIELD)
        return part
    return TextPart(_text(part.text), part.special)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise lone_surrogate(e, FIELD) from None
    return text
