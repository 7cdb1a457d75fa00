# SPDX-License-Identifier: Apache-2.0
"""A definition is found in its file, converted, and keeps its lines and names."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tessera.graph.tracing.control_flow.calls import OPERATORS
from tessera.graph.tracing.control_flow.source import Unconvertible, convert


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
        nonlocal count
        count += 1
        return count

    made = convert(function, OPERATORS)
    assert [made(), function(), made()] == [1, 2, 3]


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


@pytest.mark.parametrize("indent", ["", "    "])
def test_a_block_of_a_page_that_is_not_all_python(tmp_path, indent):
    page = tmp_path / "page.md"
    block = f"{indent}def function(x):\n{indent}    return 1 if x else 2\n"
    page.write_text(f"# A page: not Python\n\n```python\n{block}```\n")
    code = "\n" * 3 + ("if True:\n" if indent else "\n") + block
    names = {}
    exec(compile(code[1:], str(page), "exec"), names)
    made = convert(names["function"], OPERATORS)
    assert (made(True), made(False)) == (1, 2)
    assert made.__code__.co_firstlineno == 4


def generator(n):
    yield n


async def coroutine(n):
    return n


def with_else(n):
    for _ in range(n):
        pass
    else:
        n = 1
    return n


def with_match(n):
    match n:
        case 1:
            return 2


def test_global_variables_are_assigned():
    def function(x):
        global _count
        if x:
            _count = 1

    convert(function, OPERATORS)(True)
    assert globals().pop("_count") == 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (with_match, "it has a match statement"),
        (generator, "it is a generator"),
        (coroutine, "it is async"),
        (with_else, "for/else statement not yet supported"),
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


def test_importing_tessera_does_not_import_malt():
    command = "import sys, tessera; print(any(m == 'malt' for m in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, check=True, text=True
    )
    assert found.stdout == "False\n"
