# SPDX-License-Identifier: Apache-2.0
"""Calls compiled programs through JAX's C++ dispatch, with a check of new arguments."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax._src.tree_util import tracing_registry

Check: TypeAlias = Callable[[Sequence[Any]], None]


def checked_call(
    compiled: jax.stages.Compiled, example: Sequence[Any], check: Check
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
    """
    _, tree = tracing_registry.flatten((tuple(example), {}))
    params: Any = compiled._params
    executable = _Checked(compiled._executable, check, len(params.const_args))
    params = params._replace(in_tree=tree, executable=executable)
    call = compiled._executable.create_cpp_call(params)
    if call is not None:
        return call

    # Programs with callbacks are called in Python, as by jax.stages.Compiled itself.
    def run(*args: Any) -> Any:
        return jax.stages.Compiled.call(params, *args)[0]

    return run


class _Checked:
    """An executable that checks its arguments before it runs."""

    def __init__(self, executable: Any, check: Check, num_constants: int) -> None:
        self._executable, self._check = executable, check
        self._num_constants = num_constants

    def call(self, *args: Any) -> Any:
        """Called by ``jax.stages.Compiled.call``, with the flat arguments."""
        self._check(args[self._num_constants :])
        return self._executable.call(*args)
