"""What a state is made of so far: a value, which branches share and none of them changes.

Text that no model has seen is `pending`: it grows until something needs its tokens (a request, a special
token, the end of a message, a fork), which seals it into a segment. A sealed segment keeps its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sapwood.lang.backend import Content, Ids, Segment, Segments, Text, Turn
from sapwood.lang.errors import LangError


@dataclass(frozen=True, slots=True)
class Context:
    """`segments` are complete; `content` is that of the message of `role` that is open, if one is.

    `new`: something came after what a request has had computed last. The first `base` segments, and `inner`
    parts of the open message, are what a branch has from before its fork, where a message was open if it was
    forked `within` one.
    """

    segments: Segments = ()
    role: str | None = None
    content: Content = ()
    pending: str = ""
    new: bool = False
    base: int = 0
    inner: int = 0
    within: bool = False

    def add(self, text: str) -> Context:
        """With text, which may join with what stands before and after it."""
        return replace(self, pending=self.pending + text, new=True) if text else self

    def put(self, *parts: Text | Ids) -> Context:
        """With parts that have tokens of their own."""
        sealed = self.sealed()
        if sealed.role is None:
            return replace(sealed, segments=(*sealed.segments, *parts), new=True)
        return replace(sealed, content=(*sealed.content, *parts), new=True)

    def sealed(self) -> Context:
        """With nothing pending."""
        if not self.pending:
            return self
        part = Text(self.pending)
        if self.role is None:
            return replace(self, segments=(*self.segments, part), pending="")
        return replace(self, content=(*self.content, part), pending="")

    def begin(self, role: str) -> Context:
        """With a message that is open. Raises LangError if one is."""
        if self.role is not None:
            raise LangError(f"a message of {role} begins within one of {self.role}, which has not ended")
        return replace(self.sealed(), role=role, content=(), new=True, inner=0)

    def end(self, role: str) -> Context:
        """With the open message ended. Raises LangError if it is not open or of another role."""
        if self.role != role:
            what = "no message is open" if self.role is None else f"the open one is of {self.role}"
            raise LangError(f"a message of {role} ends, but {what}")
        sealed = self.sealed()
        turn = Turn(role, sealed.content)
        return replace(sealed, segments=(*sealed.segments, turn), role=None, content=(), new=True, inner=0)

    def forked(self) -> Context:
        """What a branch begins with."""
        sealed = self.sealed()
        within = sealed.role is not None
        return replace(sealed, base=len(sealed.segments), inner=len(sealed.content), within=within)

    def sent(self) -> Segments:
        """What goes to a backend, which goes on with the message that is open."""
        sealed = self.sealed()
        if sealed.role is None:
            return sealed.segments
        return (*sealed.segments, Turn(sealed.role, sealed.content, open=True))

    def seen(self, input_ids: tuple[int, ...] | None) -> Context:
        """After a request of `sent()` whose tokens were `input_ids`: text without a message before or around
        it gives way to its tokens. A message stays as it is, as its text decides how it is rendered."""
        sealed = replace(self.sealed(), new=False)
        if input_ids is None or sealed.role is not None:
            return sealed
        return replace(sealed, segments=_as_ids(sealed.segments, sealed.base, input_ids))

    def filled(self, count: int, input_ids: tuple[int, ...]) -> Context:
        """With the ids of the first `count` segments, which were sealed at a fork; see `seen`."""
        within = self.base >= count
        prefix = _as_ids(self.segments[:count], 0 if within else self.base, input_ids)
        base = self.base - count + len(prefix) if within else self.base
        return replace(self, segments=(*prefix, *self.segments[count:]), base=base)

    def since_fork(self) -> tuple[Segments, Content]:
        """What a branch has added: segments, and parts of the message that is open."""
        sealed = self.sealed()
        inner = sealed.inner if sealed.role is not None and len(sealed.segments) == sealed.base else 0
        return sealed.segments[sealed.base :], sealed.content[inner:]

    def joined(self, branches: Iterable[Context]) -> Context:
        """With what the branches have added, one after the other. Raises LangError where a branch has
        messages that do not fit in here."""
        result = self.sealed()
        for number, branch in enumerate(branches):
            segments, content = branch.since_fork()
            if branch.within and segments:
                raise LangError(
                    f"branch {number} cannot be appended: it has ended the message that it was forked in"
                )
            if branch.role != self.role or (self.role is not None and segments):
                raise LangError(
                    f"branch {number} cannot be appended: it is in {branch.role or 'no'} message with "
                    f"{len(segments)} segments since the fork, and the state in {self.role or 'no'} message"
                )
            if self.role is None:
                result = replace(result, segments=(*result.segments, *segments), new=True)
            else:
                result = replace(result, content=(*result.content, *content), new=True)
        return result


def _as_ids(segments: Segments, base: int, ids: tuple[int, ...]) -> Segments:
    """The segments as their ids, if none is a message. Those that were ids before stay, so that they are
    shared and what a branch has added can be told from what it had."""
    head = 0
    while head < len(segments) and isinstance(segments[head], Ids):
        head += 1
    rest = segments[head:]
    if not rest or head < base or any(isinstance(segment, Turn) for segment in rest):
        return segments
    before = tuple(i for segment in segments[:head] for i in _ids(segment))
    if ids[: len(before)] != before:
        return segments
    return (*segments[:head], Ids(ids[len(before) :], "".join(text_of(segment) for segment in rest)))


def _ids(segment: Segment) -> tuple[int, ...]:
    return segment.ids if isinstance(segment, Ids) else ()


def text_of(segment: Segment) -> str:
    """The text of a segment, of a message its content's."""
    if isinstance(segment, Turn):
        return "".join(part.text for part in segment.content)
    return segment.text


def messages_of(segments: Segments) -> list[dict[str, str]]:
    """The complete messages, in the form of the OpenAI API."""
    return [
        {"role": segment.role, "content": text_of(segment)}
        for segment in segments
        if isinstance(segment, Turn) and not segment.open
    ]
