# SPDX-License-Identifier: Apache-2.0
"""A context in which a context variable has a value."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Give a context variable a value for as long as the context is open."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
