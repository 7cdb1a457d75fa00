# SPDX-License-Identifier: Apache-2.0
"""Items found by the few leaves that distinguish their calls."""

import random
import threading

import jax
import jax.numpy as jnp
import pytest

from tessera.graph.tracer.argument_leaves import leaf_signature
from tessera.graph.tracer.program_lookup import ProgramLookup


@pytest.fixture
def lookup():
    return ProgramLookup(4)


class Watched(list):
    """Leaves that remember which of them were looked at."""

    def __init__(self, leaves):
        super().__init__(leaves)
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


def test_an_item_is_found_by_its_tree_and_its_leaves(lookup):
    assert lookup.find(None, "tree", [1]) is None
    lookup.add(None, "tree", [1], "one")
    lookup.add(None, "tree", [2], "two")
    lookup.add(None, "other", [1], "other")
    assert [lookup.find(None, "tree", [leaf]) for leaf in (1, 2, 3)] == [
        "one",
        "two",
        None,
    ]
    assert lookup.find(None, "other", [1]) == "other"
    assert lookup.find(None, "none", [1]) is None
    assert len(lookup) == 3


def test_another_context_is_another_call(lookup):
    lookup.add("eager", "tree", [1], "one")
    assert lookup.find("lazy", "tree", [1]) is None
    lookup.add("lazy", "tree", [1], "two")
    found = [lookup.find(context, "tree", [1]) for context in ("eager", "lazy", "no")]
    assert found == ["one", "two", None]


def test_trees_whose_hashes_are_equal_are_told_apart(lookup):
    trees = [jax.tree.structure({name: 0}) for name in "abc"]
    assert len(set(map(hash, trees))) == 1  # the case that is tested
    for tree, item in zip(trees[:2], "ab", strict=True):
        lookup.add(None, tree, [1], item)
        lookup.add(None, tree, [2], item + item)
    found = [lookup.find(None, tree, [leaf]) for tree in trees for leaf in (1, 2)]
    assert found == ["a", "aa", "b", "bb", None, None]


def test_only_leaves_that_distinguish_calls_are_looked_at(lookup):
    base = list(range(100))

    def leaves(**changes):
        return Watched([changes.get(f"at_{i}", leaf) for i, leaf in enumerate(base)])

    lookup.add(None, "tree", leaves(), "plain")
    first = leaves()
    assert lookup.find(None, "tree", first) == "plain"
    assert first.seen == []
    lookup.add(None, "tree", leaves(at_50=True), "fifty")
    lookup.add(None, "tree", leaves(at_50=False), "not fifty")
    second = leaves(at_50=False)
    assert lookup.find(None, "tree", second) == "not fifty"
    assert second.seen == [50]
    lookup.add(None, "tree", leaves(at_70=-1), "seventy")
    assert lookup.find(None, "tree", leaves()) == "plain"
    assert lookup.find(None, "tree", leaves(at_70=-1)) == "seventy"


def test_leaves_of_equal_signatures_share_an_item_and_the_last_one_counts(lookup):
    lookup.add(None, "tree", [jnp.ones(2), 0.5], "before")
    lookup.add(None, "tree", [jnp.zeros(2), 0.5], "after")
    assert lookup.find(None, "tree", [jnp.ones(2), 0.25 * 2]) == "after"
    assert len(lookup) == 1


def test_the_least_recently_used_item_is_dropped(lookup):
    for leaf in range(4):
        lookup.add(None, "tree", [leaf], leaf)
    assert lookup.find(None, "tree", [0]) == 0
    lookup.add(None, "tree", [4], 4)
    found = [lookup.find(None, "tree", [leaf]) for leaf in range(5)]
    assert found == [0, None, 2, 3, 4]
    assert len(lookup) == 4


def test_positions_that_no_longer_distinguish_calls_are_dropped(lookup):
    for position in range(20):
        leaves = [0] * 20
        leaves[position] = 1
        lookup.add(None, "tree", leaves, position)
    leaves = Watched(leaves)
    assert lookup.find(None, "tree", leaves) == 19
    assert len(leaves.seen) <= 3


def test_what_has_no_hash_is_not_found(lookup):
    lookup.add(None, "tree", [1, 2], "one")
    lookup.add(None, "tree", [2, 2], "two")
    assert lookup.find(None, "tree", [{1}, 2]) is None
    assert lookup.find([], "tree", [1, 2]) is None


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_a_dict_of_whole_calls_does(seed):
    chance = random.Random(seed)
    lookup, expected = ProgramLookup(10_000), {}
    for _ in range(300):
        tree, leaves = chance.choice("ab"), [chance.choice([0, 1, 0.0]) for _ in "1234"]
        key = tree, tuple(map(leaf_signature, leaves))
        if key in expected:
            assert lookup.find(None, tree, leaves) == expected[key]
        else:
            expected[key] = len(expected)
            lookup.add(None, tree, leaves, expected[key])


def test_threads_may_add_and_find_at_once():
    lookup = ProgramLookup(8)
    mistakes = []

    def run(seed):
        chance = random.Random(seed)
        for _ in range(500):
            leaves = [chance.randrange(6), chance.randrange(6)]
            found = lookup.find(None, "tree", leaves)
            if found is None:
                lookup.add(None, "tree", leaves, sum(leaves))
            mistakes.append(found is not None and not 0 <= found <= 10)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(mistakes) == 2000
    assert not any(mistakes)
    assert len(lookup) <= 8
