# SPDX-License-Identifier: Apache-2.0
"""Logical dim names by patterns: the first match decides, and nothing is left out."""

import pytest

from tessera.errors import DimTableError
from tessera.train.models.dim_table import dim_names

SHAPES = {
    "blocks/0/up/kernel": (4, 8),
    "blocks/1/up/kernel": (4, 8),
    "norm/scale": (4,),
}


def test_a_star_stands_for_any_text_and_a_dash_for_a_whole_dim():
    names = dim_names({"*/kernel": "embed mlp", "norm/*": "-"}, SHAPES)
    assert names == {
        "blocks/0/up/kernel": ("embed", "mlp"),
        "blocks/1/up/kernel": ("embed", "mlp"),
        "norm/scale": (None,),
    }


def test_the_first_pattern_that_matches_decides():
    table = {"blocks/0/*": "- -", "*/kernel": "embed mlp", "*": "norm"}
    names = dim_names(table, SHAPES)
    assert names["blocks/0/up/kernel"] == (None, None)
    assert names["blocks/1/up/kernel"] == ("embed", "mlp")


@pytest.mark.parametrize(
    ("table", "got"),
    [
        ({"*/kernel": "embed mlp"}, r"norm/scale\[4\]: no pattern matches"),
        (
            {"*/kernel": "embed mlp", "*": "norm", "*/bias": "mlp"},
            r"'\*/bias' matches no parameter",
        ),
        ({"*": "norm"}, r"blocks/0/up/kernel\[4, 8\]: '\*' has 1 names"),
        (
            {"*/kernel": "embd mlp", "*": "norm"},
            r"'\*/kernel': there is no dim 'embd'[\s\S]*did you mean 'embed'",
        ),
    ],
)
def test_every_mistake_of_a_table_is_named(table, got):
    with pytest.raises(DimTableError, match=got):
        dim_names(table, SHAPES)


def test_all_mistakes_come_at_once():
    with pytest.raises(DimTableError) as caught:
        dim_names({"*/bias": "mlp", "*/kernel": "embed"}, SHAPES)
    assert len(caught.value.got.splitlines()) == 4
