"""Logprobs in SGLang's shape."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood.srt.messages import TextLogprob
from sapwood.srt.params import SamplingParams
from sapwood.srt.server.logprobs import finite
from sapwood.srt.server.native_protocol import MetaInfo, Triple, Triples


class NativeLogprobs:
    """Those of tokens that follow each other."""

    def __init__(self, params: SamplingParams, with_text: bool) -> None:
        self._with_text = with_text
        self._top = bool(params.logprobs)
        self._chosen = bool(params.logprob_ids)
        self.tokens: list[Triple] = []
        self.tops: Triples = []
        self.chosen: Triples = []

    def begin(self, token: int, text: str) -> None:
        """A prompt's first token, which has no logprob."""
        self.tokens.append(self._triple(None, token, text))
        self.tops.append(None)
        self.chosen.append(None)

    def follow(self, items: Sequence[TextLogprob]) -> NativeLogprobs:
        """Add tokens. Returns itself."""
        for item in items:
            self.tokens.append(self._triple(item.logprob, item.id, item.text))
            if self._top:
                self.tops.append(self._several(item.top))
            if self._chosen:
                self.chosen.append(self._several(item.chosen))
        return self

    def tell_output(self, meta: MetaInfo) -> None:
        meta.output_token_logprobs = self.tokens
        if self._top:
            meta.output_top_logprobs = self.tops
        if self._chosen:
            meta.output_token_ids_logprobs = self.chosen

    def tell_input(self, meta: MetaInfo) -> None:
        meta.input_token_logprobs = self.tokens
        if self._top:
            meta.input_top_logprobs = self.tops
        if self._chosen:
            meta.input_token_ids_logprobs = self.chosen

    def _several(self, items: Sequence[tuple[int, float, str, bytes]]) -> list[Triple]:
        return [self._triple(value, token, text) for token, value, text, _raw in items]

    def _triple(self, logprob: float | None, token: int, text: str) -> Triple:
        value = None if logprob is None else finite(logprob)
        return value, token, text if self._with_text else None
