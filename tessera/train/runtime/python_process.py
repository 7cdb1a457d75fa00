# SPDX-License-Identifier: Apache-2.0
"""The command of a Python process that finds modules where this process finds them.

``python -m`` and ``python -c`` look into the current folder first, which may be a
downloaded one: a ``numpy.py`` in it would be executed.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def python_command(program: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a program in an interpreter of its own.

    The program searches this process's folders for modules. An interactive
    interpreter's entry for the current folder is not one of them.

    Args:
      program: Python statements.
      arguments: Its ``sys.argv[1:]``.
    """
    start = f"import sys; sys.path[:] = {_folders(sys.path)!r}"
    return (sys.executable, "-P", "-c", f"{start}\n{program}", *arguments)


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that exits with what ``main()`` of a module returns."""
    program = f"from {module} import main; sys.exit(main())"
    return python_command(program, *arguments)


def _folders(path: Sequence[str]) -> list[str]:
    """The entries of a search path, made absolute, and the folder of this package."""
    folders = [os.path.abspath(entry) for entry in path if entry]
    return [*folders, str(Path(__file__).parents[3])]
