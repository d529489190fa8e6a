"""Logprobs in OpenAI's two shapes, and a prompt's in vLLM's.

Values are natural logarithms of the model's own distribution. An impossible token has -9999.0, which is what
OpenAI gives for very unlikely ones: JSON knows no infinity. A token that is not whole UTF-8 is written
`bytes:\\xe2\\x82`, or, where ids were asked for, every token `token_id:50`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sapwood.srt.messages import TextLogprob
from sapwood.srt.server.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def token_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_name(token: int, raw: bytes, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else token_text(raw)


def chat(logprobs: Sequence[TextLogprob], top: int, as_ids: bool = False) -> ChatLogprobs:
    """The `top` most likely tokens at each place, of however many there are."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token_name(item.id, item.raw, as_ids),
                finite(item.logprob),
                list(item.raw),
                [
                    TopLogprob(token_name(token, raw, as_ids), finite(value), list(raw))
                    for token, value, _text, raw in item.top[:top]
                ],
            )
            for item in logprobs
        ]
    )


def prompt(logprobs: Sequence[TextLogprob], top: int) -> PromptLogprobs:
    """Of a whole prompt, whose first token has none: each token and the `top` most likely ones.

    A rank is the number of tokens that are more likely, and one; it is known of those that were computed.
    """
    return [None, *(_prompt_entry(item, top) for item in logprobs)]


def _prompt_entry(item: TextLogprob, top: int) -> dict[int, PromptLogprob]:
    entry: dict[int, PromptLogprob] = {}
    rank = 0
    for place, (token, value, text, _raw) in enumerate(item.top):
        if place == 0 or value < item.top[place - 1][1]:
            rank = place + 1
        if place < top or token == item.id:
            entry[token] = PromptLogprob(finite(value), text, rank)
    if item.id not in entry:
        entry[item.id] = PromptLogprob(finite(item.logprob), item.text)
    return entry


class CompletionWriter:
    """The completions shape of one choice, piece by piece: it remembers how many characters came before."""

    def __init__(self, top: int, offset: int = 0, as_ids: bool = False) -> None:
        self._top = top
        self._offset = offset
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, logprobs: Sequence[TextLogprob]) -> CompletionLogprobs:
        """Output tokens, each at the place that the text so far gives it."""
        shape = CompletionLogprobs([], [], [], [])
        for item in logprobs:
            self._append(shape, item, self._offset)
            self._offset += len(self._decoder.decode(item.raw))
        return shape

    def write_prompt(
        self, first: tuple[int, bytes], logprobs: Sequence[TextLogprob], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        """An echoed prompt: its first token (id and bytes), which has no logprob, and the others."""
        name = token_name(*first, self._as_ids)
        shape = CompletionLogprobs([name], [None], [None], [offsets[0]])
        for item, offset in zip(logprobs, offsets[1:], strict=True):
            self._append(shape, item, offset)
        return shape

    def _append(self, shape: CompletionLogprobs, item: TextLogprob, offset: int) -> None:
        """`top_logprobs` hold the token itself too, whether or not it is among the most likely."""
        token = token_name(item.id, item.raw, self._as_ids)
        shape.tokens.append(token)
        shape.token_logprobs.append(finite(item.logprob))
        top: dict[str, float] = {}
        for other, value, _text, raw in item.top[: self._top]:
            top.setdefault(token_name(other, raw, self._as_ids), finite(value))
        top.setdefault(token, finite(item.logprob))
        shape.top_logprobs.append(top)
        shape.text_offset.append(offset)
