# SPDX-License-Identifier: Apache-2.0
"""Flax's error about objects of another trace, as one with a fix."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera.errors import WriteBackError
from tessera.jax_compat import jaxprs


@contextmanager
def changes_explained() -> Iterator[None]:
    """Turn Flax's error about changes inside a trace into one with a fix.

    Raises:
      WriteBackError: [T320] an object was changed that is not of the trace.
    """
    try:
        yield
    except Exception as error:
        flax_errors: Any = sys.modules.get("flax.errors")
        if flax_errors is None or not isinstance(error, flax_errors.TraceContextError):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        users = [
            frame for frame in frames if not jaxprs.is_library_code(frame.filename)
        ]
        line = f"\nat {users[-1].filename}:{users[-1].lineno}" if users else ""
        raise WriteBackError(
            "an NNX object was changed, and cannot be given back",
            got=str(error).partition(" (http")[0] + line,
            fix="pass it to the function as an argument, where it is closed over\n"
            "in a loop, a branch or a transformation use Flax's own: nnx.scan, "
            "nnx.cond, nnx.vmap\n"
            "in a stage of a pipeline return what is new",
        ) from error
