# SPDX-License-Identifier: Apache-2.0
"""Parses JSON from other programs strictly.

It comes from other ranks over a socket, or from files that anyone may have
changed.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import islice
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Count: TypeAlias = Annotated[int, "count"]
"""A whole number from 0 to 2**53, see :func:`count_of`; an ``int`` may be any."""

_LARGEST_COUNT: Final = 2**53
# Python takes up to 230 bytes for a value that is written in three: 1 MiB of JSON may
# become 75 MiB.
_MOST_VALUES: Final = 2**20
# Possessive, and without its end in damaged text: linear in time, constant in memory.
_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def parse_json(text: bytes | str, *, longest: int) -> Any:
    """Parse JSON, without the extensions that Python's parser accepts.

    Args:
      text: What was read; bytes have to be UTF-8.
      longest: The most characters or bytes that it may have.

    Raises:
      ValueError: It is longer or not JSON, nests deeper than Python's parser can
        follow, repeats a key, holds a number that is not finite, or has too many
        values.

    Example:
      >>> parse_json('{"step": 3}', longest=100)
      {'step': 3}
    """
    if len(text) > longest:
        raise ValueError(f"{len(text):,} characters, of {longest:,}")
    text = text.decode() if isinstance(text, bytes) else text
    check_json_values(text)
    try:
        return json.loads(
            text,
            parse_constant=_refuse,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_json_values(text: str) -> None:
    """Check that JSON does not take hundreds of megabytes once it is parsed.

    Raises:
      ValueError: It has more than a million values.
    """
    count = _count_values(text)
    if count <= _MOST_VALUES:
        return
    # Most of it may be commas in strings. Each value has at most one key.
    strings = _STRING.finditer(text)
    for string in islice(strings, 2 * _MOST_VALUES):
        count -= _count_values(string[0])
    if count > _MOST_VALUES or next(strings, None):
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")


def _count_values(text: str) -> int:
    return sum(map(text.count, ",[{"))


def count_of(value: Any) -> int:
    """Check that a value is a whole number from 0 to 2**53, which a float can count.

    Raises:
      ValueError: It is not.

    Example:
      >>> count_of(3)
      3
    """
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{_named(value)} is not a count")
    return value


def text_of(value: Any) -> str:
    """Check that a value is text.

    Raises:
      ValueError: It is not.
    """
    return _of_type(str, value)


def decode_json(kind: Any, value: Any) -> Any:
    """Convert a parsed JSON value to a type, such as a dataclass; constructs no other.

    Args:
      kind: A dataclass, ``Count``, ``int``, ``str``, ``bool``, None, or a union,
        ``tuple`` or ``Mapping`` of them.
      value: What :func:`parse_json` returned. Fields that the dataclass lacks are
        ignored; a field with a default may be absent.

    Raises:
      ValueError: The value does not have this type.

    Example:
      >>> decode_json(tuple[int, ...] | None, [1, 2])
      (1, 2)
    """
    if is_dataclass(kind):
        return _decode_fields(kind, _of_type(dict, value))
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _decode_union(kinds, value)
    if origin is Mapping:
        items = _of_type(dict, value).items()
        return {key: decode_json(kinds[1], item) for key, item in items}
    if origin is tuple:
        values = _of_type(list, value)
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(values)
        if len(kinds) != len(values):
            raise ValueError(f"{len(values)} values, not {len(kinds)}")
        return tuple(map(decode_json, kinds, values))
    return count_of(value) if kind == Count else _of_type(kind, value)


def _decode_fields(kind: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    decoded: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in values:
            decoded[field.name] = decode_json(hints[field.name], values[field.name])
        elif field.default is MISSING:
            raise ValueError(f"there is no {field.name!r}")
    return kind(**decoded)


def _decode_union(kinds: tuple[Any, ...], value: Any) -> Any:
    problem = ValueError("a union of nothing")
    for kind in kinds:
        try:
            return decode_json(kind, value)
        except ValueError as error:
            problem = error
    raise problem


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{_named(value)} is not of type {kind.__name__}")
    return value


def _named(value: Any) -> str:
    """A value as messages show it; of a container only its type."""
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value)[:40] if is_plain else f"a {type(value).__name__}"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key[:40]!r} occurs twice")
        values[key] = value
    return values
