# SPDX-License-Identifier: Apache-2.0
"""Applies equations of a step inside an SPMD region that is manual over one axis.

A pipelined function is traced as a function of global arrays. Its stages run in a
region that is manual over the pipeline's axis, where some equations have to change:

- Layouts name the other axes only.
- XLA ends the process when it partitions a gather or a scatter, in such a region, along
  the indexed dims; so these dims are replicated.
- Nested regions are manual over the other axes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import PipelineFormError
from tessera.graph.rewriting import bind_with_nested, contains_inside, interpret
from tessera.jax_compat import jaxprs, primitives
from tessera.shard_spec import axes_of_dims

FREE = PartitionSpec.UNCONSTRAINED


def evaluate(program: jaxprs.Program, values: Sequence[Any]) -> list[Any]:
    """The outputs of a program in the region that is being traced."""
    return interpret(program, values, apply)


def apply(equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation in the region that is being traced.

    Raises:
      PipelineFormError: [T312] it has a region over the axis that is manual already.
    """
    name = equation.primitive.name
    if not _needs_rewrite(equation):
        if contains_inside(equation, _needs_rewrite):
            return bind_with_nested(equation, operands, evaluate)
        return jaxprs.bind(equation, operands)
    if jaxprs.is_shard_map(equation):
        return _nested_region(equation, operands)
    with jaxprs.source_context(equation):
        if name == "sharding_constraint":
            return [_constrained(operands[0], primitives.layout(equation))]
        if primitives.layout(equation) is not None:
            return primitives.bind_without_layout(equation, operands)
        operand = _replicated(operands[0], primitives.indexed_dims(equation))
        (result,) = jaxprs.bind(equation, [operand, *operands[1:]])
        if name == "gather":
            return [result]
        # The transpose of a scatter is a gather from the cotangent of its result.
        return [_replicated(result, primitives.indexed_dims(equation))]


def _needs_rewrite(equation: jaxprs.Equation) -> bool:
    name = equation.primitive.name
    is_indexed = name == "gather" or name.startswith("scatter")
    is_laid_out = isinstance(primitives.layout(equation), NamedSharding)
    return is_indexed or is_laid_out or jaxprs.is_shard_map(equation)


def _replicated(value: Any, dims: Sequence[int]) -> Any:
    """A value with some dims replicated."""
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.axis_names) == set(mesh.manual_axes):
        return value
    spec = [None if dim in dims else FREE for dim in range(value.ndim)]
    layout = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(value, layout)


def _constrained(value: Any, layout: NamedSharding) -> Any:
    """A value with a layout, manual axes left out."""
    mesh = jax.sharding.get_abstract_mesh()

    def without_manual(entry: Any) -> Any:
        names = (entry,) if isinstance(entry, str) else entry
        if not isinstance(names, tuple):
            return entry
        return tuple(name for name in names if name not in mesh.manual_axes) or None

    here = NamedSharding(mesh, PartitionSpec(*map(without_manual, layout.spec)))
    return jax.lax.with_sharding_constraint(value, here)


def _nested_region(equation: jaxprs.Equation, operands: Sequence[Any]) -> list[Any]:
    mesh, region = jax.sharding.get_abstract_mesh(), primitives.region(equation)
    specs = (*region.in_specs, *region.out_specs)
    named = {axis for s in specs for names in axes_of_dims(s, len(s)) for axis in names}
    if named & set(mesh.manual_axes):
        _refuse_region(equation, sorted(named & set(mesh.manual_axes)))
    run = partial(jaxprs.evaluate, primitives.body(equation))
    return primitives.bind_region(equation, operands, run, mesh)


def _refuse_region(equation: jaxprs.Equation, axes: Sequence[str]) -> NoReturn:
    line = jaxprs.source_line(equation)
    names = ", ".join(map(repr, axes))
    raise PipelineFormError(
        f"a kernel in a stage of a pipeline splits arrays over the pipeline's {names}",
        got=f"at {line}" if line else "in a stage, or between a pipeline and its loss",
        fix="split them over the mesh's other axes: a stage is on one device of its "
        "own axis",
    )
