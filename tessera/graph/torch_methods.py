# SPDX-License-Identifier: Apache-2.0
"""PyTorch's methods and keywords on traced arrays: an error that says what to write."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from tessera.errors import OperandError, TesseraError
from tessera.errors.torch_names import KEYWORDS, METHODS
from tessera.graph.tracer.control_flow.user_code import line_of
from tessera.jax_compat import jaxprs

_KEYWORD = re.compile(r"_?(\w+)\(\) got an unexpected keyword argument '(\w+)'")
# What JAX's method or attribute says of the arguments of PyTorch's.
_OTHER_MEANING = re.compile(
    r"'int' object is not callable|Cannot interpret .* as a data type|.* argument of "
    r"array.view|Unexpected value for 'order' argument"
)


@contextmanager
def methods_explained() -> Iterator[None]:
    """Turn JAX's error about what PyTorch's tensors have into one with a fix.

    Raises:
      OperandError: [T401] it is such a method or keyword, or a function of JAX.
    """
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        found = None if isinstance(error, TesseraError) else _explained(error)
        if found is None:
            raise
        raise found from error


def _explained(error: Exception) -> OperandError | None:
    if keyword := _KEYWORD.match(str(error)):
        function, name = keyword.groups()
        what, fix = f"{function}() has no keyword", KEYWORDS.get(name)
        if not any(hasattr(module, function) for module in (jnp, jax.nn, jax.lax)):
            return None
        if function in ("std", "var") and name == "dim":
            fix = f"{fix} and {KEYWORDS['unbiased']}"
    else:
        name, what = _method(error), "arrays have no method"
        fix = METHODS.get(name)
        if name.endswith("_") and not name.endswith("__"):
            fix = fix or "x = x + y, or x.at[0].set(y): arrays do not change in place"
        for module in (jnp, jax.nn):
            if fix is None and callable(getattr(module, name, None)):
                fix = f"{module.__name__.replace('jax.numpy', 'jnp')}.{name}(x, ...)"
    if fix is None:
        return None
    return OperandError(f"{what} {name!r} as PyTorch's tensors have", fix=fix)


def _method(error: Exception) -> str:
    """The method or attribute of a traced array that an error is about, or ``""``."""
    if isinstance(getattr(error, "obj", None), jaxprs.Tracer):
        return str(getattr(error, "name", ""))
    if not _OTHER_MEANING.match(str(error)):
        return ""
    names = re.findall(r"\.(view|size|flatten)\(", line_of(error)[1])
    return names[0] if len(names) == 1 else ""
