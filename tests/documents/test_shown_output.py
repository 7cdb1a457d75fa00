# SPDX-License-Identifier: Apache-2.0
"""What a page shows is compared with what its blocks print."""

import pytest

from tests.documents.shown_output import agrees, run


def page(folder, *blocks):
    path = folder / "page.md"
    path.write_text("# A page\n\n" + "\n\n".join(blocks) + "\n")
    return path


def python(code):
    return f"```python\n{code}\n```"


def output(text):
    return f"```\n{text}\n```"


def compare(path):
    run(path.read_text(), path, {})


RIGHT = [
    [python("print(2 / 3)  # 0.667")],
    [python("for i in range(3):\n    print(i)  # 0 1 2")],
    [python("print(\n    [1.04],\n)  # [1.0]")],
    [python("x = 1"), python("print(x)"), output("1")],
    [python("print(1)\nprint(2)  # 2"), output("1\n2")],
    [python("import logging\nlogging.warning('look out')"), output("look out")],
    [python("print(1)"), "Words.", output("another program")],
    [python("print(1)"), "```sh\nmake\n```"],
    [python("x = 3  # 4, a remark\nx  # 4\nassert x == 3  # 4")],
]
WRONG = [
    [python("print(2 / 3)  # 0.666")],
    [python("for i in range(3):\n    print(i)  # 2")],
    [python("def f():\n    print(1)  # 1")],
    [python("x = 1"), python("print(x)"), output("2")],
    [python("print(1)\nprint(2)  # 2"), output("1")],
    [python("print(1)  # the first number")],
]


@pytest.mark.parametrize("blocks", RIGHT)
def test_a_page_that_shows_what_it_prints(tmp_path, blocks):
    compare(page(tmp_path, *blocks))


@pytest.mark.parametrize("blocks", WRONG)
def test_a_page_that_shows_something_else(tmp_path, blocks):
    with pytest.raises(AssertionError, match=r"page\.md"):
        compare(page(tmp_path, *blocks))


def test_lines_are_those_of_a_file_with_the_blocks(tmp_path):
    code = """import inspect
frame = inspect.currentframe()
print(f"{frame.f_code.co_filename}:{frame.f_lineno}")"""
    first, second = (output(f"…train.py:{line}") for line in (3, 6))
    compare(page(tmp_path, python(code), first, python(code), second))


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("…", "anything"),
        ("took … ms", "took 8.61 ms"),
        ("a\n…\nz", "a\nb\nc\nz"),
        ("a … c … e", "a b c d c e"),
        ("1.0e-05", "1.04e-05"),
        ("3.14", "3.14159"),
        ("-0.5", "-0.4999"),
        ("a  b", "a b  "),
    ],
)
def test_texts_that_agree(shown, printed):
    assert agrees(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took … ms", "took 8.61 s"),
        ("a … a", "a"),
        ("3.15", "3.14159"),
        ("3.141", "3.14159"),
        ("1.5", "-1.5"),
        ("12", "1"),
        ("a\nb", "a b"),
        ("x … 5", "x 15"),
        ("", "something"),
    ],
)
def test_texts_that_do_not(shown, printed):
    assert not agrees(shown, printed)
