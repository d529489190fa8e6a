"""How far one model's answers are from the reference's, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Z = 1.959964
"""Standard deviations on either side of the mean that hold 95 % of a normal distribution."""


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share of `hits` in `count`."""
    share, spread = hits / count, Z * Z / count
    middle = share + spread / 2
    reach = Z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)


def paired_difference(ours: Sequence[bool], reference: Sequence[bool]) -> tuple[float, float, float]:
    """(difference of the shares, low, high) of answers to the same items.

    The interval is Agresti and Min's: Wald's with half an item added to each cell, so that it has a width
    where no item differs.
    """
    count = len(ours)
    gained = sum(a and not b for a, b in zip(ours, reference, strict=True))
    lost = sum(b and not a for a, b in zip(ours, reference, strict=True))
    more, total = gained - lost, count + 2
    reach = Z * math.sqrt(gained + lost + 1 - more * more / total) / total
    return more / count, more / total - reach, more / total + reach


@dataclass
class Divergence:
    """What is summed up over the positions of a text: the reference's logits beside ours.

    A next token is known for all positions but a chunk's last, so that `scored` is less than `positions`.
    """

    positions: int = 0
    scored: int = 0
    agreed: int = 0
    kl: float = 0.0
    loss: float = 0.0
    more: float = 0.0
    more_squares: float = 0.0
    error: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    vocab: int = 0

    def add(self, ids: Sequence[int], reference: Tensor, ours: Tensor) -> None:
        """One chunk: ids [n], logits float32 [n, vocab] after each."""
        self.positions += len(ids)
        self.scored += len(ids) - 1
        self.vocab = reference.shape[1]
        self.agreed += int((reference.argmax(-1) == ours.argmax(-1)).sum())
        error = ours - reference
        self.error = max(self.error, error.abs().max().item())
        self.squares += error.square().sum().item()
        self.largest = max(self.largest, reference.abs().max().item())
        want, got = reference.log_softmax(-1), ours.log_softmax(-1)
        self.kl += (want.exp() * (want - got)).sum().item()
        following = torch.tensor(ids[1:])[:, None]
        loss = -want[:-1].gather(1, following)
        more = -got[:-1].gather(1, following) - loss
        self.loss += loss.sum().item()
        self.more += more.sum().item()
        self.more_squares += more.double().square().sum().item()

    def summary(self) -> dict[str, Any]:
        """Perplexities and their ratio, agreement, logit errors relative to the reference's largest logit,
        mean KL divergence in nats. The ratio's interval takes the tokens' differences as independent."""
        mean = self.more / self.scored
        variance = max(0.0, self.more_squares / self.scored - mean * mean)
        reach = Z * math.sqrt(variance / self.scored)
        return {
            "positions": self.positions,
            "perplexity_reference": math.exp(self.loss / self.scored),
            "perplexity": math.exp((self.loss + self.more) / self.scored),
            "perplexity_ratio": math.exp(mean),
            "perplexity_ratio_interval": [math.exp(mean - reach), math.exp(mean + reach)],
            "agreement": self.agreed / self.positions,
            "agreement_interval": list(wilson(self.agreed, self.positions)),
            "largest_logit": self.largest,
            "error_max": self.error / self.largest,
            "error_rms": math.sqrt(self.squares / (self.positions * self.vocab)) / self.largest,
            "kl": self.kl / self.positions,
        }


def choice_summary(
    ours: Sequence[int], reference: Sequence[int], right: Sequence[int], options: int
) -> dict[str, Any]:
    """Accuracies of the choices picked, the paired difference, and the share of items picked alike."""
    hits = [a == b for a, b in zip(ours, right, strict=True)]
    reference_hits = [a == b for a, b in zip(reference, right, strict=True)]
    same = sum(a == b for a, b in zip(ours, reference, strict=True))
    difference, low, high = paired_difference(hits, reference_hits)
    return {
        "items": len(right),
        "chance": 1 / options,
        "accuracy": sum(hits) / len(right),
        "accuracy_interval": list(wilson(sum(hits), len(right))),
        "accuracy_reference": sum(reference_hits) / len(right),
        "difference": difference,
        "difference_interval": [low, high],
        "same_choice": same / len(right),
        "same_choice_interval": list(wilson(same, len(right))),
    }
