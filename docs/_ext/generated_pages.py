# SPDX-License-Identifier: Apache-2.0
"""A Sphinx extension that writes ``docs/_generated`` before the pages are read."""

from pathlib import Path
from typing import Any

import figures
import module_tree
import settings_tables

# Made by report_pictures.py, which needs a browser.
REPORTS = {
    "report-resumed.png": "The report of a run that was resumed: summary and curves",
    "report-compared.png": "The report of two runs, with their curves over each other",
}


def report_pictures(folder: Path) -> str:
    """The screenshots of reports that there are, or where they are made."""
    images = [
        f"![{words}](/_generated/{name})"
        for name, words in REPORTS.items()
        if (folder / name).is_file()
    ]
    return "\n\n".join(images or ["`make docs-browser` adds screenshots here."]) + "\n"


def write(folder: Path) -> None:
    """Write every generated figure and text; leave what is up to date as it is."""
    folder.mkdir(exist_ok=True)
    texts = {name: draw() for name, draw in figures.FIGURES.items()}
    texts["report-pictures.md"] = report_pictures(folder)
    texts["module-tree.md"] = module_tree.as_markdown()
    texts.update(settings_tables.tables())
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "_generated"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
