"""What has become of the requests of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class Tally:
    """What has become of the requests: `there` had a result before, `done` have one now, `answered` of those;
    `failed` of both."""

    there: int = 0
    failed: int = 0
    done: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, status: int, body: bytes) -> None:
        self.done += 1
        if status != 200:
            self.failed += 1
            return
        self.answered += 1
        try:
            usage = msgspec.json.decode(body, type=_Counted).usage
        except (msgspec.DecodeError, RecursionError):
            return
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens

    def summary(self, asked: int, seconds: float) -> str:
        left = asked - self.done
        parts = [f"{self.there + asked} requests: {self.answered} answered in {seconds:.1f} s"]
        parts += [f"{self.there} were there before"] if self.there else []
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{left} left: run again to go on"] if left else []
        return f"{', '.join(parts)}; {self.prompt_tokens} tokens in, {self.completion_tokens} out"


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Counted(msgspec.Struct):
    usage: _Usage = _Usage()
