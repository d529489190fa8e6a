"""A chat's messages to token ids, each message by itself: what the chat template's text of the messages up to
it has more than that of the messages before it.

    render(m1)          <|im_start|>user\\nHi<|im_end|>\\n
    render(m1, m2)      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                         └───────────── m2's own ─────────────┘

Content that is token ids stands between the template's own as it is (see placing.py).

Where the template changes what came before (it drops old reasoning, say), or does not show the content as it
is, everything up to there is encoded anew as one text: the turn is `rewritten`. Where a template refuses to
end (after a lone system message, say), the tokens are taken together with the next message's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from sapwood.srt.errors import ErrorInfo, from_info
from sapwood.srt.messages import IdsPart, Spoken, pack, unpack
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.placing import Parts, Placed, Placer, Views, is_cut
from sapwood.srt.tokenizer.render_child import View
from sapwood.srt.tokenizer.turn_cache import Shown, Turn, TurnCache

BATCH = 64
"""Messages whose renderings share the time and the memory of one chat's."""

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Words(NamedTuple):
    """Between text and ids: `begin` encodes a marked text with which a prompt begins, `go_on` one that comes
    after a text ("": after other tokens); `mark` marks what in a value must not become special tokens; `say`
    gives the text of parts."""

    begin: Callable[[str], list[int]]
    go_on: Callable[[str, str], list[int]]
    mark: Callable[[Any], Any]
    say: Callable[[Parts], str]


class Turns:
    """The tokens of chats' messages, from any thread; beginnings that it knows are not rendered again.

    `leading` is the BOS token, which a prompt has only once, `ends` are the EOS ids, and `end` is the string
    of the one that the template knows.
    """

    def __init__(
        self,
        template: IsolatedTemplate,
        words: Words,
        leading: int | None,
        ends: frozenset[int],
        end: str = "",
    ) -> None:
        self._template = template
        self._words = words
        self._leading = leading
        self._ends = ends
        self._end = end
        self._put_last: str | None = None
        self._placer = Placer(lambda parts: words.mark(words.say(parts)), self._content)
        self._cache = TurnCache()

    def encode(
        self, chat: Sequence[Spoken], kwargs: dict[str, Any], led: bool, owner: object, namespace: str
    ) -> list[Turn]:
        """A Turn for each message; `led`: other tokens come before the first. `owner` is what can be told to
        stop (see IsolatedTemplate). What is known in one namespace is not in another, which could tell by the
        time that it takes. Raises BadRequest."""
        closed = len(chat) - 1 if chat[-1].open else len(chat)
        names = _names(chat[:closed], (namespace, kwargs, led))
        turns = self._cache.known(names)
        if len(turns) < len(chat):
            for views in self._views(chat, len(turns), kwargs, owner):
                turns.append(self._turn(chat, turns, views, led))
            self._cache.put(names, turns[:closed])
        if turns[-1].refusal is not None:
            raise from_info(turns[-1].refusal)
        return turns

    def _content(self, text: str) -> Any:
        (message,) = self._template.prepare([{"role": "", "content": text}])
        return message["content"]

    def _views(
        self, chat: Sequence[Spoken], first: int, kwargs: dict[str, Any], owner: object
    ) -> Iterator[Views]:
        """Those of the messages from number `first` on."""
        words = self._words
        said = [{"role": one.role, "content": words.say(one.content)} for one in chat]
        messages, kwargs = self._template.prepare(words.mark(said)), words.mark(kwargs)
        for begin in range(first, len(chat), BATCH):
            end = min(begin + BATCH, len(chat))
            wanted = [self._placer.wanted(chat, index) for index in range(begin, end)]
            asked = [view for views in wanted for view in views if view is not None]
            texts = self._template.views(messages[:end], kwargs, asked, owner)
            last = self._last(owner)
            for views in wanted:
                found = (None if view is None else next(texts) for view in views)
                yield Views(*(text.removesuffix(last) if isinstance(text, str) else text for text in found))

    def _last(self, owner: object) -> str:
        """An EOS token that the template puts after a chat only as long as that does not go on."""
        if self._put_last is None:
            chat = self._template.prepare([{"role": "user", "content": self._words.mark("Hi")}])
            views = [View(1), View(1, add_generation_prompt=True)]
            whole, prompt = self._template.views(chat, {}, views, owner)
            self._put_last = ""
            if isinstance(whole, str) and isinstance(prompt, str) and not prompt.startswith(whole):
                stays = whole.removesuffix(self._end)
                self._put_last = self._end if stays != whole and prompt.startswith(stays) else ""
        return self._put_last

    def _turn(self, chat: Sequence[Spoken], turns: Sequence[Turn], views: Views, led: bool) -> Turn:
        """The next message's, after those of the ones before it."""
        one = chat[len(turns)]
        placed = self._placer.place(one, views)
        if isinstance(placed, ErrorInfo):
            return Turn(refusal=placed)
        since = next((i for i in range(len(turns), 0, -1) if turns[i - 1].shown is not None), 0)
        base = turns[since - 1].shown if since else None
        start = 0 if base is None else base.size
        rewritten = (
            placed is None
            or not (base is None or base.begins(placed.before))
            or any(is_cut(other.content) for other in chat[since : len(turns)])
        )
        if rewritten:
            placed, start = placed if one.open else None, 0
        placed = placed or Placed(views.whole, (), "")
        ids = self._ids(placed, start, led)
        return Turn(pack(ids), rewritten, None if one.open else Shown.of(views.whole))

    def _ids(self, placed: Placed, start: int, led: bool) -> list[int]:
        """Of the text from `start` on. Each part of the content has tokens of its own, but that the texts
        around it join the texts with which it begins and ends."""
        prior, pending = placed.before[:start], placed.before[start:]
        ids: list[int] = []
        for i, part in enumerate(placed.parts):
            if i or isinstance(part, IdsPart):
                ids += self._text(prior, pending, ids, led)
                pending = ""
            if isinstance(part, IdsPart):
                ids += unpack(part.ids).tolist()
            else:
                pending += self._words.mark(part.text)
        drawn = bool(placed.parts) and isinstance(placed.parts[-1], IdsPart)
        rest = self._text(prior, pending + placed.after, ids, led)
        # The model has ended its message as the template ends it.
        ended = drawn and bool(ids) and rest[:1] == ids[-1:] and ids[-1] in self._ends
        return ids + rest[1:] if ended else ids + rest

    def _text(self, prior: str, text: str, before: list[int], led: bool) -> list[int]:
        """The ids of a text after the ids `before`, which come after the text `prior`."""
        if not text:
            return []
        if before or prior:
            return self._words.go_on("" if before else prior, text)
        ids = self._words.go_on("", text) if led else self._words.begin(text)
        return ids[1:] if led and ids[:1] == [self._leading] else ids


def _names(chat: Sequence[Spoken], seed: object) -> list[bytes]:
    """One for each beginning of the chat, made of all that is in it."""
    names, name = [], _encoder.encode(seed)
    for one in chat:
        name = hashlib.blake2b(name + _encoder.encode(one)).digest()
        names.append(name)
    return names
