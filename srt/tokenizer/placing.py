"""Where a message's content is in the text that the chat template makes of a chat.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
    └────────────────── before ──────────────────────────┘      └─ after ──┘

Nothing is guessed: a stand-in that no client knows is rendered in the content's place too, and the text must
be what stands before it, the content, and what stands after it. Before an assistant's content is the
generation prompt, after which the model has drawn its tokens. If the template trims contents, so are the
texts at a content's ends, but for the first one of an assistant's, which may have been gone on with already.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sapwood.srt.errors import BadRequest, ErrorInfo
from sapwood.srt.messages import IdsPart, Spoken, TextPart
from sapwood.srt.tokenizer.render_child import View

Parts = Sequence[TextPart | IdsPart]
Text = str | ErrorInfo
"""A rendering, or the template's refusal."""


class Views(NamedTuple):
    """The renderings that a message needs, or what asks for them: of the generation prompt after the messages
    before it, with the stand-in for its content, and of the message itself."""

    prompt: Any = None
    stand_in: Any = None
    whole: Any = None


class Placed(NamedTuple):
    """A content, and all of the text before and after it."""

    before: str
    parts: Parts
    after: str


class Placer:
    """Finds contents. `say` gives the text of parts as it stands in renderings, `prepare` the shape that the
    template wants contents in."""

    def __init__(self, say: Callable[[Parts], str], prepare: Callable[[str], Any]) -> None:
        self._say = say
        self._stand_in = f"~{secrets.randbelow(10**18)}~"
        self._instead = prepare(self._stand_in)

    def wanted(self, chat: Sequence[Spoken], index: int) -> Views:
        """The View that each rendering is of; None for one that is not needed."""
        one = chat[index]
        if not (one.open or is_cut(one.content)):
            return Views(whole=View(index + 1))
        if _goes_on(one, index):
            whole = None if one.open else View(index + 1)
            return Views(prompt=View(index, add_generation_prompt=True), whole=whole)
        return Views(stand_in=View(index + 1, content=self._instead), whole=View(index + 1))

    def place(self, one: Spoken, views: Views) -> Placed | ErrorInfo | None:
        """Where the content is; None if it is not shown as it is; or the refusal to render it."""
        if one.open:
            return self._open(one, views)
        if isinstance(views.whole, ErrorInfo):
            return views.whole
        if not is_cut(one.content):
            return Placed(views.whole, (), "")
        return self._drawn(one, views) if views.prompt is not None else self._told(one, views)

    def _drawn(self, one: Spoken, views: Views) -> Placed | None:
        prompt: Text = views.prompt
        if isinstance(prompt, ErrorInfo) or not views.whole.startswith(prompt):
            return None
        for parts in _trimmed(one.content, left=False):
            content = self._say(parts)
            if views.whole.startswith(content, len(prompt)):
                return Placed(prompt, parts, views.whole[len(prompt) + len(content) :])
        return None

    def _told(self, one: Spoken, views: Views) -> Placed | None:
        found = self._split(views.stand_in)
        if found is None:
            return None
        before, after = found
        for parts in _trimmed(one.content):
            if views.whole == before + self._say(parts) + after:
                return Placed(before, parts, after)
        return None

    def _open(self, one: Spoken, views: Views) -> Placed | ErrorInfo:
        if isinstance(views.prompt, str):
            return Placed(views.prompt, one.content, "")
        for text in (views.prompt, views.stand_in):
            if isinstance(text, ErrorInfo):
                return text
        found = self._split(views.stand_in)
        before = found[0] if found is not None else ""
        for parts in _trimmed(one.content, right=False) if found is not None else ():
            content = self._say(parts).rstrip()
            shown = isinstance(views.whole, str) and views.whole.startswith(before + content)
            if shown or not content:
                return Placed(before, parts, "")
        return BadRequest(
            "the open message cannot be gone on with: the chat template does not show it as it is",
            param="input",
        ).info()

    def _split(self, text: Text) -> tuple[str, str] | None:
        """What is before and after the stand-in."""
        if isinstance(text, ErrorInfo) or text.count(self._stand_in) != 1:
            return None
        before, _, after = text.partition(self._stand_in)
        return before, after


def is_cut(content: Parts) -> bool:
    """Whether it matters where in a text the parts are."""
    return len(content) > 1 or any(isinstance(part, IdsPart) for part in content)


def _goes_on(one: Spoken, index: int) -> bool:
    """Whether the content comes after the generation prompt: not where a chat begins with it."""
    return one.role == "assistant" and index > 0


def _trimmed(parts: Parts, left: bool = True, right: bool = True) -> Iterator[Parts]:
    """The parts as they are, and what may be left of them if the template trims contents."""
    yield parts
    trimmed = [*parts]
    if right and parts and isinstance(last := parts[-1], TextPart):
        trimmed[-1] = TextPart(last.text.rstrip())
        yield [*trimmed]
    if left and parts and isinstance(first := trimmed[0], TextPart):
        trimmed[0] = TextPart(first.text.lstrip())
        yield trimmed
