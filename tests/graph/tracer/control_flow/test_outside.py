# SPDX-License-Identifier: Apache-2.0
"""What outlives a call is not changed by branches and loops, nor twice by one call."""

import collections
import contextvars
import functools
import io
import itertools
import random
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import ControlFlowError

X = jnp.float32(2.0)
YES, NO = jnp.array(True), jnp.array(False)

count = 0
table = {"n": 0, "inner": {"n": 0}}
log = [1]
tags = {1}
window = collections.deque([1], maxlen=3)
votes = collections.Counter(a=1)
namespace = SimpleNamespace(n=0)
numbers = np.zeros(3)
view = numbers[1:]
generator = np.random.default_rng(0)
context = contextvars.ContextVar("context", default=0)


class Box:
    made = 0

    def __init__(self):
        self.n = 0

    def add(self):
        self.n = self.n + 1


class Single(type):
    def __call__(cls):
        return box


class OnlyBox(metaclass=Single):
    pass


class Slots:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Bag(collections.UserDict):
    pass


box, slots, bag = Box(), Slots(), Bag(n=0)


@functools.cache
def shared():
    return {"n": 0}


def assign_global():
    global count
    count = count + 1


def assign_by_globals():
    globals()["count"] = 1


def add_to_argument(values=[]):  # noqa: B006 - what is tested
    values.append(1)


def set_attribute():
    setattr(box, "n", 1)  # noqa: B010 - what is tested


def set_function_attribute():
    set_attribute.calls = 1


def add_in_place():
    global log
    log += [2]


CHANGES = {
    "a global variable": assign_global,
    "a global variable by globals()": assign_by_globals,
    "a global dict": lambda: table.update(n=1),
    "an inner dict": lambda: table["inner"].__setitem__("n", 1),
    "a global list": lambda: log.append(2),
    "a global list in place": add_in_place,
    "a set": lambda: tags.add(2),
    "a deque": lambda: window.append(2),
    "a Counter": lambda: votes.update("a"),
    "an object": lambda: box.add(),
    "an object by a partial of its method": lambda: functools.partial(box.add)(),
    "an object by setattr": set_attribute,
    "an object with slots": lambda: slots.__setattr__("n", 1),
    "a class": lambda: setattr(Box, "made", 1),
    "the class of an object": lambda: setattr(type(Box()), "made", 1),
    "the one object of a class": lambda: setattr(OnlyBox(), "n", 1),
    "what a deque held": lambda: collections.deque([log]).popleft().append(2),
    "a list by a method given to map": lambda: list(map(log.append, [2])),
    "a function": set_function_attribute,
    "a namespace": lambda: setattr(namespace, "n", 1),
    "a user's dict": lambda: bag.update(n=1),
    "a default argument": add_to_argument,
    "a cached value": lambda: shared().update(n=1),
    "a list of a library": lambda: sys.path.append("new"),
    "an array": lambda: numbers.fill(1),
    "a view of an array": lambda: view.__setitem__(0, 1),
    "an array by out=": lambda: np.add(1, 2, out=numbers[:1]),
    "a random generator": lambda: generator.random(),
    "the random module": lambda: random.random(),
    "NumPy's random numbers": lambda: np.random.rand(),
    "a context variable": lambda: context.set(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_branch_that_changes_what_outlives_the_call_is_refused(change):
    @ts.function
    def function(x, flag):
        if flag:
            change()
        return x

    before = held()
    with pytest.raises(ControlFlowError) as caught:
        function(X, NO)
    assert f" {__file__}:" in str(caught.value)
    assert held() == before


def held():
    """Everything that the changes above could have changed."""
    return repr(
        [
            (count, table, log, tags, window, votes, namespace, bag, shared(), box.n),
            (slots.n, Box.made, vars(set_attribute), add_to_argument.__defaults__),
            (numbers.tolist(), generator.bit_generator.state, random.getstate()),
            (np.random.get_state(), context.get(), sys.path),
        ]
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_loop_that_changes_what_outlives_the_call_is_refused(change):
    @ts.function
    def function(x, n):
        for i in range(2):
            if i >= n:
                break
            change()
        return x

    before = held()
    with pytest.raises(ControlFlowError):
        function(X, jnp.int32(0))
    assert held() == before


ITERATORS = {
    "iter": lambda: iter([1, 2, 3]),
    "zip": lambda: zip([1, 2], [3, 4], strict=True),
    "enumerate": lambda: enumerate([1, 2]),
    "map": lambda: map(abs, [1, 2]),
    "a generator": lambda: (i for i in [1, 2, 3]),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2]),
    "islice": lambda: itertools.islice([1, 2, 3], 2),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
@pytest.mark.parametrize(
    "use",
    [
        next,
        lambda it: [(v,) for v in it][:1],
        lambda it: 1 in it,
        lambda it: (*it,)[:1],
    ],
    ids=["next", "comprehension", "in", "unpacking"],
)
def test_an_iterator_from_before_a_branch_is_not_moved_on_in_it(make, use):
    @ts.function
    def function(x, flag):
        values = make()
        if flag:
            use(values)
        return x

    if make in (ITERATORS["count"], ITERATORS["cycle"]):
        use = next  # they do not end
    with pytest.raises(ControlFlowError, match="the iterator 'values' is used"):
        function(X, NO)


def test_a_container_that_a_library_may_keep_is_not_changed_in_a_branch():
    @ts.function
    def function(x, flag):
        state = shared()
        if flag:
            state["n"] = x
        return x

    with pytest.raises(ControlFlowError, match="'state' is changed at"):
        function(X, NO)
    assert shared() == {"n": 0}


def test_a_container_that_jax_returns_may_be_changed_in_a_branch():
    @ts.function
    def function(x, flag):
        tree = jax.tree.map(jnp.negative, {"n": x})
        if flag:
            tree["n"] = x
        return tree["n"]

    assert [float(function(X, f)) for f in (YES, NO)] == [2, -2]


def test_an_iterator_that_a_branch_makes_is_its_own():
    @ts.function
    def function(x, flag):
        if flag:
            values = iter([1.0, 2.0])
            next(values)
            x = x + next(values)
        return x

    assert [float(function(X, f)) for f in (YES, NO)] == [4, 2]


def test_a_loop_over_rows_may_move_on_an_iterator():
    @ts.function
    def function(x, rows):
        values = iter([1.0, 2.0, 3.0])
        for row in rows:
            x = x + row * next(values) if row > 0 else x
        return x

    with pytest.raises(ControlFlowError, match="the iterator 'values' is used"):
        function(X, jnp.arange(3.0))

    @ts.function
    def weighted(x, rows):
        values = iter([1.0, 2.0, 3.0])
        for row in rows:
            weight = next(values)
            x = x + row * weight if row > 0 else x
        return x

    assert float(weighted(X, jnp.arange(3.0))) == 2 + 2 + 6


class Countdown:
    """An iterator whose position is an attribute."""

    def __init__(self):
        self.left = 3

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return float(self.left)


LEFT = {
    "an object of the user's": Countdown,
    "iter": lambda: iter([1.0, 2.0, 3.0]),
    "a generator": lambda: (i + 1.0 for i in range(3)),
    "map": lambda: map(float, [1, 2, 3]),
    "enumerate": lambda: enumerate([1.0, 2.0, 3.0]),
    "zip": lambda: zip([1.0, 2.0], [1.0, 2.0], strict=True),
    "reversed": lambda: reversed([1.0, 2.0]),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_an_iterator_is_not_left_by_a_break_that_only_the_program_knows(make):
    @ts.function
    def function(x):
        values = make()
        for _ in values:
            if x > 1.0:
                break
        return x + len([*values])

    with pytest.raises(ControlFlowError, match="an iterator is left by a `break`"):
        function(X)


def test_a_loop_over_a_list_may_be_left():
    @ts.function
    def function(x):
        total = 0.0
        names = {"a": 1.0, "b": 2.0, "c": 3.0}
        for i, (_name, value) in list(enumerate(names.items())):
            if x < value:
                break
            total = total + value + i
        for value in [1.0, 2.0, 3.0][::-1]:
            if x > value:
                break
            total = total + value * 100.0
        return total

    assert [float(function(jnp.float32(x))) for x in (0.5, 2.5)] == [600, 304]


def test_an_iterator_inside_of_another_is_not_left_by_a_break():
    @ts.function
    def function(x):
        values = iter([1.0, 2.0, 3.0])
        for i, value in enumerate(values):
            if x > value + i:
                break
        return x + next(values)

    with pytest.raises(ControlFlowError, match="an iterator is left by a `break`"):
        function(X)


def test_a_file_is_not_written_in_a_branch():
    file = io.StringIO()

    @ts.function
    def function(x, flag):
        if flag:
            file.write("text")
        return x

    with pytest.raises(ControlFlowError, match="what cannot be undone"):
        function(X, NO)
    assert file.getvalue() == ""


def test_an_object_of_a_library_is_not_assigned_into_in_a_branch():
    local = threading.local()

    @ts.function
    def function(x, flag):
        if flag:
            local.n = x
        return x

    with pytest.raises(ControlFlowError, match="'local' is changed at"):
        function(X, NO)


DRAWS = {
    "a generator that the branch makes": lambda: random.Random(3).randint(1, 6),
    "a generator that is handed on": lambda: [*map(generator.integers, [6])],
    "a seed": lambda: np.random.seed(3),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_are_not_drawn_in_a_branch(draw):
    @ts.function
    def function(x, flag):
        if flag:
            draw()
        return x

    before = held()
    with pytest.raises(ControlFlowError, match=r"use jax\.random with a key"):
        function(X, NO)
    assert held() == before


def straight_list(calls):
    calls.append("call")


def straight_entry(calls):
    calls[0] = "call"


def straight_attribute(calls):
    box.n = box.n + 1


@pytest.mark.parametrize("change", [straight_list, straight_entry, straight_attribute])
def test_straight_code_of_a_converted_function_changes_nothing_outside(change):
    calls = [""]

    @ts.function
    def function(x, flag):
        if flag:
            x = -x
        change(calls)
        return x

    with pytest.raises(ControlFlowError, match="and this code has not made it"):
        function(X, YES)
    assert (calls, box.n) == ([""], 0)


def test_straight_code_of_a_converted_function_writes_into_no_array_outside():
    @ts.function
    def function(x, flag):
        numbers[0] += 1
        return x if flag else -x

    with pytest.raises(ControlFlowError, match="'numbers' is changed at"):
        function(X, YES)
    numbers[0] = 0


def test_a_function_that_is_traced_twice_does_not_use_up_an_iterator():
    values = iter([1.0, 2.0, 3.0])

    @ts.function
    def function(x, flag):
        y = next(values)
        return x + y if flag else x

    with pytest.raises(ControlFlowError, match="the iterator 'values' is used"):
        function(X, YES)
