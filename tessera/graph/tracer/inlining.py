# SPDX-License-Identifier: Apache-2.0
"""Calls a function that is part of another one's trace, or that runs eagerly.

Its arguments and results are constrained to its declared layouts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.foundations.tree import partition
from tessera.graph.tracer.argument_leaves import mesh_here
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.declared_layouts import (
    Options,
    declared_layouts,
    is_number,
    output_values,
)
from tessera.graph.tracer.write_back import (
    MutationTracker,
    check_no_alias,
    write_back,
)
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import as_array
from tessera.tracing import scope
from tessera.tracing.object_arguments import split_result


def inline(
    function: Callable[..., Any],
    call: Call,
    options: Options,
    given: Sequence[Any],
) -> Any:
    """Call a function with the layouts that its options declare, in the open scope.

    Args:
      function: The user's function.
      call: Its flattened arguments.
      options: What is declared beside the code.
      given: The arguments themselves, whose dicts and lists it may assign into.

    Raises:
      ShardDivisibilityError: [T201] a declared layout does not divide an array.
      LayoutMismatchError: [T205] arrays are laid out otherwise than declared.
      MeshConflictError: [T308] (when the trace ends) its mesh is not the program's.
      AnnotationError: [T315] arguments or result do not fit the annotations.
      NoMeshError: [T106] (when the trace ends) it has layouts, and there is no mesh.
      WriteBackError: [T320] an argument was changed that cannot be given back.
    """
    here = scope.current()
    assert here is not None, "inline is for calls inside a scope"
    own = None if options.mesh is None else mesh_here(options.mesh)
    here.inner.append((options.name, own))
    mesh = own or here.mesh  # one that this trace finds is used by the next
    check = here.is_whole_batch  # one microbatch has other sizes
    binding = call.bound_to(function, options.name, check=check)
    arrays = [leaf.value for leaf in call.leaves]
    declared = declared_layouts(call, options, mesh, binding.dim_names)
    laid_out = _laid_out(arrays, declared, mesh)
    args, kwargs = call.rebuilt(laid_out)
    names = [argument.name for argument in call.arguments]
    watch = MutationTracker([*args, *kwargs.values()], names)
    result, restore = split_result(function(*args, **kwargs))
    writes, written = watch.changes()
    check_no_alias(writes, given)
    write_back(writes, written, given)
    binding.check_result(result)
    names = binding.result_dim_names(result)
    results, skeleton = partition(result, is_number)
    avals = [jax.typeof(result) for result in results]
    values = output_values(options, skeleton, avals, mesh, names)
    laid_out = _laid_out(results, [value.spec for value in values], mesh)
    return restore(skeleton.combine(laid_out))


def _laid_out(
    arrays: Sequence[Any], specs: Sequence[PartitionSpec | None], mesh: Mesh | None
) -> list[Any]:
    """Arrays in the layouts that are declared for them."""
    here = scope.current()
    is_eager = here is not None and here.is_eager

    def lay_out(array: Any, spec: PartitionSpec | None) -> Any:
        if spec is None or mesh is None:
            return array
        if is_eager:  # JAX ignores constraints there
            return jax.device_put(as_array(array), NamedSharding(mesh.jax, spec))
        return scope.constrain(array, mesh, spec)

    return list(map(lay_out, arrays, specs))
