# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration: Markdown pages, and the interface from its docstrings."""

import importlib.metadata

project = "Tessera"
release = importlib.metadata.version("tessera")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
html_theme = "alabaster"
