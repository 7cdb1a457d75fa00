# SPDX-License-Identifier: Apache-2.0
"""Imports libraries that are optional extras of Tessera."""

import importlib
import warnings
from typing import Any

from tessera.errors import TesseraError


def import_extra(
    library: str, needed_by: str, extra: str, error_class: type[TesseraError]
) -> Any:
    """A module of a library that only some files need.

    Args:
      library: The module.
      needed_by: The file that needs it.
      extra: The extra that installs it.
      error_class: The error if it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # Types that SWIG generates cause a warning on Python 3.12.
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(library)
    except ImportError as error:
        fix = f"run: pip install 'tessera-spmd[{extra}]'"
        if extra == "tokenizers":
            fix += "\nor use data.tokenizer=bytes, which needs nothing"
        raise error_class(
            f"reading {needed_by!r} needs the library {library!r}",
            got=str(error),
            fix=fix,
        ) from error
