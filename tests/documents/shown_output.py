# SPDX-License-Identifier: Apache-2.0
"""Run the Python blocks of a page, and compare what it shows with what they print.

A page shows output in two ways; every other comment is a remark, and not compared:

- the comment behind a statement ``print(...)`` is all that the statement prints, each
  time that it runs;
- a fence without a language that follows a block, with nothing between them, is all
  that the block prints, and its warnings in the log. Lines are those of a file
  ``train.py`` with the blocks of the page, one below the other.

``…`` stands for any text: what is left out, times, rates, and what else depends on the
machine. Numbers are rounded to the digits that are shown. Spaces are not compared, and
in comments ends of lines neither.
"""

import ast
import contextlib
import io
import linecache
import logging
import re
import sys
import tokenize
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\s+^```\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


def python_blocks(text: str) -> list[str]:
    """The Python of a page or of a section of it."""
    return [block["code"] for block in BLOCK.finditer(text)]


def run(text: str, page: Path, namespace: dict[str, Any]) -> None:
    """Run the blocks of a page or section in one namespace; compare their output."""
    # A reader saves the blocks, one below the other, as ``train.py``.
    name = str(Path.cwd() / "train.py")
    above = page.read_text().partition(text)[0].count("\n")
    for block in BLOCK.finditer(text):
        before = namespace.setdefault("__source__", "")
        namespace["__source__"] = source = before + block["code"]
        # Whose source is asked for, as that of control flow, is found by this name.
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        first = above + text[: block.start("code")].count("\n")
        code = "\n" * before.count("\n") + block["code"]
        try:
            output = _output(code, name, namespace)
        except Exception as error:
            error.add_note(f"in the block at {page}:{first}")
            raise
        for line, shown in _comments(code).items():
            printed = " ".join(output.lines[line].split())
            assert agrees(shown, printed), f"{page}:{first}, {name}:{line}: {printed}"
        if block["shown"] is not None:
            printed = output.getvalue()
            assert agrees(block["shown"], printed), f"{page}:{first}:\n{printed}"


class _Output(io.StringIO):
    """What is printed, and by which line of a file."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.lines = name, defaultdict[int, str](str)

    def write(self, text: str) -> int:
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename != self.name:
            frame = frame.f_back
        if frame:
            self.lines[frame.f_lineno] += text
        return super().write(text)


def _output(code: str, name: str, namespace: dict[str, Any]) -> _Output:
    output = _Output(name)
    warnings = logging.StreamHandler(output)
    warnings.setLevel(logging.WARNING)
    logging.getLogger().addHandler(warnings)
    # A program that is found again has the lines of its source as they are now.
    by_lines = "jax_compilation_cache_include_metadata_in_key"
    found_by_lines = jax.config.values[by_lines]
    jax.config.update(by_lines, True)
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), namespace)
    finally:
        jax.config.update(by_lines, found_by_lines)
        logging.getLogger().removeHandler(warnings)
        sys.stdout.write(output.getvalue())
    return output


def _comments(code: str) -> dict[int, str]:
    """The comments behind ``print(...)``, by the line where the statement begins."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    return {
        node.lineno: comments[node.end_lineno]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "print"
        and node.end_lineno in comments
    }


def agrees(shown: str, printed: str) -> bool:
    """Whether a text is what a page shows."""
    got = _tokens(printed)
    first, *others = (_tokens(part) for part in re.split(r"\s*…\s*", shown))
    if not others:
        return _same(first, got)
    *middle, last = others
    position, end = len(first), len(got) - len(last)
    for part in middle:
        places = range(position, end - len(part) + 1)
        found = (i for i in places if _same(part, got[i : i + len(part)]))
        position = next(found, len(got)) + len(part)
    return (
        position <= end and _same(first, got[: len(first)]) and _same(last, got[end:])
    )


def _tokens(text: str) -> list[str]:
    return re.findall(rf"\n|{NUMBER}|\w+|\S", re.sub(r"\s*\n", "\n", text.strip()))


def _same(shown: list[str], printed: list[str]) -> bool:
    return len(shown) == len(printed) and all(map(_same_token, shown, printed))


def _same_token(shown: str, printed: str) -> bool:
    if shown != printed and all(re.fullmatch(NUMBER, n) for n in (shown, printed)):
        return Decimal(printed).quantize(Decimal(shown)) == Decimal(shown)
    return shown == printed
