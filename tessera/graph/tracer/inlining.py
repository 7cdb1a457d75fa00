# SPDX-License-Identifier: Apache-2.0
"""Inlines a function that is called while another one is traced.

Its arguments and results are constrained to its declared layouts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tessera.foundations.tree import partition
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.declared_layouts import (
    Options,
    declared_layouts,
    is_number,
    output_values,
)
from tessera.graph.tracer.leaves import mesh_here
from tessera.graph.tracer.write_back import MutationTracker, write_back
from tessera.mesh import Mesh
from tessera.tracing import scope
from tessera.tracing.object_arguments import split_result


def inline(
    function: Callable[..., Any],
    call: Call,
    options: Options,
    given: Sequence[Any],
) -> Any:
    """Call a function whose options declare a mesh or layouts, inside a trace.

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
    assert here is not None, "inline is for calls inside a trace"
    own = None if options.mesh is None else mesh_here(options.mesh)
    here.inner.append((options.name, own))
    mesh = own or here.mesh
    check = here.is_whole_batch  # one microbatch has other sizes
    binding = call.bound_to(function, options.name, check=check)
    if mesh is None:  # if this trace finds one, the next trace uses it
        named = zip(call.keywords, given[call.positional :], strict=True)
        result = function(*given[: call.positional], **dict(named))
        binding.check_result(result)
        return result
    arrays = [leaf.value for leaf in call.leaves]
    declared = declared_layouts(call, options, mesh, binding.dim_names)
    laid_out = _constrained(arrays, declared, mesh)
    args, kwargs = call.rebuilt(laid_out)
    names = [argument.name for argument in call.arguments]
    watch = MutationTracker([*args, *kwargs.values()], names)
    result, restore = split_result(function(*args, **kwargs))
    write_back(*watch.changes(), given)
    binding.check_result(result)
    names = binding.result_dim_names(result)
    results, skeleton = partition(result, is_number)
    avals = [jax.typeof(result) for result in results]
    values = output_values(options, skeleton, avals, mesh, names)
    laid_out = _constrained(results, [value.spec for value in values], mesh)
    return restore(skeleton.combine(laid_out))


def _constrained(
    arrays: Sequence[Any], specs: Sequence[PartitionSpec | None], mesh: Mesh
) -> list[Any]:
    return [
        array if spec is None else scope.constrain(array, mesh, spec, pads=True)
        for array, spec in zip(arrays, specs, strict=True)
    ]
