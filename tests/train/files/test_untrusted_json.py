# SPDX-License-Identifier: Apache-2.0
"""Parsed JSON is converted to declared types, or refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tessera.train.files.untrusted_json import Count, decode_json, parse_json


@dataclass(frozen=True)
class Point:
    x: Count
    names: tuple[str, ...] = ()
    scale: Mapping[str, int | str] | None = None


@pytest.mark.parametrize(
    ("value", "point"),
    [
        ({"x": 1}, Point(1)),
        ({"x": 0, "names": ["a", "b"], "other": []}, Point(0, ("a", "b"))),
        ({"x": 2, "scale": {"a": -1, "b": "c"}}, Point(2, (), {"a": -1, "b": "c"})),
        ({"x": 2, "scale": None}, Point(2)),
    ],
    ids=str,
)
def test_a_dataclass_is_decoded_by_its_fields(value, point):
    assert decode_json(Point, value) == point


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (Point, [1], "a list is not of type dict"),
        (Point, {}, "there is no 'x'"),
        (Point, {"x": True}, "True is not a count"),
        (Point, {"x": 1.0}, r"1\.0 is not a count"),
        (Point, {"x": 2**60}, "is not a count"),
        (Point, {"x": 1, "names": "ab"}, "'ab' is not of type list"),
        (Point, {"x": 1, "names": [1]}, "1 is not of type str"),
        (Point, {"x": 1, "scale": {"a": []}}, "is not of type"),
        (Point, {"x": -1}, "-1 is not a count"),
        (tuple[int, str], [1], "1 values, not 2"),
        (tuple[int, str], [1, "a", 2], "3 values, not 2"),
        (bool, 1, "1 is not of type bool"),
    ],
    ids=str,
)
def test_another_type_is_refused(kind, value, problem):
    with pytest.raises(ValueError, match=problem):
        decode_json(kind, value)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "NaN", "1e999", "[" * 10_000])
def test_json_is_parsed_strictly(text):
    with pytest.raises(ValueError):  # noqa: PT011 - one message for each
        parse_json(text, longest=100_000)
    with pytest.raises(ValueError, match="of 1"):
        parse_json(text, longest=1)


@pytest.mark.parametrize("item", ["[],", '{"a":0},', '"",', "0,"])
def test_json_of_too_many_values_is_refused(item, monkeypatch):
    monkeypatch.setattr("tessera.train.files.untrusted_json._MOST_VALUES", 2**10)
    text = f"[{item * 2**10}0]"
    with pytest.raises(ValueError, match="more than 1,024 values"):
        parse_json(text, longest=2**24)


def test_commas_and_brackets_in_strings_are_no_values():
    value = {"a": ",[{" * 2**20, "b": '\\",' * 1000}
    assert parse_json(json.dumps(value), longest=2**24) == value
