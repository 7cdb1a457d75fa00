# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration: Markdown pages, executed notebooks, API from docstrings."""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

# The notebooks simulate eight devices: see tessera.dist.simulate_devices.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A warning of the debugger about frozen modules would end up in the notebooks.
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")

project = "Tessera"
author = "The Tessera authors"
copyright = "The Tessera authors"  # noqa: A001 - the name that Sphinx reads
release = importlib.metadata.version("tessera-spmd")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "generated_pages",
]
exclude_patterns = ["_build", "_generated", "_ext"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "force"
# These have their outputs: they train for minutes, and one needs Transformers.
nb_execution_excludepatterns = [
    "notebooks/fine-tune.ipynb",
    "notebooks/teach-arithmetic.ipynb",
]
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_output_stderr = "remove"
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_admonition_for_examples = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72

html_theme = "furo"
html_title = "Tessera"
html_static_path = ["_static"]
html_css_files = ["tessera.css"]
html_search_scorer = str(HERE / "_static/search_order.js")
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
# A light and a dark style that keep comments readable.
pygments_style = "friendly"
pygments_dark_style = "monokai"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def set_apart(app: Any, doctree: Any) -> None:
    """Keep contributors' pages out of the search, and decisions out of the sidebar."""
    page = app.env.docname
    if page.startswith("contributing/"):
        app.env.metadata[page]["nosearch"] = ""
    if page.startswith("contributing/decisions/0"):
        app.env.metadata[page]["orphan"] = ""  # their index lists them


def setup(app: Any) -> None:
    """Register with Sphinx."""
    app.connect("doctree-read", set_apart)
