# SPDX-License-Identifier: Apache-2.0
"""Averaging gradients over mesh axes, as Optax transformations.

They run inside an SPMD region, on gradients that each device computed from its own data
and that are not reduced yet:

    optimizer = dist.average_gradients(optax.adamw(1e-3), axis="dp")

    @op.kernel
    def step(params, state, x, y):
        own = dist.per_device(params, axis="dp")
        gradients = jax.grad(loss)(own, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state
"""

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import CollectiveError, NoMeshError, did_you_mean
from tessera.foundations.tree import Tree
from tessera.jax_compat import traces
from tessera.mesh import opened_or_none
from tessera.ops import device_collectives
from tessera.ops.collective_call import Axis, Operand, each

if TYPE_CHECKING:
    import optax

COMPRESSIONS: Final = ("none", "top_k")


class ErrorFeedback(NamedTuple):
    """The values that ``top_k`` has not sent yet.

    Attributes:
      residual: For each parameter f32 ``[n, ...]``, split along the leading dim over
        the axes: per device ``[1, ...]``.
    """

    residual: Tree


def average_gradients(
    optimizer: "optax.GradientTransformation",
    axis: Axis = "dp",
    *,
    compression: str = "none",
    ratio: float = 0.01,
) -> "optax.GradientTransformation":
    """An optimizer that first averages the gradients over a mesh axis.

    ``update`` must be called inside an SPMD region; the updates are the same on every
    device. Bytes that a device sends and receives for each f32 value, on n devices:

    - ``none``: 8 (n-1)/n, as ``dist.all_reduce(op="mean")``, which it is bit for bit.
    - ``top_k``: 8 (n-1) ratio, which is less where ratio < 1/n. Every device sends its
      values of largest magnitude; the others are added to its next gradients (error
      feedback: arXiv 1809.07599, without the momentum correction of 1712.01887).

    Args:
      optimizer: Any Optax transformation.
      axis: Mesh axis, or a tuple of axes, outer first.
      compression: ``none`` or ``top_k``.
      ratio: The fraction of each gradient's values that ``top_k`` sends, above 0 and
        at most 1; at least one value is sent.

    Returns:
      A transformation. Before the optimizer's, ``top_k`` has a state, the residual of
      each device: ``init`` inside the region returns that of the device; outside of
      one, on an open mesh, an array that is split over the axis.

    Raises:
      CollectiveError: [T206] there is no such compression, or ``ratio`` is out of
        range; in ``update``, gradients outside an SPMD region, or that are no floats,
        or reduced over the axis already, or that have another shape than the state.
      NoMeshError: [T106] a ``top_k`` state is made where there is no mesh.
      UnknownAxisError: [T103] the mesh has no such axis.
    """
    import optax  # not by `import tessera`, which does not need it

    _check(compression, ratio)
    if compression == "top_k":
        mean = optax.GradientTransformation(*_error_feedback(axis, ratio))
    else:
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


def _error_feedback(axis: Axis, ratio: float) -> tuple[Any, Any]:
    """``init`` and ``update`` of ``top_k``."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis)

    def init(params: Tree) -> ErrorFeedback:
        if traces.manual_axes():
            return ErrorFeedback(per_device(_zero_residuals(params, 1), axes))
        mesh = opened_or_none()
        if mesh is None:
            raise NoMeshError(
                "the residual of top_k needs a mesh to be sharded over",
                got=f"axis {axis!r}",
                fix="call init under 'with mesh:', or inside the kernel",
            )
        split = NamedSharding(mesh.compile_mesh, PartitionSpec(axes))
        zeros = _zero_residuals(params, mesh.axis_size(axes))
        return ErrorFeedback(jax.device_put(zeros, split))

    def update(
        updates: Tree, state: ErrorFeedback, params: Tree = None
    ) -> tuple[Tree, ErrorFeedback]:
        del params
        operands, tree = _unreduced(updates, axes)
        residuals, residual_tree = jax.tree.flatten(state.residual)
        averaged, rest = list[Array](), list[Array]()
        for operand, residual in zip(operands, residuals, strict=True):
            own, block = _own(residual, operand.value), operand.value
            mean, unsent = _top_k_mean(block, own, operand.axes, ratio)
            averaged.append(mean)
            rest.append(unsent[None])
        return jax.tree.unflatten(tree, averaged), ErrorFeedback(
            jax.tree.unflatten(residual_tree, rest)
        )

    return init, update


def _top_k_mean(
    block: Array, residual: Array, axes: tuple[str, ...], ratio: float
) -> tuple[Array, Array]:
    """The mean of the largest values of each device, with error feedback.

    Every device adds its residual to its block, sends the ``ceil(ratio * size)``
    values of largest magnitude with their indices, and keeps the others as the new
    residual: ``sent + new residual == block + residual`` exactly.
    (arXiv 1809.07599, algorithm 1 of Stich et al.; without the momentum correction of
    arXiv 1712.01887.)

    Args:
      block: Per device ``[...]``, of a float dtype.
      residual: Values that earlier calls did not send, f32, of the block's shape.
      axes: Mesh axes to average over.
      ratio: Share of the values that each device sends.

    Returns:
      The mean, replicated, and the new residual of this device.
    """
    if not block.size:
        return device_collectives.reduce(block, axes, "mean"), residual
    count = lax.axis_size(axes)
    total = (block.astype(jnp.float32) + residual).reshape(-1)
    indices = lax.top_k(jnp.abs(total), math.ceil(ratio * total.size))[1]
    values = total[indices]
    rest = total.at[indices].set(0.0, unique_indices=True)

    def add(sums: Array, sent: tuple[Array, Array]) -> tuple[Array, None]:
        return sums.at[sent[0]].add(sent[1], unique_indices=True), None

    # One device's values after the other's, each index once: concurrent additions to
    # one index would have another order on each accelerator.
    sent = tuple(
        traces.all_gather_invariant(part[None], axes, 0) for part in (indices, values)
    )
    # The values may still vary over other axes.
    zeros = jnp.zeros(total.shape, total.dtype)
    zeros = traces.varying_over(zeros, traces.varying_axes(sent[1]))
    sums = lax.scan(add, zeros, sent)[0]
    averaged = (sums / count).astype(block.dtype).reshape(block.shape)
    return averaged, rest.reshape(block.shape)


def _unreduced(updates: Tree, axis: Axis) -> tuple[list[Operand], Any]:
    """The gradients as operands that are not reduced yet, and their tree."""
    operands: list[Operand] = []

    def checked(operand: Operand) -> Array:
        _check_unreduced(operand)
        operands.append(operand)
        return operand.value

    return operands, jax.tree.structure(each(checked, updates, axis))


def _zero_residuals(params: Tree, lead: int) -> Tree:
    def zeros(param: Any) -> Array:
        return jnp.zeros((lead, *param.shape), jnp.float32)

    return jax.tree.map(zeros, params)


def _own(residual: Array, gradient: Array) -> Array:
    """This device's residual, of the gradient's shape."""
    if residual.shape != (1, *gradient.shape):
        raise CollectiveError(
            "the residual of this device does not have the shape of its gradient",
            got=f"residual {residual.shape}, gradient {gradient.shape}, where "
            f"{(1, *gradient.shape)} was expected",
            fix="make the state by init inside the kernel, where parameters have the "
            "shapes of blocks, and let the kernel return it",
        )
    return residual[0]


def _check(compression: str, ratio: float) -> None:
    if compression not in COMPRESSIONS:
        raise CollectiveError(
            f"there is no compression {compression!r}",
            got=f"compression {compression!r}",
            fix=did_you_mean(compression, COMPRESSIONS),
        )
    if not 0 < ratio <= 1:
        raise CollectiveError(
            "the ratio of top_k is not between 0 and 1",
            got=f"ratio {ratio}",
            fix="use a ratio above 0 and at most 1, such as 0.01",
        )


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
