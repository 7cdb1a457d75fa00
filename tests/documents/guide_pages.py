# SPDX-License-Identifier: Apache-2.0
"""The code blocks of a page in ``docs/guides``, by the heading that they are under."""

import linecache
import re
from pathlib import Path
from typing import Any

from tests.documents import shown_output

GUIDES = Path(__file__).parents[2] / "docs/guides"


def section(page: str, heading: str) -> str:
    """The text between a heading of any level and the next one."""
    text = (GUIDES / page).read_text()
    pattern = rf"^#+ {re.escape(heading)}$(.*?)(?=^## |^### |\Z)"
    (found,) = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    return found


def blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a language."""
    fenced = rf"^```{language}\n(.*?)^```"
    return re.findall(fenced, text, re.DOTALL | re.MULTILINE)


def run(page: str, heading: str, namespace: dict[str, Any]) -> None:
    """Execute the Python blocks under a heading, as they are."""
    text = section(page, heading)
    assert blocks(text), heading
    shown_output.run(text, GUIDES / page, namespace)


def execute(block: str, title: str, namespace: dict[str, Any]) -> None:
    """Execute code whose source is found by a name."""
    # Control flow is converted from the source, which is looked up here.
    name = f"<{title}>"
    linecache.cache[name] = (len(block), None, block.splitlines(True), name)
    exec(compile(block, name, "exec"), namespace)
