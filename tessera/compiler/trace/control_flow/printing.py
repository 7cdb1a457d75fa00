# SPDX-License-Identifier: Apache-2.0
"""``print`` and text of traced values: printed when the program runs.

It prints the values of the run, and in a branch only if the branch is taken. Text that
is formatted from traced values keeps them until then.
"""

import builtins
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from tessera import _jax, scope
from tessera.compiler.trace.control_flow.active_conversion import current
from tessera.compiler.trace.control_flow.block_state import Unusable
from tessera.compiler.trace.control_flow.user_code import user_line
from tessera.errors import ArgumentError, ControlFlowError

_Part = str | tuple[Any, str, str]


class RuntimeText(str):
    """Text with values in it that are known when the program runs.

    It can be printed, and become a part of other such text. Whatever asks for its
    characters gets [T319].

    Attributes:
      parts: Text, and tuples of a value, its conversion and its format.
    """

    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, parts: Sequence[_Part]) -> str:
        """Text of some parts; plain text where none of them is traced."""
        flat: list[_Part] = []
        for part in parts:
            plain = isinstance(part, tuple) and part[1:] == ("", "")
            inner = part[0] if plain else None
            flat += inner.parts if isinstance(inner, RuntimeText) else [part]
        traced = [isinstance(p, tuple) and _is_traced(p[0]) for p in flat]
        text = "".join(
            p if isinstance(p, str) else str(p[0]) if unknown else _formatted(*p)
            for p, unknown in zip(flat, traced, strict=True)
        )
        if not any(traced):
            return text
        made = cls(text)
        made.parts = tuple(flat)
        return made

    def __add__(self, other: str) -> str:
        return RuntimeText.of([(self, "", ""), (other, "", "")])

    def __radd__(self, other: str) -> str:
        return RuntimeText.of([(other, "", ""), (self, "", "")])


def _unavailable_method(name: str) -> Callable[..., Any]:
    def method(self: RuntimeText, *_: Any, **__: Any) -> Any:
        error, conversion = text_error(f"str.{name}"), current()
        if conversion is not None:
            conversion.refuse(error)
        raise error

    return method


# Methods of a string that JAX and messages need, which show the traced text.
_KEPT = {
    *("__new__", "__init__", "__getattribute__", "__getnewargs__", "__sizeof__"),
    *("__str__", "__repr__", "__format__"),
}
for _name, _method in vars(str).items():
    if callable(_method) and _name not in _KEPT | vars(RuntimeText).keys():
        setattr(RuntimeText, _name, _unavailable_method(_name))


def text_error(use: str) -> ControlFlowError:
    """The error [T319] for Python code that needs the text of a traced value."""
    return ControlFlowError(
        f"Python needs text at {user_line()} that is only known when the program runs",
        got=f"{use} of text with traced values in it",
        fix="print it, or give back the values and make the text from them",
    )


def format_string(*parts: _Part) -> str:
    """An f-string, from its parts."""
    return RuntimeText.of(parts)


def format_percent(text: str, values: Any) -> Any:
    """``text % values``."""
    if not _is_traced(values):
        return text % values
    return RuntimeText.of([((text, values), "percent", "")])


def str_(*args: Any, **kwargs: Any) -> str:
    """``str``."""
    if len(args) == 1 and not kwargs and _is_traced(args[0]):
        return RuntimeText.of([(args[0], "", "")])
    return str(*args, **kwargs)


def method_of_text(text: str, name: str) -> Callable[..., Any] | None:
    """``format`` and ``join`` of some text; None for other methods."""
    if name == "join":
        return functools.partial(_join, text)
    if name != "format":
        return None

    def formatted(*args: Any, **kwargs: Any) -> str:
        if not any(map(_is_traced, (*args, *kwargs.values()))):
            return text.format(*args, **kwargs)
        return RuntimeText.of([((text, args, kwargs), "call", "")])

    return formatted


def _join(text: str, parts: Iterable[str]) -> str:
    parts = list(parts)
    if not any(map(_is_traced, parts)):
        return text.join(parts)
    between = [each for part in parts for each in ((text, "", ""), (part, "", ""))]
    return RuntimeText.of(between[1:])


def print_(*values: Any, **options: Any) -> None:
    """``print``, when the program runs.

    Values of several devices are gathered and printed once; in a manual region every
    device prints its own.
    """
    if scope.current() is None:  # it runs: this is code that a program calls back
        builtins.print(*values, **options)  # noqa: T201
        return
    parts = [
        part
        for value in values
        for part in [
            value.parts if isinstance(value, RuntimeText) else [(value, "", "")]
        ]
    ]
    leaves, tree = jax.tree.flatten(parts)
    traced = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]

    def emit(*arrays: Any) -> None:
        known = list(leaves)
        for index, array in zip(traced, arrays, strict=True):
            known[index] = _plain(np.asarray(array))
        texts = [
            "".join(p if isinstance(p, str) else _formatted(*p) for p in text)
            for text in jax.tree.unflatten(tree, known)
        ]
        builtins.print(*texts, **options)  # noqa: T201

    jax.debug.callback(emit, *(leaves[index] for index in traced))


def _formatted(value: Any, conversion: str, spec: str) -> str:
    if conversion == "call":
        text, args, kwargs = jax.tree.map(_readable, value)
        return text.format(*args, **kwargs)
    if conversion == "percent":
        text, values = jax.tree.map(_readable, value)
        return text % values
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


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _is_traced(value: Any) -> bool:
    if isinstance(value, RuntimeText):
        return True
    return any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves(value))


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
