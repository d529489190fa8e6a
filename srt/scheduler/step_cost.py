"""What one more token costs in a step, learnt from how long steps took."""

from __future__ import annotations

FIRST = 0.15
"""A token's seconds over those of an empty step, until steps have shown it."""
FIRST_ROW = 0.02
"""And where it is asked what a row costs others: until that is known, nobody pauses for them."""
LEAST, MOST = 0.003, 1.0
DECAY = 0.99
"""Weight of what was known, when a step is added."""
MOST_PROMPT = 64
"""A long chunk of a prompt costs less a token: its step says nothing of drafts."""
OUTLIER = 4.0
"""No step counts as longer than so many times the mean."""
STIFFNESS = 4.0
"""Variance of the steps' tokens at which they count as much as what was known does."""


class StepCost:
    """A step of n tokens takes a + b * n seconds: a fit by least squares, in which old steps fade. It begins
    with b / a = `first`; steps that are all alike leave it as it is."""

    def __init__(self, first: float = FIRST) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self.ratio = first
        """b / a."""

    def saw(self, tokens: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if prompt_tokens > MOST_PROMPT or seconds <= 0.0:
            return
        if self._weight > 0.0:
            seconds = min(seconds, OUTLIER * self._seconds / self._weight)
        self._weight = DECAY * self._weight + 1.0
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + tokens * tokens
        self._products = DECAY * self._products + tokens * seconds
        self.ratio = self._fit()

    def marginal(self, tokens: int) -> float:
        """How likely a token must be kept, for it to pay to add it to a step of `tokens` others: more tokens
        come of a second then. b / ((a + b n) / n), as each of the others gives one."""
        share = self.ratio * max(tokens, 1)
        return share / (1.0 + share)

    def _fit(self) -> float:
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = max(self._squares / self._weight - tokens * tokens, 0.0)
        covariance = self._products / self._weight - tokens * seconds
        expected = self.ratio * seconds / (1.0 + self.ratio * tokens)
        each = (covariance + STIFFNESS * expected) / (variance + STIFFNESS)
        empty = seconds - each * tokens
        if each <= 0.0:
            return LEAST
        return min(max(each / empty, LEAST), MOST) if empty > 0.0 else MOST
