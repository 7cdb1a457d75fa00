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

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import CollectiveError, NoMeshError, did_you_mean
from tessera.foundations.tree import Tree
from tessera.jax_compat import jaxprs
from tessera.mesh import manual_axes, opened_or_none
from tessera.ops import compressed_means as compressed
from tessera.ops.collective_call import Axis, Operand, each
from tessera.ops.compressed_means import COMPRESSIONS

if TYPE_CHECKING:
    import optax


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

    It is ``optax.chain(compressed_mean(compression, axis), optimizer)``, so the updates
    are the same on every device.

    Args:
      optimizer: Any Optax transformation.
      axis: Mesh axis, or a tuple of axes, outer first.
      compression: As in :func:`compressed_mean`.
      ratio: As in :func:`compressed_mean`.

    Raises:
      CollectiveError: [T206] as in :func:`compressed_mean`.
    """
    import optax  # not by `import tessera`, which does not need it

    return optax.chain(compressed_mean(compression, axis, ratio=ratio), optimizer)


def compressed_mean(
    compression: str, axis: Axis = "dp", *, ratio: float = 0.01
) -> "optax.GradientTransformation":
    """Replace gradients by their mean over a mesh axis, with compression.

    ``update`` must be called inside an SPMD region. Per device ``[...]`` to ``[...]``,
    replicated. Bytes that a device sends and receives for each f32 value, on n devices,
    and the error of the result:

    - ``none``: 8 (n-1)/n, as in an all-reduce; exact.
    - ``bf16``: 4 (n-1)/n; two roundings to 8 significant bits.
    - ``int8``: 2 (n-1)/n and half a percent; two roundings to 1/127 of the largest
      of up to 1024 consecutive values.
    - ``top_k``: 8 (n-1) ratio, which is less than ``none`` where ratio < 1/n; values
      that are not sent are added to the next gradients.

    ``compressed_means.means`` states the bounds.

    Args:
      compression: ``none``, ``bf16``, ``int8`` or ``top_k``.
      axis: Mesh axis, or a tuple of axes, outer first.
      ratio: The fraction of each gradient's values that ``top_k`` sends, above 0 and
        at most 1; at least one value is sent.

    Returns:
      A transformation. Only ``top_k`` has a state, the residual of each device:
      ``init`` inside the region returns that of the device; outside of one, on an open
      mesh, an array that is split over the axis.

    Raises:
      CollectiveError: [T206] there is no such compression, or ``ratio`` is out of
        range; in ``update``, gradients outside an SPMD region, or that are no floats,
        or reduced over the axis already, or that have another shape than the state.
      NoMeshError: [T106] a ``top_k`` state is made where there is no mesh.
      UnknownAxisError: [T103] the mesh has no such axis.

    Example:
      >>> transform = compressed_mean("int8", axis="dp")
      >>> transform.init({"w": jnp.ones(3)})
      EmptyState()
    """
    import optax  # not by `import tessera`, which does not need it

    _check(compression, ratio)
    if compression == "top_k":
        return optax.GradientTransformation(*_error_feedback(axis, ratio))

    def averaged(updates: Tree, params: Tree = None) -> Tree:
        del params
        operands, tree = _unreduced(updates, axis)
        if not operands:
            return updates
        values = [operand.value for operand in operands]
        means = compressed.means(values, operands[0].axes, compression)
        return jax.tree.unflatten(tree, means)

    return optax.stateless(averaged)


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
        return jaxprs.varying_over(operand.value, operand.axes)

    return each(one, x, axis)


def _error_feedback(axis: Axis, ratio: float) -> tuple[Any, Any]:
    """``init`` and ``update`` of ``top_k``."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis)

    def init(params: Tree) -> ErrorFeedback:
        if manual_axes():
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
            mean, unsent = compressed.top_k_mean(block, own, operand.axes, ratio)
            averaged.append(mean)
            rest.append(unsent[None])
        return jax.tree.unflatten(tree, averaged), ErrorFeedback(
            jax.tree.unflatten(residual_tree, rest)
        )

    return init, update


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
    tracked = axes <= jaxprs.varying_axes(lax.axis_index(operand.axes))
    if tracked and not axes <= jaxprs.varying_axes(value):
        alike = sorted(axes - jaxprs.varying_axes(value))
        raise CollectiveError(
            f"these gradients are summed over {', '.join(map(repr, alike))} already",
            got=f"{value.dtype.name}{list(value.shape)}, the same on every device",
            fix="differentiate by each device's own parameters: "
            f"own = dist.per_device(params, axis={_shown(operand.axes)})",
        )


def _shown(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)
