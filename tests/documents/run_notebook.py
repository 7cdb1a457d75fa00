# SPDX-License-Identifier: Apache-2.0
"""Run a notebook's cells, one after the other, as Jupyter would.

    python run_notebook.py notebook.ipynb

What a cell ends in is displayed: as text, after the HTML or SVG of a notebook. A cell
that begins with ``%%bash`` is a script; with ``%%writefile name``, a file.
"""

import ast
import json
import linecache
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_cell(code: str, name: str, namespace: dict[str, Any]) -> None:
    """Execute one cell, and display the value of its last line."""
    if code.startswith("%%bash\n"):
        sys.stdout.flush()
        subprocess.run(["bash", "-c", code.partition("\n")[2]], check=True)
        return
    if code.startswith("%%writefile "):
        file, _, content = code.removeprefix("%%writefile ").partition("\n")
        Path(file).write_text(content)
        print(f"Writing {file}")  # noqa: T201
        return
    # Tracebacks, and whoever reads the source of a function, find the cell here.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if hasattr(value, "_repr_html_"):
            print(value._repr_html_())  # noqa: T201
        if value is not None:
            print(repr(value))  # noqa: T201


def main(path: str) -> None:
    """Execute the code cells of a notebook in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(Path(path).read_text())["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            print(f"--- cell {number}")  # noqa: T201
            run_cell("".join(cell["source"]), f"{Path(path).stem}-{number}", namespace)


if __name__ == "__main__":
    main(sys.argv[1])
