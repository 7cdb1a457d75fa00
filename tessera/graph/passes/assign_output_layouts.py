# SPDX-License-Identifier: Apache-2.0
"""Propagate declared layouts to outputs that are inputs or constrained values."""

from dataclasses import replace
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tessera.graph.ir import Graph
from tessera.jax_compat import jaxprs, primitives
from tessera.mesh import Mesh
from tessera.shard_spec import check_even


def assign_output_layouts(graph: Graph) -> Graph:
    """Declare the layout of outputs that are inputs or constrained. Numerics: exact.

    Declared layouts are compared with the compiled ones, so this extends the check to
    gradients, which are constrained to the layouts of their weights.

    Before:  g = sharding_constraint[P('tp')] h; out g over undeclared
    After:   the same equations; out g over P('tp')

    Raises:
      ShardDivisibilityError: [T201] a user's constraint does not divide an output.
    """
    if graph.mesh is None:
        return graph
    inputs = zip(jaxprs.inputs(graph.program), graph.inputs, strict=True)
    known = {variable: v.spec for variable, v in inputs if not _has_sums(v.spec)}
    constrained = set[Any]()
    for equation in jaxprs.equations(graph.program):
        if (spec := _constraint(equation, graph.mesh)) is not None:
            known[equation.outvars[0]] = spec
            constrained.add(equation.outvars[0])
    outputs = []
    for atom, value in zip(jaxprs.outputs(graph.program), graph.outputs, strict=True):
        if value.spec is None and not isinstance(atom, jaxprs.Literal):
            value = replace(value, spec=known.get(atom))
            if value.spec is not None and atom in constrained:
                what = f"a constraint does not divide output {value.name!r}"
                check_even(what, value.aval.shape, value.spec, graph.mesh)
        outputs.append(value)
    return graph.with_outputs(outputs)


def _has_sums(spec: PartitionSpec | None) -> bool:
    """Whether it has unreduced or reduced axes, which types of values have, too.

    A gradient by such a value has the others, so that JAX refuses a declared layout.
    """
    return spec is not None and bool(spec.unreduced or spec.reduced)


def _constraint(equation: jaxprs.Equation, mesh: Mesh) -> PartitionSpec | None:
    """The layout that an equation constrains a value to, if it is over this mesh."""
    sharding = primitives.layout(equation)
    # Over Explicit axes the type of a value has its layout, and no constraint has it.
    if equation.primitive.name != "sharding_constraint" or mesh.explicit_axes:
        return None
    if not isinstance(sharding, NamedSharding) or PartitionSpec.UNCONSTRAINED in tuple(
        sharding.spec
    ):
        return None
    on_this = dict(sharding.mesh.shape) == mesh.shape and (
        sharding.mesh == mesh.compile_mesh or isinstance(sharding.mesh, AbstractMesh)
    )
    return sharding.spec if on_this else None
