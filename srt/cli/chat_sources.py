"""Who answers in a chat, and the engine of our own that may."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from sapwood.srt.config import Config

Messages = list[dict[str, str]]


class Usage(NamedTuple):
    """Tokens of a turn; the server may not tell how many were cached."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Piece(NamedTuple):
    """New text of an answer; `usage` is what is known so far."""

    text: str
    usage: Usage | None


class Source(Protocol):
    """Answers conversations. `name` is the model's."""

    name: str

    def answer(self, messages: Messages, params: dict[str, Any]) -> Generator[Piece, None, None]: ...


class EngineSource:
    """An Engine in processes of its own, until the `with` block ends."""

    def __init__(self, chosen: Config) -> None:
        from sapwood.srt.engine import Engine

        self._engine = Engine(**msgspec.structs.asdict(chosen))
        self.name: str = self._engine.server_info()["model"]

    def answer(self, messages: Messages, params: dict[str, Any]) -> Generator[Piece, None, None]:
        """Raises SapwoodError. Closing it ends the request."""
        text = ""
        pieces = self._engine.chat(messages, params, stream=True)
        try:
            for answer in pieces:
                meta = answer["meta_info"]
                usage = Usage(meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
                yield Piece(answer["text"][len(text) :], usage)
                text = answer["text"]
        finally:
            pieces.close()

    def __enter__(self) -> EngineSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.shutdown()
