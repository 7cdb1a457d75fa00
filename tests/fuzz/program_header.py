# SPDX-License-Identifier: Apache-2.0
"""What every random program has before its function: globals, classes, functions."""

HEADER = """
import collections
import contextlib
import functools
import itertools
import random
import typing

import jax.numpy as jnp
import numpy as np

COUNT = 1
LOG = [1, 2]
TABLE = {"k": 3, "inner": {"m": 1}}
TAGS = {1, 2}
NUMBERS = np.array([1, 2, 3], np.int32)


class Box:
    made = 0

    def __init__(self, v):
        self.v = v
        self.items = [v, 1]
        self.__hidden = 2

    def add(self, by):
        self.v = (self.v + by) % 17
        return self.v

    def hidden(self, by):
        self.__hidden = self.__hidden + by
        if self.__hidden > 3:
            return self.__hidden
        return 0

    def choose(self, value):
        if value > self.v:
            return value - self.v
        return self.v

    @property
    def double(self):
        return self.v * 2

    def __iadd__(self, by):
        self.v = self.v + by
        return self


class Slotted:
    __slots__ = ("v",)

    def __init__(self, v):
        self.v = v


class Quiet:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return error[0] is not None and issubclass(error[0], ValueError)


class Pair(typing.NamedTuple):
    left: object
    right: object


class Bag(collections.UserDict):
    pass


GLOBAL_BOX = Box(2)


def bump_global(by):
    global COUNT
    COUNT = COUNT + by
    return COUNT


def log(value):
    LOG.append(1)
    return value


def clip(value, low=0, high=9):
    if value < low:
        return low
    elif value > high:
        return high
    return value


def update(state, by):
    state["n"] = (state["n"] + by) % 23
    return state["n"]


def mode_of(value, mode):
    match mode:
        case "a" | "b":
            return value + 1
        case [first, *_]:
            return value + first
        case {"k": k}:
            return value + k
        case _:
            return value


def classify(value):
    if value < 0:
        return -1
    for i in range(3):
        if value == i:
            return i
        elif value == 7:
            continue
    else:
        value = value + 1
    return value % 5


def first_even(values, default):
    for value in values:
        if value % 2 == 0:
            break
    else:
        return default
    return value


def factorial(n):
    return 1 if n <= 1 else n * factorial(n - 1)


def guarded(value):
    try:
        if value > 3:
            return value
        return -value
    finally:
        value = 100


def both(first, /, second=2, *rest, third=3, **named):
    if first > second:
        return first + third + len(rest) + len(named)
    return second


def replaced(state, by):
    if by > 0:
        return {"m": state["m"] + by}
    return state


def numbers(n):
    for i in range(n):
        yield i


@functools.lru_cache
def shared():
    return {"n": 1}
"""
