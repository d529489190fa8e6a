"""From logits to token ids and log-probabilities; each result depends on its own row of logits only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import expect
from sapwood.kernels.ops.philox import uniform

OK = 0
NOT_FINITE = 1
"""A logit is NaN or +infinity: the id is meaningless."""
NOTHING_LEFT = 2
"""Every logit is -infinity: no id may be drawn."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""


@dataclass(slots=True)
class Change:
    """What is done to a row's logits before each draw, in this order; what is None or empty does nothing.

    Repetition (transformers' meaning) divides a positive and multiplies a negative logit of a token seen in
    prompt or output; frequency and presence (OpenAI's meaning) count the output only. Then biases are added,
    then the banned tokens held back, then all that the mask does not allow (token i is bit i % 32 of word
    i / 32). `prompt_seen` uint8 [v] and `output_counts` int32 [v] come together; a draw counts its token in
    the latter, of several from one row only the first.
    """

    prompt_seen: npt.NDArray[np.uint8] | None = None
    output_counts: npt.NDArray[np.int32] | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    biases: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    banned: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    mask: npt.NDArray[np.int32] | None = None

    @property
    def fields(self) -> tuple[int, ...]:
        """The addresses and sizes, as a row of `changes`; valid as long as the arrays live."""
        seen, counts, mask = (
            0 if array is None else array.ctypes.data
            for array in (self.prompt_seen, self.output_counts, self.mask)
        )
        return (
            seen, counts, self.bias_ids.ctypes.data, self.biases.ctypes.data, len(self.bias_ids),
            self.banned.ctypes.data, len(self.banned), mask,
        )  # fmt: skip

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition, self.presence, self.frequency


CHANGE_FIELDS = 8
NUM_BANNED = 6
"""Where a row of `changes` has the number of banned tokens."""
MASK = 7
"""Where it has the mask's address."""


def change_reference(logits: Tensor, change: Change) -> Tensor:
    """A changed copy of the row."""
    result = logits.clone()
    if change.output_counts is not None and change.prompt_seen is not None:
        counts = torch.from_numpy(change.output_counts)
        seen = (torch.from_numpy(change.prompt_seen) > 0) | (counts > 0)
        scaled = torch.where(result > 0, result / change.repetition, result * change.repetition)
        result = torch.where(seen, scaled, result)
        result -= change.frequency * counts.float() + change.presence * (counts > 0).float()
    result.index_add_(0, torch.from_numpy(change.bias_ids), torch.from_numpy(change.biases))
    result[torch.from_numpy(change.banned).long()] = float("-inf")
    if change.mask is not None:
        bits = np.unpackbits(change.mask.view(np.uint8), bitorder="little")[: len(logits)]
        result[torch.from_numpy(bits == 0)] = float("-inf")
    return result


def sample(
    logits: Tensor,
    source: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    ids_out: Tensor,
    errors: Tensor,
    changes: Tensor | None = None,
    penalties: Tensor | None = None,
) -> None:
    """Draw `ids_out[i]` from row `source[i]` of the logits, for each of n samples.

    With `changes` (int64 [s, 8], each row a `Change`'s fields or zeros) and `penalties` (float32 [s, 3]) the
    draws are from changed copies of the rows; the logits stay as they are.

    logits float32 [s, v]; temperature, top_p, min_p float32 [n]; source, top_k (0: off), choices, positions,
    ids_out, errors int32 [n]; seeds int64 [n]. Temperature below `GREEDY_BELOW` or top_k 1 gives the
    lowest id among the maxima. Else the filters apply in the order temperature, top_k, top_p, min_p, with
    ties kept by lowest id, and the draw is the inverse of the cumulative distribution over the kept ids in
    order of id, at Philox4x32-10's number for (seed, choice, position). `errors[i]` is OK, NOT_FINITE or
    NOTHING_LEFT. Raises IndexError for a source that is not a row, or a change of a token that there is not.
    """
    n = source.shape[0]
    expect("logits", logits, torch.float32, -1, -1)
    for name, column in (
        ("source", source),
        ("top_k", top_k),
        ("choices", choices),
        ("positions", positions),
    ):
        expect(name, column, torch.int32, n)
    for name, column in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        expect(name, column, torch.float32, n)
    expect("seeds", seeds, torch.int64, n)
    expect("ids_out", ids_out, torch.int32, n)
    expect("errors", errors, torch.int32, n)
    s = logits.shape[0]
    if changes is not None:
        expect("changes", changes, torch.int64, s, CHANGE_FIELDS)
    if penalties is not None or changes is not None:
        expect("penalties", torch.empty(0) if penalties is None else penalties, torch.float32, s, 3)
    wrong = kernels().sample(
        logits.data_ptr(), s, logits.shape[1], 0 if changes is None else changes.data_ptr(),
        0 if penalties is None else penalties.data_ptr(), source.data_ptr(), n, temperature.data_ptr(),
        top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), seeds.data_ptr(), choices.data_ptr(),
        positions.data_ptr(), ids_out.data_ptr(), errors.data_ptr(),
    )  # fmt: skip
    if wrong >= n:
        raise IndexError(f"row {wrong - n} is changed at a token that is not from 0 to {logits.shape[1] - 1}")
    if wrong >= 0:
        raise IndexError(f"source {int(source[wrong])} is not from 0 to {s - 1}")


def sample_reference(
    logits: Tensor,
    source: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    ids_out: Tensor,
    errors: Tensor,
) -> None:
    for i, row in enumerate(source.tolist()):
        values = logits[row].double().numpy()
        if np.isnan(values).any() or np.isposinf(values).any():
            errors[i] = NOT_FINITE
            continue
        if np.isneginf(values).all():
            errors[i] = NOTHING_LEFT
            continue
        errors[i] = OK
        if float(temperature[i]) < GREEDY_BELOW or int(top_k[i]) == 1:
            ids_out[i] = int(values.argmax())
            continue
        weights = filtered(values, float(temperature[i]), int(top_k[i]), float(top_p[i]), float(min_p[i]))
        target = uniform(int(seeds[i]), int(choices[i]), int(positions[i])) * weights.sum()
        ids_out[i] = int(np.searchsorted(weights.cumsum(), target, side="right"))


def filtered(
    logits: npt.NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The unnormalised weights that one row is drawn from; what the filters drop is 0."""
    weights: npt.NDArray[np.float64] = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    ranked = weights[order]
    before = ranked.cumsum() - ranked
    kept = order[((before < top_p * ranked.sum()) | (top_p >= 1.0)) & (ranked >= min_p)]
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result


def logprobs(
    logits: Tensor,
    source: Tensor,
    ids: Tensor,
    top: Tensor,
    out_logprob: Tensor,
    top_ids: Tensor,
    top_values: Tensor,
    norms: Tensor,
) -> None:
    """Log-softmax of row `source[i]` at `ids[i]`, with the `top[i]` most likely ids and their values.

    logits float32 [s, v]; source, ids, top int32 [n]; out_logprob float32 [n]; top_ids int32 [n, kmax] and
    top_values float32 [n, kmax], best first, ties by lowest id; where there is none, -1 and -infinity.
    `norms` float64 [n] is the logarithm of the sum of exponentials: any other token's value is its logit as
    a double minus that, rounded to float. A row with NaN or +infinity gives NaN and no alternatives. Raises
    IndexError for a source or an id that does not exist, or more alternatives than kmax.
    """
    n = source.shape[0]
    kmax = top_ids.shape[1]
    expect("logits", logits, torch.float32, -1, -1)
    for name, column in (("source", source), ("ids", ids), ("top", top)):
        expect(name, column, torch.int32, n)
    expect("out_logprob", out_logprob, torch.float32, n)
    expect("top_ids", top_ids, torch.int32, n, kmax)
    expect("top_values", top_values, torch.float32, n, kmax)
    expect("norms", norms, torch.float64, n)
    wrong = kernels().logprobs(
        logits.data_ptr(), logits.shape[0], logits.shape[1], source.data_ptr(), ids.data_ptr(),
        top.data_ptr(), n, kmax, out_logprob.data_ptr(), top_ids.data_ptr(), top_values.data_ptr(),
        norms.data_ptr(),
    )  # fmt: skip
    if wrong >= 0:
        raise IndexError(
            f"source {int(source[wrong])} must be from 0 to {logits.shape[0] - 1}, id {int(ids[wrong])} "
            f"from 0 to {logits.shape[1] - 1}, and top {int(top[wrong])} from 0 to {kmax}"
        )


def logprobs_reference(
    logits: Tensor,
    source: Tensor,
    ids: Tensor,
    top: Tensor,
    out_logprob: Tensor,
    top_ids: Tensor,
    top_values: Tensor,
    norms: Tensor,
) -> None:
    top_ids.fill_(-1)
    top_values.fill_(float("-inf"))
    for i, row in enumerate(source.tolist()):
        values = logits[row].double()
        if bool(values.isnan().any()) or bool(values.isposinf().any()):
            out_logprob[i] = norms[i] = float("nan")
            continue
        logs = values.log_softmax(-1)
        norms[i] = values.logsumexp(-1)
        out_logprob[i] = logs[int(ids[i])]
        count = min(int(top[i]), values.shape[0])
        best = torch.argsort(values, descending=True, stable=True)[:count]
        top_ids[i, :count] = best.int()
        top_values[i, :count] = logs[best].float()
