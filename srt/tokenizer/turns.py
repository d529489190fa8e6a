"""A chat's messages to token ids, each message by itself: what the chat template's text of the messages up to
it has more than that of the messages before it.

    render(m1)          <|im_start|>user\\nHi<|im_end|>\\n
    render(m1, m2)      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                         └───────────── m2's own ─────────────┘

Content that is token ids stands between the template's own as it is (see placing.py).

Where the template changes what came before (it drops old reasoning, say), or does not show the content as it
is, everything up to there is encoded anew as one text: the turn is `rewritten`. Where a template refuses to
end (after a lone system message, say), the tokens are taken together with the next message's.

Of messages that are all rewritten only the last one's text is encoded: the others' tokens are in it.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec

from sapwood.srt.errors import ErrorInfo, from_info
from sapwood.srt.messages import IdsPart, Spoken, pack, unpack
from sapwood.srt.tokenizer.isolation import IsolatedTemplate, Work
from sapwood.srt.tokenizer.placing import Parts, Placed, Placer, Views, is_cut
from sapwood.srt.tokenizer.render_child import View
from sapwood.srt.tokenizer.turn_cache import Trail, Turn, TurnCache

BATCH = 64
"""Messages whose renderings share the time and the memory of one chat's."""

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Words(NamedTuple):
    """Between text and ids: `begin` encodes a marked text with which a prompt begins, `go_on` one that comes
    after a text with this `ending` ("": after other tokens); `mark` marks what in a value must not become
    special tokens; `say` gives the text of parts."""

    begin: Callable[[str], list[int]]
    go_on: Callable[[str, str], list[int]]
    ending: Callable[[str], str]
    mark: Callable[[Any], Any]
    say: Callable[[Parts], str]


class _Draft(NamedTuple):
    """Text of which a message's tokens are made, and what comes before it: nothing if it `begins` the chat,
    else a text with this `ending`."""

    begins: bool
    ending: str
    text: Placed


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

    def work(self, owner: object) -> AbstractContextManager[Work]:
        """What `encode` needs; see IsolatedTemplate."""
        return self._template.work(owner)

    def encode(
        self, chat: Sequence[Spoken], kwargs: dict[str, Any], led: bool, work: Work, namespace: str
    ) -> list[Turn]:
        """A Turn for each message, all from the last rewritten one on with their tokens; `led`: other tokens
        come before the first. What is known in one namespace is not in another, which could tell by the time
        that it takes. Raises BadRequest."""
        names = self._names(chat, (namespace, kwargs, led))
        turns = _useful(self._cache.known(names))
        self._go_on(chat, turns, names, kwargs, led, work)
        if len(_useful(turns)) < len(turns):  # the template has made another text of the same messages
            turns = []
            self._go_on(chat, turns, names, kwargs, led, work)
        if turns[-1].refusal is not None:
            raise from_info(turns[-1].refusal)
        return turns

    def _names(self, chat: Sequence[Spoken], seed: object) -> list[bytes]:
        """By which the turns are known; none if the template makes another text at another time."""
        changes = self._template.changes
        if changes == "always":
            return []
        day = datetime.date.today().isoformat() if changes == "daily" else ""
        return _names([one for one in chat if not one.open], (seed, day))

    def _go_on(
        self,
        chat: Sequence[Spoken],
        turns: list[Turn],
        names: Sequence[bytes],
        kwargs: dict[str, Any],
        led: bool,
        work: Work,
    ) -> None:
        """Add the turns that are missing. What was found is kept after each batch, whatever comes then."""
        trail = Trail(next((turn.shown for turn in reversed(turns) if turn.shown is not None), None))
        drafts: dict[int, _Draft] = {}
        for begin in range(len(turns), len(chat), BATCH):
            for views in self._views(chat, begin, kwargs, work):
                turn, draft = self._turn(chat, turns, views, trail)
                if turn.rewritten:
                    drafts.clear()
                if draft is not None:
                    drafts[len(turns)] = draft
                turns.append(turn)
            for i in [*drafts]:
                # All of a chat is encoded but once, when no more can be rewritten.
                if not turns[i].rewritten or len(turns) == len(chat):
                    turns[i] = turns[i]._replace(ids=pack(self._ids(drafts.pop(i), led, work)))
            self._cache.put(names, turns)

    def _content(self, text: str) -> Any:
        (message,) = self._template.prepare([{"role": "", "content": text}])
        return message["content"]

    def _views(
        self, chat: Sequence[Spoken], begin: int, kwargs: dict[str, Any], work: Work
    ) -> Iterator[Views]:
        """Those of the messages from number `begin` on, as many as there are in a batch."""
        words = self._words
        end = min(begin + BATCH, len(chat))
        said = [{"role": one.role, "content": words.say(one.content)} for one in chat[:end]]
        messages, kwargs = self._template.prepare(words.mark(said)), words.mark(kwargs)
        wanted = [self._placer.wanted(chat, index) for index in range(begin, end)]
        asked = [view for views in wanted for view in views if view is not None]
        texts = self._template.views(messages, kwargs, asked, work)
        last = self._last(work)
        for views in wanted:
            found = (None if view is None else next(texts) for view in views)
            yield Views(*(text.removesuffix(last) if isinstance(text, str) else text for text in found))

    def _last(self, work: Work) -> str:
        """An EOS token that the template puts after a chat only as long as that does not go on."""
        if self._put_last is None:
            chat = self._template.prepare([{"role": "user", "content": self._words.mark("Hi")}])
            views = [View(1), View(1, add_generation_prompt=True)]
            whole, prompt = self._template.views(chat, {}, views, work)
            self._put_last = ""
            if isinstance(whole, str) and isinstance(prompt, str) and not prompt.startswith(whole):
                stays = whole.removesuffix(self._end)
                self._put_last = self._end if stays != whole and prompt.startswith(stays) else ""
        return self._put_last

    def _turn(
        self, chat: Sequence[Spoken], turns: Sequence[Turn], views: Views, trail: Trail
    ) -> tuple[Turn, _Draft | None]:
        """The next message's, after those of the ones before it, and what its tokens are made of."""
        one = chat[len(turns)]
        placed = self._placer.place(one, views)
        if isinstance(placed, ErrorInfo):
            return Turn(refusal=placed), None
        since = next((i for i in range(len(turns), 0, -1) if turns[i - 1].shown is not None), 0)
        rewritten = (
            placed is None
            or not trail.begins(placed.before)
            or any(is_cut(other.content) for other in chat[since : len(turns)])
        )
        before = "" if rewritten else trail.text
        if placed is None or (rewritten and not one.open):
            placed = Placed(views.whole, (), "")
        new = placed._replace(before=placed.before[len(before) :])
        shown = None if one.open else trail.reach(views.whole)
        return Turn(None, rewritten, shown), _Draft(not before, self._words.ending(before), new)

    def _ids(self, draft: _Draft, led: bool, work: Work) -> list[int]:
        """Each part of the content has tokens of its own, but that the texts around it join the texts with
        which it begins and ends."""
        placed, pending = draft.text, draft.text.before
        ids: list[int] = []
        for i, part in enumerate(placed.parts):
            if i or isinstance(part, IdsPart):
                ids += self._text(draft, pending, ids, led, work)
                pending = ""
            if isinstance(part, IdsPart):
                ids += unpack(part.ids).tolist()
            else:
                pending += self._words.mark(part.text)
        drawn = bool(placed.parts) and isinstance(placed.parts[-1], IdsPart)
        rest = self._text(draft, pending + placed.after, ids, led, work)
        # The model has ended its message as the template ends it.
        ended = drawn and bool(ids) and rest[:1] == ids[-1:] and ids[-1] in self._ends
        return ids + rest[1:] if ended else ids + rest

    def _text(self, draft: _Draft, text: str, before: list[int], led: bool, work: Work) -> list[int]:
        """The ids of a text after the ids `before` of its draft."""
        if not text:
            return []
        work.check()
        if before or not draft.begins:
            return self._words.go_on("" if before else draft.ending, text)
        ids = self._words.go_on("", text) if led else self._words.begin(text)
        return ids[1:] if led and ids[:1] == [self._leading] else ids


def _useful(turns: list[Turn]) -> list[Turn]:
    """Those before the first whose tokens are missing: they count from the last rewritten turn on."""
    since = max((i for i, turn in enumerate(turns) if turn.rewritten), default=0)
    return turns[: next((i for i in range(since, len(turns)) if turns[i].ids is None), len(turns))]


def _names(chat: Sequence[Spoken], seed: object) -> list[bytes]:
    """One for each beginning of the chat, made of all that is in it."""
    names, name = [], _encoder.encode(seed)
    for one in chat:
        name = hashlib.blake2b(name + _encoder.encode(one)).digest()
        names.append(name)
    return names
