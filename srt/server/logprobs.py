"""Logprobs in OpenAI's two shapes.

Values are natural logarithms of the model's own distribution. An impossible token has -9999.0, which is what
OpenAI gives for very unlikely ones: JSON knows no infinity. A token that is not whole UTF-8 is written
`bytes:\\xe2\\x82`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sapwood.srt.messages import TextLogprob
from sapwood.srt.server.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def token_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat(logprobs: Sequence[TextLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                token_text(item.raw),
                finite(item.logprob),
                list(item.raw),
                [
                    TopLogprob(token_text(raw), finite(value), list(raw))
                    for _id, value, _text, raw in item.top
                ],
            )
            for item in logprobs
        ]
    )


class CompletionWriter:
    """The completions shape of one choice, piece by piece: it remembers how many characters came before."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, logprobs: Sequence[TextLogprob]) -> CompletionLogprobs:
        """`top_logprobs` hold the sampled token too, whether or not it is among the most likely."""
        shape = CompletionLogprobs([], [], [], [])
        for item in logprobs:
            token = token_text(item.raw)
            shape.tokens.append(token)
            shape.token_logprobs.append(finite(item.logprob))
            top: dict[str, float] = {}
            for _id, value, _text, raw in item.top:
                top.setdefault(token_text(raw), finite(value))
            top.setdefault(token, finite(item.logprob))
            shape.top_logprobs.append(top)
            shape.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(item.raw))
        return shape
