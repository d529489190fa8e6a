"""How `select` decides: methods that judge the choices by the logprobs of their tokens.

A method is called with the choices and what the backend scored, one for each in order, and answers a
Decision. Its `meta` has SGLang's names: `normalized_prompt_logprobs`, each choice's mean logprob, and
`input_token_logprobs`, per choice a `[logprob, id, None]` for each token. Logprobs are natural logarithms.

>>> new = Scored(ids=(7,), logprobs=(-1.0,), unconditional=(-3.0,))
>>> new_york = Scored(ids=(7, 8), logprobs=(-1.0, -0.5), unconditional=(-3.0, -1.0))
>>> for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized):
...     print(method, method(["New", "New York"], [new, new_york]).decision)
token_length_normalized New York
greedy_token_selection New York
unconditional_likelihood_normalized New
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from sapwood.lang.backend import Scored


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice number `index`, and what it was judged by."""

    decision: str
    index: int
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """The number of the best choice, and what a method adds to the meta information."""

    index: int
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decide; one of your own is made of a name and a `judge`.

    With `needs_unconditional` the choices are scored after nothing too (`Scored.unconditional`).
    """

    name: str
    judge: Callable[[Sequence[Scored]], Judged]
    needs_unconditional: bool = False

    def __call__(self, choices: Sequence[str], scored: Sequence[Scored]) -> Decision:
        """The best of `choices`. Raises ValueError if there is none, or one has no tokens to be judged by."""
        check(choices)
        if len(scored) != len(choices):
            raise ValueError(f"{len(choices)} choices must have as many scores, got {len(scored)}")
        for number, one in enumerate(scored):
            _check_scored(number, one, self.needs_unconditional)
        judged = self.judge(scored)
        meta = {
            "normalized_prompt_logprobs": [mean(one.logprobs) for one in scored],
            "input_token_logprobs": [_triples(one.logprobs, one.ids) for one in scored],
            "output_token_logprobs": [[] for _ in scored],
            **judged.meta,
        }
        return Decision(choices[judged.index], judged.index, meta)

    def __repr__(self) -> str:
        return self.name


def check(choices: Sequence[str]) -> None:
    """Raises ValueError unless there is at least one choice and none of them is empty."""
    if isinstance(choices, str) or not choices:
        raise ValueError(f"choices must be a list of at least one text, got {choices!r}")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise ValueError(f"choices[{number}] must be a text, got {type(choice).__name__}")
        if not choice:
            raise ValueError(f"choices[{number}] is empty: it has no tokens to be judged by")


def mean(values: Sequence[float]) -> float:
    """The exact sum, rounded once, over the number of values: it depends on no order."""
    return fsum(values) / len(values)


def _check_scored(number: int, one: Scored, unconditional: bool) -> None:
    if not one.logprobs:
        raise ValueError(f"choices[{number}] has no logprobs to be judged by")
    if one.ids and len(one.ids) != len(one.logprobs):
        raise ValueError(f"choices[{number}] has {len(one.ids)} tokens and {len(one.logprobs)} logprobs")
    if unconditional and len(one.unconditional) != len(one.logprobs):
        raise ValueError(
            f"choices[{number}] has {len(one.logprobs)} logprobs and {len(one.unconditional)} unconditional "
            "ones; there must be as many"
        )


def _triples(logprobs: Sequence[float], ids: Sequence[int]) -> list[list[Any]]:
    return [[value, ids[i] if ids else None, None] for i, value in enumerate(logprobs)]


def _first_of_the_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _by_mean(scored: Sequence[Scored]) -> Judged:
    return Judged(_first_of_the_best([mean(one.logprobs) for one in scored]), {})


def _greedily(scored: Sequence[Scored]) -> Judged:
    longest = max(len(one.logprobs) for one in scored)
    matrix = [[*one.logprobs, *[mean(one.logprobs)] * (longest - len(one.logprobs))] for one in scored]
    remaining = list(range(len(scored)))
    for place in range(longest):
        best = max(remaining, key=lambda i: matrix[i][place])
        step = _step(scored[best], place)
        remaining = [i for i in remaining if _step(scored[i], place) == step]
        if len(remaining) == 1:
            break
    return Judged(remaining[0], {"greedy_logprob_matrix": matrix})


def _step(one: Scored, place: int) -> int | float | None:
    """What a choice goes on with: a token (where ids are not told, its logprob stands for it), or nothing."""
    if place >= len(one.logprobs):
        return None
    return one.ids[place] if one.ids else one.logprobs[place]


def _by_gain(scored: Sequence[Scored]) -> Judged:
    gains = [
        mean([given - alone for given, alone in zip(one.logprobs, one.unconditional, strict=True)])
        for one in scored
    ]
    meta = {
        "unconditional_token_logprobs": [_triples(one.unconditional, one.ids) for one in scored],
        "normalized_unconditional_prompt_logprobs": gains,
    }
    return Judged(_first_of_the_best(gains), meta)


token_length_normalized = Method("token_length_normalized", _by_mean)
"""The choice with the highest mean logprob of its tokens; of equals the first.

Long choices whose later tokens are predictable are preferred to short ones: of "New" and "New York", say, the
second wins wherever "York" is likely after "New".
"""

greedy_token_selection = Method("greedy_token_selection", _greedily)
"""The choice that greedy decoding would end in if only the choices could be said.

Token by token those choices remain that go on with the likeliest token. One that has ended goes on with its
mean logprob, which is how it competes with those that it is a prefix of. Of equals the first.
"""

unconditional_likelihood_normalized = Method(
    "unconditional_likelihood_normalized", _by_gain, needs_unconditional=True
)
"""The choice whose tokens gain most from what stands before them: the mean of logprob minus the logprob of
the same token where nothing but a document's beginning stands before the choice. Of equals the first."""
