"""How many of an output's tokens are wholly before the place where a stop string has cut its text."""

from __future__ import annotations

from collections import deque

from sapwood.srt.messages import Kept


class _Border:
    """The end of a token: the text up to it has `chars` characters, `text` are the last of them, and the
    batch decode of all `tokens` up to it has also `pending`, which more tokens may change (None: it is not
    known)."""

    __slots__ = ("chars", "pending", "text", "tokens")

    def __init__(self, tokens: int, chars: int, text: str, pending: str | None) -> None:
        self.tokens = tokens
        self.chars = chars
        self.text = text
        self.pending = pending


class Borders:
    """The ends of one choice's tokens in its text, as far back as a cut may still be.

    What was shown is never taken back, so the last end of a token in it that leaves nothing pending is the
    first that matters.
    """

    __slots__ = ("_borders", "_chars", "_shown", "_tokens", "_whole")

    def __init__(self) -> None:
        first = _Border(0, 0, "", "")
        self._borders = deque([first])
        self._whole = deque([first])
        self._tokens = self._chars = self._shown = 0

    def token(self, text: str, pending: str | None) -> None:
        """One more token, which made `text` certain; `pending` is what would come if it were the last."""
        self._tokens += 1
        last = self._borders[-1]
        if not text and pending == last.pending:
            last.tokens = self._tokens
            return
        self._chars += len(text)
        border = _Border(self._tokens, self._chars, text, pending)
        self._borders.append(border)
        if pending == "":
            self._whole.append(border)

    def show(self, chars: int) -> None:
        """So many more characters are out."""
        self._shown += chars
        whole, borders = self._whole, self._borders
        while len(whole) > 1 and whole[1].chars <= self._shown:
            whole.popleft()
        while borders[0] is not whole[0]:
            borders.popleft()

    def kept(self, rest: str) -> Kept:
        """The most tokens whose batch decode is a beginning of what is shown, and the rest of that; the text
        of the last tokens ends with `rest`, what was left when the output ended."""
        base = self._borders[0].chars
        text = "".join(border.text for border in list(self._borders)[1:]) + rest
        text = text[: self._shown - base]
        for border in reversed(self._borders):
            if border.pending is None:
                continue
            start = border.chars - base
            if start <= len(text) and text.startswith(border.pending, start):
                return Kept(border.tokens, text[start + len(border.pending) :])
        raise AssertionError("what is shown begins with the first border")
