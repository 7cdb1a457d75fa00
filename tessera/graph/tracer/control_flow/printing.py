# SPDX-License-Identifier: Apache-2.0
"""``print`` and text of traced values: printed when the program runs.

It prints the values of the run, and in a branch only if the branch is taken. Text that
is formatted from traced values keeps them until then.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from tessera.errors import ArgumentError, ControlFlowError
from tessera.graph.tracer.control_flow.absent_values import Unusable
from tessera.graph.tracer.control_flow.conversion_state import current
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs
from tessera.tracing import scope

_Part = str | tuple[Any, str, str]


class RuntimeText:
    """Text with values in it that are known when the program runs.

    It can be printed, and become a part of other such text. Whatever asks for its
    characters gets [T319].

    Args:
      parts: Text, and values with the conversion and the format of each.
    """

    def __init__(self, parts: Iterable[_Part]) -> None:
        self.parts = tuple(parts)

    def __add__(self, other: Any) -> "RuntimeText":
        return RuntimeText([*self.parts, *_parts(other)])

    def __radd__(self, other: Any) -> "RuntimeText":
        return RuntimeText([*_parts(other), *self.parts])

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # JAX and Python ask what it can do
            raise AttributeError(name)
        raise text_error(f"str.{name}")

    def _characters(self, *_: Any) -> NoReturn:
        error, conversion = text_error("the characters"), current()
        if conversion is not None:
            conversion.refuse(error)
        raise error

    __eq__ = __ne__ = __lt__ = __gt__ = __hash__ = _characters  # type: ignore[assignment]
    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _characters
    __mod__ = __mul__ = __rmul__ = __str__ = __repr__ = __format__ = _characters


def text_error(use: str) -> ControlFlowError:
    """The error [T319] for Python code that needs the text of a traced value."""
    return ControlFlowError(
        f"Python needs text at {user_line()} that is only known when the program runs",
        got=f"{use} of text with traced values in it",
        fix="print it as an f-string, or give back the values and make the text from "
        "them",
    )


def format_string(*parts: _Part) -> Any:
    """An f-string, from its parts."""
    if is_traced([part[0] for part in parts if isinstance(part, tuple)]):
        return RuntimeText(inner for part in parts for inner in _parts(part))
    return _joined(parts)


def str_(*args: Any, **kwargs: Any) -> Any:
    """``str``."""
    if len(args) == 1 and not kwargs and is_traced(args[0]):
        return format_string((args[0], "", ""))
    return str(*args, **kwargs)


def method_of_text(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A method of Python's text, such as ``format`` and ``join``."""
    args = tuple([*each] if isinstance(each, Iterator) else each for each in args)
    if is_traced((args, kwargs)):
        raise text_error(f"str.{method.__name__}")
    return method(*args, **kwargs)


def is_traced(values: Any) -> bool:
    """Whether values contain traced ones, or text of these."""
    kinds = (jaxprs.Tracer, RuntimeText)
    return any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(values))


def _parts(part: Any) -> tuple[_Part, ...]:
    """What text consists of: ``part`` may be such text itself."""
    text = part[0] if isinstance(part, tuple) and part[1:] == ("", "") else part
    return text.parts if isinstance(text, RuntimeText) else (part,)


def print_(*values: Any, **options: Any) -> None:
    """``print``, when the program runs.

    Values of several devices are gathered and printed once; in a manual region every
    device prints its own.
    """
    if scope.current() is None:  # it runs: this is code that a program calls back
        print(*values, **options)  # noqa: T201
        return
    texts = [_parts((value, "", "")) for value in values]
    leaves, tree = jax.tree.flatten(texts)
    if any(isinstance(leaf, RuntimeText) for leaf in leaves):
        raise text_error("a container")
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def emit(*arrays: Any) -> None:
        known = list(leaves)
        for index, array in zip(traced, arrays, strict=True):
            known[index] = _plain(np.asarray(array))
        found = map(_joined, jax.tree.unflatten(tree, known))
        print(*found, **options)  # noqa: T201

    jax.debug.callback(emit, *(leaves[index] for index in traced))


def _joined(parts: Iterable[_Part]) -> str:
    return "".join(p if isinstance(p, str) else _formatted(*p) for p in parts)


def _formatted(value: Any, conversion: str, spec: str) -> str:
    if conversion or not isinstance(value, np.generic):
        value = jax.tree.map(_readable, value)
    if conversion:
        value = {"r": repr, "s": str, "a": ascii}[conversion](value)
    # Some dtypes, such as bfloat16, have no formats of their own.
    plain = value.item() if isinstance(value, np.generic) and spec else value
    return format(plain, spec)


def _readable(leaf: Any) -> Any:
    """A NumPy number as the Python number that prints with as few digits."""
    if not isinstance(leaf, np.generic):
        return leaf
    kind = type(leaf.item())
    return leaf.item() if kind is bool else kind(str(leaf))


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """A NumPy number instead of an array without dims."""
    return array[()] if array.ndim == 0 else array


def require_known(leaves: Iterable[Any]) -> None:
    """Refuse results that are known only when the program runs, and are no arrays.

    Args:
      leaves: The leaves of a function's result.

    Raises:
      ControlFlowError: [T319] text with traced values in it.
      BranchError: [T318] a variable that has no value, or none on one way.
      ArgumentError: [T301] a shape, which has no values.
    """
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ArgumentError(
                "a result has no values",
                got=f"{leaf}",
                fix="return an array; eval_shape gives the shape of a result",
            )
        if isinstance(leaf, RuntimeText):
            raise text_error("a result")
        if isinstance(leaf, Unusable):
            leaf.read()
