# SPDX-License-Identifier: Apache-2.0
"""How many lines of code each room may have: the table may only fall.

Docstrings, comments and blank lines are not counted. Whoever raises a number writes a
decision record that says what users get for it.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tessera"

LAYER = {
    "": 978,
    "analysis": 3_232,
    "annotations": 703,
    "debug": 768,
    "errors": 376,
    "foundations": 529,
    "graph": 11_798,
    "jax_compat": 1_081,
    "ops": 3_794,
    "targets": 646,
    "tracing": 906,
}

TRAINER = {
    "": 2,
    "checkpoints": 1_716,
    "commands": 815,
    "config": 2_243,
    "data": 3_743,
    "files": 364,
    "loop": 4_791,
    "models": 5_337,
    "objectives": 482,
    "planner": 2_599,
    "records": 225,
    "report": 816,
    "rewards": 477,
    "rollouts": 1_330,
    "runtime": 2_590,
    "trackers": 198,
}


def lines_of_code(path: Path) -> int:
    """Lines with a token that is neither a comment nor a docstring."""
    text = path.read_text()
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    silent |= {tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def sizes(folder: Path) -> dict[str, int]:
    """Lines of code of each room of a folder; its own modules are the room ""."""
    rooms = {
        each.name: each.rglob("*.py") for each in folder.iterdir() if each.is_dir()
    }
    found = {name: sum(map(lines_of_code, files)) for name, files in rooms.items()}
    own = sum(map(lines_of_code, folder.glob("*.py")))
    return {"": own, **{name: count for name, count in found.items() if count}}


@pytest.mark.slow(reason="it reads every module")
def test_no_room_is_larger_than_the_table_says():
    layer = sizes(PACKAGE)
    del layer["train"]
    for table, found in ((LAYER, layer), (TRAINER, sizes(PACKAGE / "train"))):
        assert found.keys() == table.keys()
        grown = {name: n for name, n in found.items() if n > table[name]}
        assert not grown, "remove what a new mechanism replaces"


def test_the_root_has_at_most_14_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= 14
