"""How the methods of `select` decide, by numbers made by hand."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest

from sapwood.lang.backend import Scored
from sapwood.lang.choices import (
    Judged,
    Method,
    greedy_token_selection,
    mean,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

EVERY = (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)


def scored(ids: list[int], logprobs: list[float], unconditional: list[float] | None = None) -> Scored:
    alone = [-1.0] * len(ids) if unconditional is None else unconditional
    return Scored(ids=tuple(ids), logprobs=tuple(logprobs), unconditional=tuple(alone))


GREEN = scored([10], [-1.0], [-6.0])
LONG = scored([20, 21, 22, 23], [-3.0, -0.125, -0.125, -0.25], [-3.5, -0.125, -0.125, -0.25])
"""A word whose later tokens are predictable."""


def test_the_default_prefers_the_highest_mean_logprob() -> None:
    decision = token_length_normalized(["green", "incomprehensibilities"], [GREEN, LONG])
    assert (decision.index, decision.decision) == (1, "incomprehensibilities")
    assert decision.meta["normalized_prompt_logprobs"] == [-1.0, -0.875]
    assert decision.meta["input_token_logprobs"] == [
        [[-1.0, 10, None]],
        [[-3.0, 20, None], [-0.125, 21, None], [-0.125, 22, None], [-0.25, 23, None]],
    ]
    assert decision.meta["output_token_logprobs"] == [[], []]


def test_greedy_takes_the_likeliest_first_token() -> None:
    decision = greedy_token_selection(["green", "incomprehensibilities"], [GREEN, LONG])
    assert decision.decision == "green"
    assert decision.meta["greedy_logprob_matrix"] == [[-1.0] * 4, [-3.0, -0.125, -0.125, -0.25]]


def test_unconditional_takes_the_largest_gain() -> None:
    decision = unconditional_likelihood_normalized(["green", "incomprehensibilities"], [GREEN, LONG])
    assert decision.decision == "green"
    assert decision.meta["normalized_unconditional_prompt_logprobs"] == [5.0, 0.125]
    assert decision.meta["unconditional_token_logprobs"][0] == [[-6.0, 10, None]]


def test_greedy_follows_shared_tokens_to_where_choices_part() -> None:
    near = scored([1, 2, 3], [-0.5, -0.5, -4.0])
    far = scored([1, 2, 4], [-0.5, -0.5, -0.25])
    other = scored([9, 9, 9], [-0.75, 0.0, 0.0])
    assert greedy_token_selection(["a", "b", "c"], [near, far, other]).decision == "b"


@pytest.mark.parametrize(("york", "best"), [(-0.5, "New York"), (-2.0, "New")])
def test_greedy_extends_a_prefix_of_another_choice_with_its_mean(york: float, best: str) -> None:
    new, new_york = scored([7], [-1.0]), scored([7, 8], [-1.0, york])
    assert greedy_token_selection(["New", "New York"], [new, new_york]).decision == best
    assert greedy_token_selection(["New York", "New"], [new_york, new]).decision == best


def test_the_default_takes_the_longer_of_two_where_its_end_is_likely() -> None:
    new, new_york = scored([7], [-1.0]), scored([7, 8], [-1.0, -0.5])
    decision = token_length_normalized(["New", "New York"], [new, new_york])
    assert (decision.decision, decision.meta["normalized_prompt_logprobs"]) == ("New York", [-1.0, -0.75])


def test_greedy_tells_tokens_apart_that_are_as_likely_as_each_other() -> None:
    one, other = scored([1, 5], [-1.0, -9.0]), scored([2, 5], [-1.0, -0.5])
    assert greedy_token_selection(["one", "other"], [one, other]).decision == "one"


def test_without_ids_greedy_goes_by_the_logprobs() -> None:
    one = Scored(ids=(), logprobs=(-1.0, -9.0))
    other = Scored(ids=(), logprobs=(-1.0, -0.5))
    decision = greedy_token_selection(["one", "other"], [one, other])
    assert decision.decision == "other"
    assert decision.meta["input_token_logprobs"][0] == [[-1.0, None, None], [-9.0, None, None]]


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_of_equals_the_first(method: Method) -> None:
    same = scored([3, 4], [-1.0, -2.0])
    assert method(["x", "y", "x"], [same, same, same]).index == 0
    worse = scored([5, 6], [-3.0, -4.0])
    assert method(["w", "x", "x"], [worse, same, same]).index == 1


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_one_choice_is_the_choice(method: Method) -> None:
    decision = method(["only"], [scored([1], [-50.0])])
    assert (decision.index, decision.decision) == (0, "only")


@pytest.mark.parametrize("method", EVERY, ids=repr)
def test_what_cannot_be_judged_is_refused(method: Method) -> None:
    with pytest.raises(ValueError, match="at least one text"):
        method([], [])
    with pytest.raises(ValueError, match=r"choices\[1\] is empty"):
        method(["a", ""], [GREEN, GREEN])
    with pytest.raises(ValueError, match=r"choices\[0\] has no logprobs"):
        method(["a"], [Scored(ids=(), logprobs=())])
    with pytest.raises(ValueError, match="2 choices must have as many scores, got 1"):
        method(["a", "b"], [GREEN])
    with pytest.raises(ValueError, match="2 tokens and 1 logprobs"):
        method(["a"], [Scored(ids=(1, 2), logprobs=(-1.0,), unconditional=(-1.0,))])


def test_unconditional_scores_must_be_there() -> None:
    assert [method.needs_unconditional for method in EVERY] == [False, False, True]
    with pytest.raises(ValueError, match="1 logprobs and 0 unconditional"):
        unconditional_likelihood_normalized(["a"], [Scored(ids=(1,), logprobs=(-1.0,))])


def test_the_mean_is_the_exact_one() -> None:
    assert mean([1e16, 1.0, -1e16]) == 1 / 3
    assert mean([0.1] * 10) == 0.1
    assert math.isinf(mean([-math.inf, -1.0]))


def test_methods_are_values_and_one_can_be_made() -> None:
    with pytest.raises(FrozenInstanceError):
        token_length_normalized.name = "x"  # type: ignore[misc]
    total = Method(
        "total", lambda every: Judged(max(range(len(every)), key=lambda i: sum(every[i].logprobs)), {})
    )
    assert total(["green", "incomprehensibilities"], [GREEN, LONG]).decision == "green"
    assert repr(total) == "total"
