"""Simulated grammars: what is allowed depends on how many tokens the output has."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from sapwood.srt import messages
from sapwood.srt.messages import Grammar, GrammarState

EOS = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """At the output places in `forced` one token is allowed each; EOS is from place `least` on; after `end`
    tokens nothing is. A `bad` one cannot be loaded."""

    forced: dict[int, int]
    least: int
    end: int
    bad: bool = False

    @staticmethod
    @functools.cache
    def of(text: str) -> Rules:
        values = json.loads(text)
        forced = {int(place): token for place, token in values["forced"].items()}
        return Rules(forced, values["least"], values["end"], values["bad"])

    def grammar(self) -> Grammar:
        """As a message has it."""
        values = {"forced": self.forced, "least": self.least, "end": self.end, "bad": self.bad}
        text = json.dumps(values)
        return Grammar(text.encode(), text)

    def token(self, place: int, drawn: int) -> int:
        """What comes at a place, if `drawn` would without the rules."""
        forced = self.forced.get(place)
        if forced is not None:
            return forced
        return 2 if drawn == EOS and place < self.least else drawn

    def ended(self, count: int) -> bool:
        """Whether nothing may follow so many tokens."""
        return count >= self.end

    def state(self, count: int) -> GrammarState:
        """After so many tokens."""
        forced = []
        while (token := self.forced.get(count + len(forced))) is not None and count + len(forced) < self.end:
            forced.append(token)
        return GrammarState(count >= self.least, self.ended(count), messages.pack(forced))
