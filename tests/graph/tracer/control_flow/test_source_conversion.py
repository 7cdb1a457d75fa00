# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: UP031, SIM107 - what may be written is what is tested
"""A definition is found in its file, converted, and keeps its lines and names."""

import linecache
from types import SimpleNamespace

import pytest

from tessera.graph.tracer.control_flow.converted_calls import OPERATORS
from tessera.graph.tracer.control_flow.function_source import Unconvertible
from tessera.graph.tracer.control_flow.source_conversion import convert


def test_a_converted_function_computes_the_same_without_traced_values():
    scale = 3

    def function(n, start=1, *rest, flag=False, **more):
        """What it does."""
        total = start
        for i in range(n):
            if i == 2 and not flag:
                continue
            if i > 4:
                break
            total += i * scale
        while total > 100:
            total -= 1
        return total, rest, sorted(more)

    made = convert(function, OPERATORS)
    for arguments in ((3,), (9, 2), (9, 2, "a"), (90, 200)):
        assert made(*arguments, b=1) == function(*arguments, b=1)
        assert made(*arguments, flag=True) == function(*arguments, flag=True)


def test_it_has_the_name_the_file_and_the_lines_of_the_original():
    def function(x):
        if x:
            raise KeyError(x)

    made = convert(function, OPERATORS)
    assert made.__qualname__ == function.__qualname__
    assert made.__code__.co_filename == __file__
    with pytest.raises(KeyError) as caught:
        made(1)
    last = caught.traceback[-1]
    assert last.frame.code.raw.co_qualname == function.__qualname__
    assert last.lineno + 1 == function.__code__.co_firstlineno + 2


def test_closures_are_shared_with_the_original():
    count = 0

    def function():
        return count

    made = convert(function, OPERATORS)
    count = 1
    assert made() == function() == 1


def test_lambdas_of_one_line_are_told_apart():
    first, second = (lambda x: 1 if x else 0), (lambda x: 2 if x else 0)
    made = [convert(each, OPERATORS) for each in (first, second)]
    assert [each(True) for each in made] == [1, 2]


def test_decorators_and_annotations_are_not_run_again():
    runs = []

    def decorator(function):
        runs.append(function.__name__)
        return function

    @decorator
    def function(x: runs.append("x") = 1) -> runs.append("result"):
        return x

    before = list(runs)
    assert convert(function, OPERATORS)() == 1
    assert runs == before


def test_a_continued_line_and_text_of_several_lines_keep_the_lines_after_them():
    # fmt: off
    def function(x):
        text = """one
two"""
        y = x + \
            1
        if y:
            raise KeyError(text)
    # fmt: on

    made = convert(function, OPERATORS)
    with pytest.raises(KeyError) as caught:
        made(1)
    assert caught.traceback[-1].lineno == function.__code__.co_firstlineno + 5


def test_a_function_of_a_page_that_is_not_all_python_is_not_converted(tmp_path):
    page = tmp_path / "page.md"
    block = "def function(x):\n    return 1 if x else 2\n"
    page.write_text(f"# A page: not Python\n\n```python\n{block}```\n")
    names = {}
    exec(compile("\n" * 3 + block, str(page), "exec"), names)
    with pytest.raises(Unconvertible, match="its source does not parse"):
        convert(names["function"], OPERATORS)


def generator(n):
    yield n


async def coroutine(n):
    return n


def leaves_finally(n):
    try:
        return n
    finally:
        return -n  # noqa: B012 - what is tested


def asks_for_its_variables(n):
    return locals()


def assigns_a_global_variable():
    global _count
    _count = 1


def generator_that_assigns():
    global _count
    _count = yield


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (assigns_a_global_variable, "_count"),
        (generator_that_assigns, "_count"),
        (generator, "it is a generator"),
        (coroutine, "it is async"),
        (leaves_finally, "a jump leaves its finally block"),
        (asks_for_its_variables, "it calls locals()"),
        (
            eval(compile("lambda x: x", "<made here>", "eval")),
            "its source is not to be had, from <made here>",
        ),
    ],
)
def test_what_cannot_be_converted_says_why(function, why):
    with pytest.raises(Unconvertible) as caught:
        convert(function, SimpleNamespace())
    assert str(caught.value) == why


def with_every_statement(n, values):
    """What a function may hold that is not control flow on traced values."""
    import math as maths

    found: list[object] = []
    for value in values:
        if value == n:
            found.append("n")
            break
    else:
        found.append("no n")
    count = 0
    while count < 3:
        count += 1
        if count == n:
            continue
        found.append(count)
    else:
        found.append("end")
    match values:
        case [int(first), *rest] if first > 1:
            found.append((first, rest))
        case {"key": value} | [value]:
            found.append(value)
        case _:
            found.append("other")
    try:
        found.append([1, 2][n])
    except IndexError as error:
        found.append(type(error).__name__)
    else:
        found.append("no error")
    finally:
        found.append("finally")
    if (half := n / 2) > 0.5 and (double := n * 2) > 1:
        found.append((half, double))
    del count
    first, *rest = "abc"
    found.append(f"{first!r:>4}{rest}{maths.floor(half):03d}" + "%s-%d" % ("a", n))

    class Local:
        size = n

        def get(self, *more, **named):
            return self.size, more, named

    found.append(Local().get(*[1], 2, key=3, **{"other": 4}))
    found.append([i * j for i in range(3) if i for j in (1, 2)])
    found.append({k: (lambda v=v: v)() for k, v in {"a": n}.items()})
    return found


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("values", [(1, 2, 3), [2], {"key": 5}, []])
def test_every_statement_does_what_python_does(n, values):
    made = convert(with_every_statement, OPERATORS)
    assert made(n, values) == with_every_statement(n, values)


class Model:
    """A class with private names."""

    __scale = 3

    def __init__(self, __start):
        self.__start = __start

    def scaled(self, by):
        def inner(value):
            return value + self.__start

        return inner(by) * self.__scale

    def total(self):
        return sum(self.__start for _ in range(2)) + Model.__scale

    def base(self):
        return [super().__init__, __class__]


@pytest.mark.parametrize("name", ["scaled", "total"])
def test_private_names_are_those_of_the_class(name):
    function = vars(Model)[name]
    arguments = (2,) if name == "scaled" else ()
    made = convert(function, OPERATORS)
    assert made(Model(4), *arguments) == function(Model(4), *arguments)


def test_super_in_a_converted_method_is_that_of_its_class():
    made = convert(Model.base, OPERATORS)
    found, owner = made(Model(4))
    assert found.__objclass__ is object
    assert owner is Model


class Child(Model):
    """A class whose method has a function inside that calls its base's."""

    def scaled(self, by):
        def of_base(self):
            return super().scaled(by)

        return of_base(self) + 1


def test_super_in_a_function_inside_of_a_converted_method():
    made = convert(Child.scaled, OPERATORS)
    assert made(Child(4), 2) == Child(4).scaled(2) == 19


def test_functions_that_are_alike_keep_the_files_that_they_are_from():
    text = "def function(x):\n    return 1 if x else 2\n"
    found = []
    for name in ("<first>", "<second>"):
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        names = {}
        exec(compile(text, name, "exec"), names)
        found.append(convert(names["function"], OPERATORS).__code__.co_filename)
    assert found == ["<first>", "<second>"]
