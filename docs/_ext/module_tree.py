# SPDX-License-Identifier: Apache-2.0
"""The packages and modules of Tessera, from the first lines of their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tessera"


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, in Markdown.

    Raises:
      ValueError: The module has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.replace("``", "`").replace("|", r"\|")


def packages() -> Iterator[tuple[Path, list[Path]]]:
    """Each package's folder with its modules, the root first."""
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        modules = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py")
        yield folder, modules


def as_markdown() -> str:
    """A list that unfolds: a line for each package, a table of its modules in it."""
    parts = []
    for folder, modules in packages():
        name = folder.relative_to(PACKAGE.parent).as_posix()
        rows = [f"| `{path.name}` | {summary(path)} |" for path in modules]
        parts += [
            f":::{{dropdown}} `{name}/` {summary(folder / '__init__.py')}",
            *(["| Module | What it does |", "| --- | --- |"] if rows else []),
            *rows,
            ":::",
            "",
        ]
    return "\n".join(parts)
