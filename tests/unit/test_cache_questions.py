"""Questions to the scheduler about its cache: true answers, and nothing changed by asking."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt import messages, namespaces
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import Answer, Ask, IdsPrompt, pack
from sapwood.srt.scheduler import questions
from tests.simulation import World

LONG = {"ignore_eos": True, "max_tokens": 4}


def ask(world: World, what: Any, ids: list[int] | None = None, salted: str = "", **options: Any) -> Answer:
    prompt = None if ids is None else IdsPrompt(pack(ids))
    world.scheduler.handle(Ask(7, what, 1, prompt, salted, options))
    (answer,) = world.state.outgoing.pop(1)
    assert isinstance(answer, Answer)
    assert answer.call == 7
    return messages.decode(messages.encode([answer]))[0]  # type: ignore[no-any-return]


def explain(world: World, ids: list[int], salted: str = "", **options: Any) -> dict[str, Any]:
    answer = ask(world, "explain", ids, salted, **options)
    assert answer.error is None, answer.error
    return answer.data


def test_explain_tells_what_the_request_then_finds() -> None:
    world = World()
    shared = list(range(10, 40))
    world.submit(shared, **LONG)
    world.run()
    for ids in ([*shared, 9, 9], shared, [*shared[:12], 8, 8], [8, 8, 8], [*shared[:12], 8, 8]):
        told = explain(world, ids)
        key = world.submit(ids, **LONG)
        world.run()
        admitted = world.clients[key].admitted
        assert admitted is not None
        assert (told["matched"], told["stopped"]) == (admitted.verdict.matched, admitted.verdict.stopped)
    world.idle()


def test_asking_neither_splits_nor_touches_nor_counts() -> None:
    world = World()
    world.submit(list(range(10, 40)), **LONG)
    world.run()
    before = ask(world, "tree", depth=9, ids=256).data
    explain(world, [*range(10, 20), 9], reveal=True)
    explain(world, list(range(10, 40)))
    assert ask(world, "tree", depth=9, ids=256).data == before


def test_logprobs_of_the_prompt_bound_what_may_be_matched() -> None:
    world = World()
    ids = list(range(10, 40))
    world.submit(ids, **LONG)
    world.run()
    for start, matched in ((0, 0), (1, 0), (2, 1), (20, 19), (29, 28)):
        told = explain(world, ids, logprob_start_len=start)
        assert (told["matched"], told["stopped"]) == (matched, "logprobs"), start
        key = world.submit(ids, **LONG, logprobs=0, logprob_start=start)
        world.run()
        admitted = world.clients[key].admitted
        assert admitted is not None
        assert (admitted.verdict.matched, admitted.verdict.stopped) == (matched, "logprobs"), start
    assert explain(world, ids, logprob_start_len=30)["stopped"] == "last_token"


@pytest.mark.parametrize(
    ("cached", "start", "found"),
    [
        (0, 0, (0, "cold")),
        (0, 9, (0, "cold")),
        (5, 6, (5, "diverged")),
        (5, 5, (4, "logprobs")),
        (5, 7, (5, "diverged")),
        (5, 0, (0, "logprobs")),
        (19, 19, (18, "logprobs")),
        (19, 20, (19, "last_token")),
        (19, None, (19, "last_token")),
    ],
)
def test_explain_and_the_request_name_the_same_reason(
    cached: int, start: int | None, found: tuple[int, str]
) -> None:
    """Logprobs are the reason only where the cache has more than they allow to be taken."""
    world = World()
    ids = list(range(10, 30))
    if cached:
        world.submit([*ids[:cached], 9], **LONG)
        world.run()
    options = {} if start is None else {"logprob_start_len": start}
    told = explain(world, ids, reveal=True, **options)
    assert (told["matched"], told["stopped"]) == found
    reads = {} if start is None else {"logprobs": 0, "logprob_start": start}
    key = world.submit(ids, **LONG, **reads)
    world.run()
    admitted = world.clients[key].admitted
    assert admitted is not None
    assert (admitted.verdict.matched, admitted.verdict.stopped) == found
    assert sum(segment["tokens"] for segment in told["segments"]) == found[0]
    assert bool(told["cached_instead"]) == (found == (5, "diverged"))


def test_what_belongs_to_others_is_told_only_when_it_is_to_be_revealed() -> None:
    world = World()
    world.submit([10, 11, 12, 13, 14], **LONG)
    world.run()
    assert set(explain(world, [10, 11, 9, 9])) == {"matched", "stopped", "goes_on"}
    told = explain(world, [10, 11, 9, 9], reveal=True)
    output = world.clients[0].output[0]
    assert told["cached_instead"] == [[12, 13, 14, *output[:-1]]]
    assert told["segments"] == [
        {"start": 0, "tokens": 2, "hits": 0, "locks": 0, "last_use": told["segments"][0]["last_use"]}
    ]


def test_another_salt_is_told_only_of_the_cache_without_a_salt() -> None:
    world = World()
    world.submit([10, 11, 12], namespace="salt:a", **LONG)
    world.run()
    assert explain(world, [10, 11, 12], "salt:b", reveal=True, unsalted="")["stopped"] == "cold"
    assert explain(world, [10, 11, 12], "salt:a")["matched"] == 2
    world.submit([10, 11, 12], **LONG)
    world.run()
    assert explain(world, [10, 11, 12], "salt:b", unsalted="")["stopped"] == "namespace"
    assert explain(world, [10, 11, 12], "salt:b", unsalted="key:b")["stopped"] == "cold"
    assert explain(world, [10, 11, 12], "salt:b")["stopped"] == "cold"


def test_without_a_cache_there_is_nothing_to_explain() -> None:
    world = World(disable_radix_cache=True)
    world.submit([10, 11, 12], **LONG)
    world.run()
    told = explain(world, [10, 11, 12], reveal=True)
    assert told == {"matched": 0, "stopped": "disabled", "goes_on": False}


def test_the_tree_has_totals_hits_and_locks_and_no_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(chunked_prefill_size=64)
    ids = list(range(10, 30))
    for _ in range(3):
        world.submit(ids, namespace="salt:very secret", **LONG)
        world.run()
    world.submit(ids, namespace="salt:very secret", max_tokens=50, ignore_eos=True)
    for _ in range(3):
        world.turn()
    data = ask(world, "tree").data
    label = namespaces.label("salt:very secret")
    (namespace,) = data["namespaces"]
    assert namespace["namespace"] == label
    assert "secret" not in str(data)
    (first,) = namespace["children"]
    # The first request found nothing. The last is still at work.
    assert (first["tokens"], first["hits"], first["locks"]) == (19, 3, 1)
    assert data["tokens"] == namespace["tokens"] == world.state.tree.cached_tokens
    assert ask(world, "tree", namespace=label).data["namespaces"] == [namespace]
    absent = ask(world, "tree", namespace="").data
    assert (absent["namespaces"], absent["truncated"]) == ([], False)
    monkeypatch.setattr(questions, "MAX_NAMESPACES", 0)
    assert ask(world, "tree", namespace=label).data["truncated"], "it may be among those not looked at"
    world.run()
    world.idle()


@pytest.mark.parametrize(
    ("what", "ids", "options"),
    [
        ("explain", None, {}),
        ("explain", [1], {"nonsense": 1}),
        ("explain", [1], {"logprob_start_len": "x"}),
        ("tree", None, {"depth": "deep"}),
        ("tokenize", [1], {}),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_an_error(
    what: Any, ids: list[int] | None, options: dict[str, Any]
) -> None:
    error = ask(World(), what, ids, **options).error
    assert isinstance(error, ErrorInfo)
    assert error.status == 400


def test_labels_hide_salts_and_keep_our_own_names() -> None:
    assert namespaces.label("") == ""
    assert namespaces.label("health") == "health"
    assert namespaces.label("\x0042") == "request"
    # sha256("abc"), as any user can compute it.
    assert namespaces.label("salt:abc") == "ba7816bf8f01"
