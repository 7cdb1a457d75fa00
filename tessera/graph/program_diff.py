# SPDX-License-Identifier: Apache-2.0
"""Diffs two programs as text, up to the names of their variables.

JAX names variables in order, so one new equation renames all that follow. This module
pairs lines up to names, gives the variables of the later program the names of the
earlier one, and then compares the texts. (Neither JAX nor ``difflib`` compares up to
renaming.)
"""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher, unified_diff

_BINDER = re.compile(r"(?<![\w.=])([a-z]{1,3}):(?=[a-z]+\d*\[|\w+<)")
# A word of at most three letters, which is a variable unless it is what an equation
# does ('= mul b c') or a setting of it ('name=sin').
_WORD = re.compile(r"(?<! = )(?<![\w.=/'\"])([a-z]{1,3})(?![\w=\[.'\"])")
_LINE = re.compile(r"\s+(# .+?:\d+)(?::\d+)?( \(.*\))?$")  # a path may have spaces


def diff_programs(before: str, after: str, *, name: str) -> str:
    r"""The lines that differ, as a unified diff without context; empty if none do.

    A variable of the later program alone has a name of its own, such as ``c'``.

    Args:
      before: A program as ``Graph.as_text()`` has it.
      after: Another.
      name: What lies between them, for the header.

    Example:
      >>> old = "a:f32[] = sin b\nc:f32[] = neg a"
      >>> new = "a:f32[] = sin b\nc:f32[] = exp a\nd:f32[] = neg c"
      >>> print(diff_programs(old, new, name="pass"))
      --- before pass
      +++ after pass
      @@ -2 +2,2 @@
      -c:f32[] = neg a
      +c':f32[] = exp a
      +c:f32[] = neg c'
    """
    old, new = _lines(before), _lines(after)
    header = f"before {name}", f"after {name}"
    names = _names(old, new)
    renamed = [_renamed(line, names) for line in new]
    return "\n".join(unified_diff(old, renamed, *header, n=0, lineterm=""))


def _lines(text: str) -> list[str]:
    """Lines with one form of source line, and equations with settings in one line each.

    What is around an equation decides how far JAX indents its source line.
    """
    lines = [_LINE.sub(r"  \1", line) for line in text.splitlines()]
    found: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        code, _, source = line.partition("  # ")
        end = _end(lines, index - 1) if code.endswith("[") else None
        if end is not None:
            settings = " ".join(each.strip() for each in lines[index:end])
            line = f"{code}{settings}{lines[end].strip()}"
            line += f"  # {source}" if source else ""
            index = end + 1
        found.append(line)
    return found


def _end(lines: list[str], start: int) -> int | None:
    """Where an equation's settings end, unless they hold a program."""
    end = " " * (len(lines[start]) - len(lines[start].lstrip())) + "]"
    for index in range(start + 1, len(lines)):
        if lines[index].startswith(end):
            return index
        if "lambda" in lines[index]:
            return None
    return None


def _names(old: list[str], new: list[str]) -> dict[str, str]:
    """For each variable of the new program its name in the old one, or a new name."""
    found: dict[str, str] = {}
    for line, other in _paired(old, new):
        binders = zip(_BINDER.findall(line), _BINDER.findall(other), strict=False)
        for was, now in binders:
            found.setdefault(now, was)
    taken = {name for line in old for name in _BINDER.findall(line)}
    for name in (name for line in new for name in _BINDER.findall(line)):
        if name not in found:
            found[name] = f"{name}'" if name in taken else name
    return found


def _paired(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """Lines that are the same but for the names of variables."""
    heads = [next((x for x in lines if "lambda" in x), "") for lines in (old, new)]
    yield heads[0], heads[1]  # inputs keep their order, and others are added after them
    forms = [[_WORD.sub("_", line) for line in lines] for lines in (old, new)]
    matcher = SequenceMatcher(None, *forms, autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from zip(
            old[block.a : block.a + block.size],
            new[block.b : block.b + block.size],
            strict=True,
        )


def _renamed(line: str, names: dict[str, str]) -> str:
    code, comment, source = line.partition("  # ")
    code = _WORD.sub(lambda word: names.get(word[1], word[1]), code)
    return code + comment + source
