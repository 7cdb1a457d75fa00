# SPDX-License-Identifier: Apache-2.0
"""Calls compiled programs through JAX's C++ dispatch, with a check of new arguments."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.dtypes import itemsize_bits
from jax._src.tree_util import tracing_registry
from jax.experimental.layout import Format
from jax.tree_util import PyTreeDef

Check: TypeAlias = Callable[[Sequence[Any]], None]


def checked_call(
    compiled: jax.stages.Compiled,
    example: Sequence[Any],
    check: Check,
    result: PyTreeDef | None = None,
) -> Callable[..., Any]:
    """A function that runs a compiled program, and checks arguments that are new to it.

    JAX's C++ dispatch remembers the signatures of the calls that succeeded: shapes,
    dtypes, weak types, shardings, whether arrays are committed, and the settings of
    JAX. It runs calls with one of these signatures without any Python code.

    Args:
      compiled: The program.
      example: Arguments in the tree that the function takes. Their leaves have the
        order of the program's own arguments.
      check: Takes the leaves of a call with another signature; raises if the program
        must not run for them. It must not refer to the function: the C++ code keeps it
        alive, and the garbage collector would see no cycle.
      result: The tree of the result; None is that of the program.
    """
    _, tree = tracing_registry.flatten((tuple(example), {}))
    params: Any = compiled._params
    executable = _Checked(compiled._executable, check, len(params.const_args))
    params = params._replace(in_tree=tree, executable=executable)
    if result is not None:
        params = params._replace(out_tree=result)
    call = compiled._executable.create_cpp_call(params)
    if call is not None:
        return call

    # Programs with callbacks are called in Python, as by jax.stages.Compiled itself.
    def run(*args: Any) -> Any:
        return jax.stages.Compiled.call(params, *args)[0]

    return run


def _is_packed(aval: Any) -> bool:
    """Whether elements take less than a byte."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and itemsize_bits(dtype) % 8 != 0


class OtherMemoryLayout(Exception):
    """Arrays lie in memory in another layout than the program's; nothing has run.

    Attributes:
      arrays: The arguments, with copies of these arrays in the program's layouts.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        super().__init__()
        self.arrays = arrays


class _Checked:
    """An executable that checks its arguments before it runs."""

    def __init__(self, executable: Any, check: Check, num_constants: int) -> None:
        self._executable, self._check = copy.copy(executable), check
        self._num_constants = num_constants
        # Arrays of int4 do not say of their layout that it is one of 4 bits, as
        # programs do, so that JAX would refuse them.
        layouts = zip(executable._xla_in_layouts, executable.in_avals, strict=True)
        self._executable._xla_in_layouts = [
            None if _is_packed(aval) else layout for layout, aval in layouts
        ]

    def call(self, *args: Any) -> Any:
        """Called by ``jax.stages.Compiled.call``, with the flat arguments.

        The C++ dispatch runs the program without this for every array in the layout of
        one that this succeeded for, so that it must not copy arrays itself.
        """
        self._check(args[self._num_constants :])
        if others := self._others(args):
            raise OtherMemoryLayout(
                [
                    jax.device_put(array, others[index]) if index in others else array
                    for index, array in enumerate(args)
                ][self._num_constants :]
            )
        return self._executable.call(*args)

    def _others(self, args: Sequence[Any]) -> dict[int, Format]:
        """The formats of the arguments that are not in the program's layouts."""
        found: dict[int, Format] = {}
        kept = sorted(self._executable._kept_var_idx)
        for index, layout in zip(kept, self._executable._xla_in_layouts, strict=False):
            array = args[index]
            if layout is None or not isinstance(array, ArrayImpl):
                continue
            if array.committed and array.format.layout not in (None, layout):
                found[index] = Format(layout, array.sharding)
        return found
