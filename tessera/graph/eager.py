# SPDX-License-Identifier: Apache-2.0
"""Eager execution under ``jax.disable_jit()``: runs a function operation by operation.

The body runs once, on concrete arrays, so ``print``, a debugger and Python's ``if``
work in it. Arguments and results get their declared layouts, and mutations are written
back. What needs the whole program is refused: ``ts.grad`` of a value, strategies,
pipelines and autocast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.errors import OutsideTraceError
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.declared_layouts import Options
from tessera.graph.tracer.inlining import inline
from tessera.graph.tracer.mesh_inference import common_mesh, mesh_of
from tessera.graph.tracer.torch_transpose import enable_torch_transpose
from tessera.shard import DistTensor
from tessera.tracing import casts, scope

# Returns the array of a parameter, from its name and declaration.
Provide: TypeAlias = Callable[[str, DistTensor], Any]


@dataclass
class _EagerScope(scope.Scope):
    """The scope of a function that runs eagerly."""

    provide: Provide = lambda name, declared: declared.materialize()

    def value_of(self, name: str) -> Any:
        """The array of a declared parameter, which is made when it is first used."""
        if name not in self.values:
            self.values[name] = self.provide(name, self.declared[name])
        return self.values[name]


def run_eagerly(
    function: Callable[..., Any],
    call: Call,
    options: Options,
    given: Sequence[Any],
    provide: Provide,
) -> Any:
    """Run a function on the arrays of a call, one operation after the other.

    Args:
      function: The user's function.
      call: Its flattened arguments.
      options: What is declared beside the code.
      given: The arguments themselves, whose dicts and lists it may assign into.
      provide: Gives the arrays of parameters.

    Raises:
      OutsideTraceError: [T302] it needs what a pass does with a whole program.
      WriteBackError: [T320] an argument was changed that cannot be given back.
    """
    enable_torch_transpose()
    casts.check_autocast_of_programs(casts.current_autocast())
    if options.strategy is not None:
        raise OutsideTraceError(
            "a strategy infers from the program what each argument is",
            got="jax.disable_jit() around a call under ts.distribute",
            fix="leave jax.disable_jit() out, or ts.distribute",
        )
    mesh = common_mesh(call.leaves, [("the step", mesh_of(options))])
    plan = scope.current_plan()
    here = _EagerScope(mesh=mesh, plan=plan, is_eager=True, provide=provide)
    with scope.opened(here):
        return inline(function, call.on_mesh(mesh), options, given)
