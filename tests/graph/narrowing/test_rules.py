# SPDX-License-Identifier: Apache-2.0
"""The table of operations of autocast: the documented one is the code's."""

import re
from pathlib import Path

import pytest

from tessera.foundations import primitive_properties
from tessera.graph.narrowing.rules import RULES, SINGLE_INSTRUCTIONS, Rule

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "autocast.md"
DOCUMENTED = {
    "matmul": Rule.MATMUL,
    "moves values": Rule.MOVE,
    "narrow": Rule.NARROW,
    "narrow in bf16": Rule.POWER,
    "by the operations inside": Rule.INSIDE,
}


@pytest.mark.parametrize("title", DOCUMENTED)
def test_the_page_has_the_primitives_of_each_rule(title):
    (row,) = re.findall(rf"^\| {title} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    found = re.findall(r"`(\w+)`", row)
    rule = DOCUMENTED[title]
    assert found == sorted(name for name, each in RULES.items() if each is rule)


def test_every_rule_but_f32_has_primitives():
    assert set(RULES.values()) == set(DOCUMENTED.values()) == {*Rule} - {Rule.F32}


def test_arithmetic_is_that_of_the_properties():
    narrow = {name for name, rule in RULES.items() if rule in (Rule.NARROW, Rule.POWER)}
    assert narrow <= primitive_properties.ARITHMETIC
    assert narrow >= SINGLE_INSTRUCTIONS
