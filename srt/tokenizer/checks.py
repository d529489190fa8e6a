"""What a request must be, checked by the tokenizer once more, whoever has sent it."""

from __future__ import annotations

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import stop_regex
from sapwood.srt.messages import Generate
from sapwood.srt.tokenizer.requests import NoTexts, Texts


def check(message: Generate, vocab_size: int, texts: Texts) -> None:
    """Raises BadRequest naming the field, its value and the limit."""
    params, constraint = message.params, message.constraint
    params.check(vocab_size)
    stop_regex.automaton(tuple(params.stop_regex))
    if constraint is not None:
        constraint.check()
    if isinstance(texts, NoTexts):
        named = None if constraint is None else constraint.field
        stops = ("stop" if params.stop else None, "stop_regex" if params.stop_regex else None)
        for field in (*stops, named):
            if field is not None:
                raise BadRequest(f"{field} needs a tokenizer (--skip-tokenizer-init is set)", param=field)
