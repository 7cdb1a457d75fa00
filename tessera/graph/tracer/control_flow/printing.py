# SPDX-License-Identifier: Apache-2.0
"""``print`` and text of traced values: printed when the program runs.

It prints the values of the run, and in a branch only if the branch is taken. Text that
is formatted from traced values keeps them until then.
"""

import builtins
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from tessera.errors import ArgumentError, ControlFlowError
from tessera.graph.tracer.control_flow.active_conversion import current
from tessera.graph.tracer.control_flow.block_state import Unusable
from tessera.graph.tracer.control_flow.user_code import user_line
from tessera.jax_compat import jaxprs
from tessera.tracing import scope

_Part = str | tuple[Any, str, str]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("args", "kwargs"),
    meta_fields=("function",),
)
@dataclass(frozen=True)
class _Call:
    """A call that makes text when the program runs; calls among its arguments too."""

    function: Callable[..., str]
    args: Any
    kwargs: Any


class RuntimeText(str):
    """Text with values in it that are known when the program runs.

    It can be printed, and become a part of other such text. Whatever asks for its
    characters gets [T319].

    Attributes:
      call: What makes it.
    """

    call: _Call

    def __add__(self, other: str) -> str:
        return _text(operator.add, self, other)

    def __radd__(self, other: str) -> str:
        return _text(operator.add, other, self)


def _text(function: Callable[..., str], /, *args: Any, **kwargs: Any) -> str:
    """The text that a call makes: now, or when the program runs if it has to."""
    if not _is_traced((args, kwargs)):
        return function(*args, **kwargs)
    made = RuntimeText("text that is known when the program runs")
    made.call = _Call(function, *_with_calls((args, kwargs)))
    return made


def _with_calls(values: Any) -> Any:
    """Values with calls in the place of the texts that they make."""

    def call(leaf: Any) -> Any:
        return leaf.call if isinstance(leaf, RuntimeText) else leaf

    return jax.tree.map(call, values)


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
    return _text(_joined, *parts)


def _joined(*parts: _Part) -> str:
    return "".join(p if isinstance(p, str) else _formatted(*p) for p in parts)


def format_percent(text: str, values: Any) -> Any:
    """``text % values``."""
    return _text(operator.mod, text, values)


def str_(*args: Any, **kwargs: Any) -> str:
    """``str``."""
    if len(args) == 1 and not kwargs and _is_traced(args[0]):
        return format_string((args[0], "", ""))
    return str(*args, **kwargs)


def method_of_text(text: str, name: str) -> Callable[..., Any] | None:
    """``format`` and ``join`` of some text; None for other methods."""
    if name == "join":
        return partial(_join, text)
    return partial(_text, str.format, text) if name == "format" else None


def _join(text: str, parts: Iterable[str]) -> str:
    return _text(str.join, text, list(parts))


def print_(*values: Any, **options: Any) -> None:
    """``print``, when the program runs.

    Values of several devices are gathered and printed once; in a manual region every
    device prints its own.
    """
    if scope.current() is None:  # it runs: this is code that a program calls back
        builtins.print(*values, **options)  # noqa: T201
        return
    texts = [_Call(_joined, ((value, "", ""),), {}) for value in _with_calls(values)]
    leaves, tree = jax.tree.flatten(texts)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def emit(*arrays: Any) -> None:
        known = list(leaves)
        for index, array in zip(traced, arrays, strict=True):
            known[index] = _plain(np.asarray(array))
        builtins.print(*_made(jax.tree.unflatten(tree, known)), **options)  # noqa: T201

    jax.debug.callback(emit, *(leaves[index] for index in traced))


def _made(values: Any) -> Any:
    """Values with the texts that calls make in their place."""

    def text(node: Any) -> Any:
        if not isinstance(node, _Call):
            return node
        args, kwargs = _made((node.args, node.kwargs))
        if node.function is not _joined:
            args, kwargs = jax.tree.map(_readable, (args, kwargs))
        return node.function(*args, **kwargs)

    return jax.tree.map(text, values, is_leaf=lambda node: isinstance(node, _Call))


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


def _is_traced(value: Any) -> bool:
    kinds = (jaxprs.Tracer, RuntimeText)
    return any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(value))


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
