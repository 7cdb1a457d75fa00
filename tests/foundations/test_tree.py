# SPDX-License-Identifier: Apache-2.0
from tessera.foundations.tree import named_leaves, nest


def test_paths_become_a_nested_dict():
    assert nest({"a/b": 1, "a/c/d": 2, "e": 3}) == {
        "a": {"b": 1, "c": {"d": 2}},
        "e": 3,
    }
    assert nest({}) == {}


def test_named_leaves_and_nest_are_inverse_for_nested_dicts():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nest(named_leaves(tree)) == tree
    assert named_leaves(1, "root") == {"root": 1}
