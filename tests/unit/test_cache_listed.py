"""Listed prefixes are shared by all namespaces, and nothing else is by any two."""

from __future__ import annotations

import random

import pytest

from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.messages import pack
from sapwood.srt.namespaces import LISTED
from tests.simulation import World

LONG = {"ignore_eos": True, "max_tokens": 4}


class Cache:
    def __init__(self) -> None:
        self.pool = SlotPool(128)
        self.tree = RadixTree(self.pool)
        self.private: list[SlotArray] = []

    def add(self, *ids: int, namespace: str = "") -> Node:
        slots = self.pool.allocate(len(ids))
        existing, node = self.tree.insert(namespace, pack(ids), slots)
        self.pool.free(slots[:existing])
        self.check()
        return node

    def share(self, *ids: int) -> Node:
        node = self.add(*ids, namespace=LISTED)
        self.tree.list_prefix(node)
        self.check()
        return node

    def find(self, *ids: int, namespace: str = "") -> int:
        return self.tree.peek(namespace, pack(ids), len(ids))[0]

    def check(self) -> None:
        self.tree.check()
        check_pool(self.pool, self.tree, self.private)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_listed_prefix_is_found_in_every_namespace_with_the_same_slots(cache: Cache) -> None:
    end = cache.share(1, 2, 3)
    for namespace in ("", "a", "b"):
        match = cache.tree.match(namespace, pack([1, 2, 3, 4]), 3)
        assert (match.length, match.slots.tolist()) == (3, end.path_slots().tolist())
    assert cache.tree.namespaces == [LISTED]
    assert cache.tree.listed_tokens == 3


def test_only_what_is_listed_is_shared_and_only_to_its_end(cache: Cache) -> None:
    cache.share(1, 2, 3)
    cache.add(1, 2, 3, 4, 5, namespace=LISTED)
    assert cache.find(1, 2, 3, 4, 5, namespace="a") == 3
    assert cache.find(1, 2, namespace="a") == 0, "a lookup of two tokens does not reach the end"
    assert cache.find(1, 2, 9, namespace="a") == 0
    assert cache.find(1, 2, 3, 4, 5, namespace=LISTED) == 5


def test_below_a_listed_end_each_namespace_has_its_own(cache: Cache) -> None:
    end = cache.share(1, 2, 3)
    mine = cache.add(1, 2, 3, 7, 8, namespace="a")
    cache.add(1, 2, 3, 7, 9, namespace="b")
    assert mine.path_slots().tolist()[:3] == end.path_slots().tolist()
    assert cache.find(1, 2, 3, 7, 8, namespace="a") == 5
    assert cache.find(1, 2, 3, 7, 9, namespace="a") == 4
    assert cache.find(1, 2, 3, 7, 8, namespace="b") == 4
    assert cache.find(1, 2, 3, 7, 8, namespace="c") == 3
    assert cache.find(1, 2, 3, 7, 8, namespace=LISTED) == 3
    assert sorted(cache.tree.namespaces) == sorted([LISTED, "a", "b"])


def test_the_deepest_end_counts(cache: Cache) -> None:
    cache.share(1, 2)
    cache.add(1, 2, 3, 4, 5, namespace="a")
    cache.share(1, 2, 3, 4)
    assert cache.find(1, 2, 3, 4, 5, namespace="a") == 4
    cache.add(1, 2, 3, 4, 6, namespace="a")
    cache.add(1, 2, 9, namespace="a")
    assert cache.find(1, 2, 3, 4, 6, namespace="a") == 5
    assert cache.find(1, 2, 9, namespace="a") == 3
    assert cache.tree.listed_tokens == 4


def test_a_split_of_a_listed_edge_leaves_tenants_at_its_end(cache: Cache) -> None:
    end = cache.share(1, 2, 3, 4)
    mine = cache.add(1, 2, 3, 4, 5, namespace="a")
    cache.share(1, 2, 8)
    assert end.parent is not None
    assert end.parent.depth == 2
    assert mine.path_slots().tolist()[:4] == end.path_slots().tolist()
    assert cache.find(1, 2, 3, 4, 5, namespace="a") == 5
    assert cache.find(1, 2, 8, 9, namespace="a") == 3
    assert cache.tree.listed_tokens == 5


def test_listed_paths_are_neither_evicted_nor_flushed(cache: Cache) -> None:
    cache.share(1, 2, 3)
    cache.add(1, 2, 3, 4, 5, namespace="a")
    cache.add(1, 6, namespace=LISTED)
    assert cache.tree.evictable_tokens == 3
    assert cache.tree.evict(99) == 3
    cache.check()
    assert (cache.find(1, 2, 3, 4, namespace="a"), cache.tree.namespaces) == (3, [LISTED])
    cache.add(1, 2, 3, 4, 5, namespace="a")
    assert cache.tree.flush("a") == 2
    cache.check()
    cache.add(1, 2, 3, 4, 5, namespace="a")
    assert cache.tree.flush() == 2
    cache.check()
    assert cache.find(1, 2, 3, 4, namespace="a") == 3


def test_an_eviction_below_a_listed_end_is_known_to_its_own_namespace_alone(cache: Cache) -> None:
    cache.share(1, 2, 3)
    cache.add(1, 2, 3, 4, 5, namespace="a")
    cache.tree.evict(9)
    assert cache.tree.peek("a", pack([1, 2, 3, 4, 5]), 4) == (3, "evicted")
    assert cache.tree.peek("b", pack([1, 2, 3, 4, 5]), 4) == (3, "diverged")


def test_the_pin_of_a_tenant_is_on_its_own_tokens(cache: Cache) -> None:
    cache.share(*range(1, 33))
    node = cache.add(*range(1, 33), 7, 8, namespace="a")
    assert cache.tree.pin(node, 10.0)
    assert cache.tree.pinned_tokens == 2
    cache.add(1, 1, namespace="b")
    assert cache.tree.evict(2) == 2
    cache.check()
    assert cache.find(*range(1, 33), 7, 8, namespace="a") == 34


def test_what_was_cached_before_it_was_listed_is_found_no_more_and_ages_out(cache: Cache) -> None:
    old = cache.add(1, 2, 3, 4, namespace="a")
    cache.tree.lock(old)
    cache.share(1, 2, 3)
    assert cache.find(1, 2, 3, 4, namespace="a") == 3
    cache.add(1, 2, 3, 5, namespace="a")
    assert old.depth == 4
    cache.tree.unlock(old)
    cache.check()
    assert cache.tree.evict(99) == 5
    cache.check()
    assert cache.tree.namespaces == [LISTED]


def test_a_row_that_began_before_goes_on_below_its_own_path(cache: Cache) -> None:
    slots = cache.pool.allocate(5)
    first = cache.tree.insert("a", pack([1, 2]), slots[:2]).node
    cache.tree.lock(first)
    cache.private = [slots[2:]]
    cache.share(1, 2, 3)
    existing, second = cache.tree.insert("a", pack([1, 2, 3, 4, 5]), slots, first)
    assert (existing, second.path_slots().tolist()) == (2, slots.tolist())
    cache.private = []
    cache.tree.lock(second)
    cache.tree.unlock(first)
    cache.check()
    cache.tree.unlock(second)
    assert cache.tree.flush("a") == 5


def test_only_what_the_server_wrote_can_be_listed(cache: Cache) -> None:
    with pytest.raises(AssertionError, match="only what is in LISTED"):
        cache.tree.list_prefix(cache.add(1, 2, namespace="a"))
    with pytest.raises(AssertionError, match="only what is in the tree"):
        cache.tree.list_prefix(cache.tree.match(LISTED, pack([1]), 1).node)


def test_listing_twice_is_listing_once(cache: Cache) -> None:
    node = cache.share(1, 2)
    cache.tree.list_prefix(node)
    assert (node.lock_count, cache.tree.listed_tokens) == (1, 2)
    cache.check()


def test_a_trace_shows_the_listed_path_and_ones_own_ways_on_but_nobody_elses(cache: Cache) -> None:
    cache.share(1, 2, 3)
    cache.share(1, 2, 3, 40, 41)
    cache.add(1, 2, 3, 50, 51, namespace="a")
    cache.add(1, 2, 3, 60, 61, namespace="b")
    trace = cache.tree.trace("a", pack([1, 2, 3, 9, 9]), 4)
    assert trace.branches(9, 9) == [[50, 51]]
    assert [(s.start, s.tokens) for s in trace.segments(9)] == [(0, 3)]
    other = cache.tree.trace("c", pack([1, 2, 3, 9, 9]), 4)
    assert (other.matched, other.goes_on, other.branches(9, 9)) == (3, False, [])
    whole = cache.tree.trace("a", pack([1, 2, 3, 50, 51]), 5)
    assert [(s.start, s.tokens) for s in whole.segments(9)] == [(0, 3), (3, 2)]


def test_a_snapshot_shows_what_hangs_below_listed_ends_under_its_namespace(cache: Cache) -> None:
    cache.share(1, 2, 3)
    cache.add(1, 2, 3, 50, 51, namespace="a")
    cache.add(7, 8, namespace="a")
    cache.add(1, 2, 3, 60, namespace="b")
    shown = {n["namespace"]: n for n in cache.tree.snapshot()["namespaces"]}
    assert {name: (n["nodes"], n["tokens"], n["num_children"]) for name, n in shown.items()} == {
        LISTED: (1, 3, 1),
        "a": (2, 4, 2),
        "b": (1, 1, 1),
    }
    assert [(c["ids"], c["depth"]) for c in shown["a"]["children"]] == [([7, 8], 2), ([50, 51], 5)]
    assert [(c["ids"], c["depth"]) for c in shown["b"]["children"]] == [([60], 4)]
    assert [c["children"] for c in shown[LISTED]["children"]] == [[]]


def share(world: World, ids: list[int]) -> None:
    """As the server does it at start: what such a request has computed is listed at its end."""
    world.submit(ids, namespace=LISTED, max_tokens=0)
    world.run()
    world.state.check()
    assert world.state.tree.listed_tokens == len(ids)


def put(world: World, ids: list[int]) -> None:
    """Computed in LISTED, and not listed: with an output it is no prompt to be shared."""
    world.submit(ids, namespace=LISTED, **LONG)
    world.run()
    assert world.state.tree.listed_tokens == 0


def test_requests_of_all_namespaces_share_a_listed_prefix_and_get_their_own_answers() -> None:
    world = World()
    share(world, [*range(10, 40)])
    keys = [
        world.submit([*range(10, 40), 5, 6, 7], namespace=name, **LONG) for name in ("a", "a", "b", "salt:c")
    ]
    world.run()
    found = [world.clients[key].admitted for key in keys]
    # The second of "a" waited for the first.
    assert [f.verdict.matched for f in found if f is not None] == [30, 32, 30, 30]
    assert len({tuple(world.clients[key].output[0]) for key in keys}) == 1
    world.state.check()


def test_those_that_wait_when_a_prefix_is_listed_find_it() -> None:
    world = World(max_running_requests=1, chunked_prefill_size=4)
    put(world, [*range(10, 40)])
    first = world.submit([*range(10, 40), 1, 2], namespace="a", **LONG)
    for _ in range(3):
        world.turn()
    waiting = [world.submit([*range(10, 40), 3, i], namespace=name, **LONG) for i, name in enumerate("ab")]
    world.turn()
    tree = world.state.tree
    tree.list_prefix(tree.match(LISTED, pack([*range(10, 40)]), 30).node)
    world.state.check()
    world.run()
    verdicts = [world.clients[key].admitted for key in [first, *waiting]]
    assert [v.verdict.matched for v in verdicts if v is not None] == [0, 30, 30]
    world.state.check()
    assert tree.flush("a") > 30, "what the first computed below its own root is not lost"


def test_a_lookup_that_ends_inside_a_listed_prefix_says_how_little_it_found() -> None:
    world = World()
    share(world, [*range(10, 40)])
    key = world.submit([*range(10, 40), 3, 4], namespace="a", **LONG, logprobs=0, logprob_start=10)
    world.run()
    admitted = world.clients[key].admitted
    assert admitted is not None
    assert (admitted.verdict.matched, admitted.verdict.stopped) == (0, "logprobs")
    world.state.check()


@pytest.mark.parametrize("seed", range(20))
def test_listing_at_any_time_disturbs_nobody(seed: int) -> None:
    """Waiting, running, retracted: each goes on, is where it should be, and gets its own answer."""
    rng = random.Random(seed)
    world = World(num_slots=96, context=80, chunked_prefill_size=rng.choice([3, 16]), max_running_requests=4)
    texts = [[rng.randrange(2, 9) for _ in range(12)] for _ in range(2)]
    for text in texts:
        put(world, text)
    keys = []
    tree = world.state.tree
    ends = [(text, n) for text in texts for n in (4, 8, 12)]
    for turn in range(120):
        if turn < 60 and rng.random() < 0.5:
            text = rng.choice(texts)
            prompt = text[: rng.randint(1, 12)] + [rng.randrange(2, 9) for _ in range(rng.randint(1, 6))]
            reads = {"logprobs": 0, "logprob_start": rng.randint(0, 12)} if rng.random() < 0.2 else {}
            name = rng.choice(["", "a", "b"])
            keys.append(world.submit(prompt, namespace=name, max_tokens=rng.randint(1, 20), **reads))
        if ends and rng.random() < 0.1:
            text, n = ends.pop(rng.randrange(len(ends)))
            node = tree.match(LISTED, pack(text), n).node
            if node.depth == n:
                tree.list_prefix(node)
        world.turn()
    world.run()
    for key in keys:
        world.expect(key)
    world.state.check()
    assert tree.listed_tokens == tree.cached_tokens - tree.evictable_tokens
