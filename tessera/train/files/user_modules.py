# SPDX-License-Identifier: Apache-2.0
"""Imports modules of the user, and says how they fail."""

import importlib
import os
import sys
import traceback
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """A module; the current folder is searched too."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def described(error: BaseException) -> str:
    """An error, and the line that raised it: ``KeyError ('x', rewards.py:3)``."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__} ({str(error)[:200]}"
    return f"{text}, {line.filename}:{line.lineno})"
