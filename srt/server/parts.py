"""`input` of `/generate` to a prompt in parts. Needs no web framework."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from sapwood.srt.errors import BadRequest, ContextTooLong, require_unicode
from sapwood.srt.messages import IdsPart, IdsPrompt, PartsPrompt, Spoken, TextPart
from sapwood.srt.server.chat_prompt import FreeForm
from sapwood.srt.server.native_protocol import InputPart

if TYPE_CHECKING:
    from sapwood.srt.server.service import Service

MAX_PARTS = 16_384
"""Of a prompt, and of all its messages' contents together."""
MAX_MESSAGES = 1_024
SHORT = 64
"""A list of ids up to this length is read faster by itself than as an array: there may be MAX_PARTS lists."""

Given = int | str | list[int] | InputPart


def prompt_of(
    service: Service, given: Sequence[Given], template_kwargs: dict[str, Any] | None
) -> PartsPrompt | IdsPrompt:
    """The prompt; one of token ids only needs no tokenizer. Raises BadRequest naming the place."""
    if not given:
        raise BadRequest("input is an empty list", param="input")
    _check_sizes(service, given)
    parts = [*_parts(service, given)]
    kwargs = template_kwargs or {}
    if kwargs and not any(isinstance(part, Spoken) for part in parts):
        raise BadRequest(
            "chat_template_kwargs needs messages in input, and there are none", param="chat_template_kwargs"
        )
    FreeForm().check(kwargs, "chat_template_kwargs")
    ids = [part.ids for part in parts if isinstance(part, IdsPart)]
    if len(ids) < len(parts):
        return PartsPrompt(parts, kwargs)
    if not any(ids):
        raise BadRequest("input is empty; at least one token is needed", param="input")
    return IdsPrompt(b"".join(ids))


def _check_sizes(service: Service, given: Sequence[Given]) -> None:
    """Refuse what would hold up every stream, before it is looked at one by one."""
    segments = [part for part in given if isinstance(part, InputPart)]
    lists = [part for part in given if isinstance(part, list)]
    pieces = len(segments) + sum(isinstance(part, (str, list)) for part in given)
    contents = [part.content for part in segments if isinstance(part.content, list)]
    if (parts := pieces + sum(map(len, contents))) > MAX_PARTS:
        raise BadRequest(f"input may have {MAX_PARTS} parts, got {parts}", param="input")
    messages = sum(part.special is None for part in segments)
    if messages > MAX_MESSAGES:
        raise BadRequest(f"input may have {MAX_MESSAGES} messages, got {messages}", param="input")
    lists += [part for content in contents for part in content if isinstance(part, list)]
    tokens = sum(isinstance(part, int) for part in given) + sum(map(len, lists))
    if 0 < service.max_request_tokens < tokens:
        raise ContextTooLong(
            f"input has {tokens} token ids; the longest request has {service.max_request_tokens} tokens,"
            " prompt and output together",
            param="input",
        )


def _parts(service: Service, given: Sequence[Given]) -> Iterator[TextPart | IdsPart | Spoken]:
    last = len(given) - 1
    for single, run in groupby(enumerate(given), key=lambda each: isinstance(each[1], int)):
        if single:
            ids = [cast(int, part) for _, part in run]
            yield _ids(service, "input", ids)
            continue
        for i, part in run:
            if isinstance(part, InputPart):
                yield _segment(service, f"input[{i}]", part, i == last)
            else:
                yield _piece(service, f"input[{i}]", cast("str | list[int]", part))


def _segment(service: Service, where: str, segment: InputPart, last: bool) -> TextPart | Spoken:
    if segment.special is not None:
        for name in ("role", "text", "content"):
            if getattr(segment, name) is not None:
                raise BadRequest(f"{where} has special and {name}; it can have one", param=f"{where}.{name}")
        if segment.open:
            raise BadRequest(f"{where}.open is for messages", param=f"{where}.open")
        return TextPart(_text(service, f"{where}.special", segment.special), special=True)
    if segment.role is None:
        raise BadRequest(f"{where} needs special or a role", param=f"{where}.role")
    if (segment.text is None) == (segment.content is None):
        raise BadRequest(f"{where} needs exactly one of text and content", param=f"{where}.content")
    if segment.open and not last:
        raise BadRequest(f"{where}.open is true, and it is not the last part of input", param=f"{where}.open")
    name, content = ("content", segment.content) if segment.text is None else ("text", segment.text)
    role = _text(service, f"{where}.role", segment.role)
    if isinstance(content, str):
        return Spoken(role, [TextPart(_text(service, f"{where}.{name}", content))], segment.open)
    pieces = [_piece(service, f"{where}.content[{i}]", piece) for i, piece in enumerate(content or [])]
    return Spoken(role, pieces, segment.open)


def _piece(service: Service, where: str, piece: str | list[int]) -> TextPart | IdsPart:
    if isinstance(piece, list):
        return _ids(service, where, piece)
    return TextPart(_text(service, where, piece))


def _text(service: Service, where: str, text: str) -> str:
    if service.config.skip_tokenizer_init:
        raise BadRequest(
            f"{where} is text, and this server takes token ids only (--skip-tokenizer-init)", param=where
        )
    return require_unicode(text, where)


def _ids(service: Service, where: str, ids: list[int]) -> IdsPart:
    vocab_size = service.source.vocab_size
    if len(ids) <= SHORT and all(0 <= token < vocab_size for token in ids):
        return IdsPart(struct.pack(f"<{len(ids)}i", *ids))
    return IdsPart(service.packed(ids, where).ids)
