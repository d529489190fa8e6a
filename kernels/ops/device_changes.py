"""What is done to lines of logits before they are drawn from, on any device, without waiting for it: what
`sampling.change_reference` does to one, in its order. All change the logits float32 [n, v] in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood.kernels.ops.device_sampling import chunks

_PENALTY_BYTES = 28
_MASK_BYTES = 12


@dataclass(frozen=True, slots=True)
class Seen:
    """What rows with penalties have had, an entry each: in the output so often (`counts` int32 [entries, v]),
    in the prompt at all (`prompt` uint8 [entries, v])."""

    counts: Tensor
    prompt: Tensor

    def add(self, entries: Tensor, ids: Tensor, times: Tensor) -> None:
        """Count ids int32 [n, m] of the rows in `entries` int64 [n], each `times` int32 [n, m]."""
        at = entries[:, None] * self.counts.shape[1] + ids
        self.counts.view(-1).index_add_(0, at.view(-1), times.reshape(-1))


def penalise(
    logits: Tensor, lines: Tensor, seen: Seen, entries: Tensor, penalties: Tensor, ahead: Tensor
) -> None:
    """Penalise the lines `lines` int64 [k] for what the rows of `entries` int64 [k] have had, and for the
    drafts `ahead` int32 [k, d] (-1: none) as if they were part of the output.

    penalties float32 [k, 3]: repetition, presence, frequency. Takes about 28 v bytes a line, in chunks.
    """
    for span in chunks(lines.shape[0], _PENALTY_BYTES * logits.shape[1]):
        counts = seen.counts.index_select(0, entries[span])
        if ahead.shape[1]:
            some = ahead[span]
            counts.scatter_add_(1, some.clamp(min=0).long(), (some >= 0).int())
        repetition, presence, frequency = penalties[span, :, None].unbind(1)
        x = logits.index_select(0, lines[span])
        output = counts > 0
        had = (seen.prompt.index_select(0, entries[span]) > 0).logical_or_(output)
        x = torch.where(had, torch.where(x > 0, x / repetition, x * repetition), x)
        # Rounded three times, as in C++.
        x = torch.where(output, x - (frequency * counts.float() + presence), x)
        logits.index_copy_(0, lines[span], x)


def add_biases(logits: Tensor, at: Tensor, biases: Tensor) -> None:
    """Add biases float32 [k]; `at` int64 [k] is line * v + id, each at most once."""
    logits.view(-1).index_add_(0, at, biases)


def hold_back(logits: Tensor, at: Tensor) -> None:
    """Let nothing be drawn `at` int64 [k], each line * v + id."""
    logits.view(-1).index_fill_(0, at, float("-inf"))


def apply_masks(logits: Tensor, masks: Tensor, which: Tensor) -> None:
    """Let line i give only what line `which[i]` of the masks allows (-1: all): bit i % 32 of word i // 32
    says it of token i.

    masks int32 [lines, words], which int32 [n]. Takes about 12 v bytes a line, in chunks.
    """
    v = logits.shape[1]
    assert masks.shape[1] * 32 >= v
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    for span in chunks(logits.shape[0], _MASK_BYTES * v):
        words = masks.index_select(0, which[span].clamp(min=0))
        words.masked_fill_((which[span] < 0)[:, None], -1)
        forbidden = ((words[:, :, None] >> bits) & 1) == 0
        logits[span].masked_fill_(forbidden.view(forbidden.shape[0], -1)[:, :v], float("-inf"))
