"""Keeps special tokens apart by where they come from: the template's are control tokens, the users' are text.

A chat is rendered to one string, in which a user's "<|im_end|>" looks like the template's own. So, where some
content holds such a string:

1. each one in the contents is put between random marks (the template still sees it between them);
2. in the rendered text every special string outside marks is the template's, and is replaced by an alias: a
   word with a random part, which a second copy of the tokenizer knows as an added token with the same rules;
3. the marks are removed and the copy, which takes the special tokens themselves as plain text, encodes the
   whole; aliases in the ids become the special tokens' ids.

One encoding of the whole text means that merges, prefix spaces and normalisation are what they would be
without all this: text whose contents hold no special string gets the same ids this way and plainly (so the
plain way, which is shorter, is taken then). A special string that arises only because the marks inside it
were removed, or because the template deleted something, is text as well: the copy does not know any.

What is not covered: a template that itself joins pieces of its own and of a field to a special string, like
`<|{{ role }}|>`, means it, and gets the control token.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sapwood.srt.errors import BadRequest


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text in which special tokens' strings are meant."""
    # The batch call is the one that lets other threads run meanwhile.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class SpecialStrings:
    """The special tokens of a tokenizer, and a copy of it that takes them as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {entry.content: token for token, entry in added.items() if entry.special and entry.content}
        # Random, so that no user can write an alias or a mark; tildes and digits, as whatever prints a value
        # (JSON, Python, a template's filters) leaves these alone.
        nonce, mark = secrets.randbelow(10**18), secrets.randbelow(10**18)
        self._open, self._close = f"~{mark}1~", f"~{mark}2~"
        self._alias = {text: f"<|{nonce}:{token}|>" for text, token in special.items()}
        self._copy = Tokenizer.from_str(tokenizer.to_str())
        self._copy.encode_special_tokens = True
        self._copy.add_tokens([_renamed(added[token], self._alias[text]) for text, token in special.items()])
        self._real = {self._copy.token_to_id(self._alias[text]): token for text, token in special.items()}
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._control = frozenset(token for text, token in special.items() if text != unknown)
        # As in the tokenizer, the longest of several at one place is the one.
        self._longest_first = tuple(sorted(special, key=len, reverse=True))
        any_special = "|".join(map(re.escape, self._longest_first)) or r"(?!)"
        opened, closed = re.escape(self._open), re.escape(self._close)
        self._any = re.compile(any_special)
        self._parts = re.compile(f"{opened}({any_special}){closed}|{opened}|{closed}|({any_special})")

    def within(self, value: Any) -> bool:
        """Whether a JSON value holds a special string anywhere."""
        if isinstance(value, str):
            return self._any.search(value) is not None
        if isinstance(value, dict):
            return any(self.within(key) or self.within(item) for key, item in value.items())
        return isinstance(value, list) and any(self.within(item) for item in value)

    def mark(self, value: Any) -> Any:
        """A copy of a JSON value with marks around its special strings."""
        if isinstance(value, str):
            return self._any.sub(lambda found: f"{self._open}{found[0]}{self._close}", value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list) else value

    def ending(self, rendered: str) -> str:
        """The special string of the template's own with which a text ends, or ""."""
        if not rendered.endswith(self._longest_first):
            return ""
        return next(text for text in self._longest_first if rendered.endswith(text))

    def encode(self, rendered: str) -> list[int]:
        """The ids of a text rendered from marked values; BadRequest if plain text makes a special id."""
        text = self._parts.sub(self._resolve, rendered)
        ids = encode(self._copy, text)
        if made := self._control.intersection(ids):
            name = self._copy.id_to_token(min(made))
            raise BadRequest(f"the prompt holds {name!r}, which cannot be kept plain text", param="messages")
        return [self._real.get(token, token) for token in ids]

    def _resolve(self, found: re.Match[str]) -> str:
        by_user, by_template = found[1], found[2]
        return self._alias[by_template] if by_template else by_user or ""


def _renamed(special: AddedToken, alias: str) -> AddedToken:
    return AddedToken(
        alias,
        single_word=special.single_word,
        lstrip=special.lstrip,
        rstrip=special.rstrip,
        normalized=False,
        special=False,
    )
