# SPDX-License-Identifier: Apache-2.0
"""Averaging gradients over mesh axes, as an Optax transformation.

It runs inside an SPMD region, on gradients that each device computed from its own data
and that are not reduced yet:

    optimizer = dist.average_gradients(optax.adamw(1e-3), axis="dp")

    @op.kernel
    def step(params, state, x, y):
        own = dist.per_device(params, axis="dp")
        gradients = jax.grad(loss)(own, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state
"""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax

from tessera.errors import CollectiveError
from tessera.foundations.tree import Tree
from tessera.jax_compat import traces
from tessera.ops import device_collectives
from tessera.ops.collective_call import Axis, Operand, each

if TYPE_CHECKING:
    import optax


def average_gradients(
    optimizer: "optax.GradientTransformation", axis: Axis = "dp"
) -> "optax.GradientTransformation":
    """An optimizer that first averages the gradients over a mesh axis.

    ``update`` must be called inside an SPMD region; the updates are the same on every
    device. They are averaged by ``dist.all_reduce(op="mean")``, bit for bit.

    Args:
      optimizer: Any Optax transformation.
      axis: Mesh axis, or a tuple of axes, outer first.

    Returns:
      A transformation, whose state is that of the optimizer behind an empty one.

    Raises:
      CollectiveError: [T206] in ``update``, gradients outside an SPMD region, or that
        are no floats, or reduced over the axis already.
      UnknownAxisError: [T103] in ``update``, the mesh has no such axis.
    """
    import optax  # not by `import tessera`, which does not need it

    mean = optax.stateless(lambda updates, _: _mean(updates, axis))
    return optax.chain(mean, optimizer)


def per_device(x: Any, axis: Axis) -> Any:
    """Mark replicated values as different on each device along an axis.

    Per device ``[...]`` to the same; nothing is sent. A gradient by the result is that
    of one device. For a gradient by the replicated values themselves, JAX sums the
    gradients of all devices, because a change of the value changes every loss.

    Args:
      x: Array or tree, in an SPMD region.
      axis: Mesh axis, or a tuple of axes.

    Raises:
      CollectiveError: [T206] this is not an SPMD region, or not one over the axis.
      UnknownAxisError: [T103] the mesh has no such axis.
    """

    def one(operand: Operand) -> Array:
        _check_region(operand)
        return traces.varying_over(operand.value, operand.axes)

    return each(one, x, axis)


def _mean(updates: Tree, axis: Axis) -> Tree:
    def one(operand: Operand) -> Array:
        _check_unreduced(operand)
        return device_collectives.reduce(operand.value, operand.axes, "mean")

    return each(one, updates, axis)


def _check_region(operand: Operand) -> None:
    if not operand.is_block:
        raise CollectiveError(
            "a global array is the same array for every device along an axis",
            got=f"{operand.value.dtype.name}{list(operand.value.shape)}, outside an "
            "SPMD region",
            fix="call it inside @op.kernel, where every device has its own",
        )


def _check_unreduced(operand: Operand) -> None:
    _check_region(operand)
    value, axes = operand.value, set(operand.axes)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise CollectiveError(
            "only gradients of floating dtypes are averaged",
            got=f"{value.dtype.name}{list(value.shape)}",
            fix="differentiate only by the floating-point leaves of the parameters",
        )
    # With check_vma=False JAX does not track which values vary.
    tracked = axes <= traces.varying_axes(lax.axis_index(operand.axes))
    if tracked and not axes <= traces.varying_axes(value):
        alike = sorted(axes - traces.varying_axes(value))
        raise CollectiveError(
            f"these gradients are summed over {', '.join(map(repr, alike))} already",
            got=f"{value.dtype.name}{list(value.shape)}, the same on every device",
            fix="differentiate by each device's own parameters: "
            f"own = dist.per_device(params, axis={_shown(operand.axes)})",
        )


def _shown(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)
