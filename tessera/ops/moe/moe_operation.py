# SPDX-License-Identifier: Apache-2.0
"""``op.moe``: a mixture-of-experts layer that owns its parameters."""

from typing import Any

import jax

from tessera.errors import OperandError, UnknownAxisError, did_you_mean
from tessera.foundations.device_grid import DATA_AXES
from tessera.jax_compat.traces import manual_axes
from tessera.mesh import Mesh
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RouterStatistics, RoutingOptions
from tessera.ops.operand_checks import check_activations, check_positive
from tessera.ops.operand_layouts import as_array, region_mesh
from tessera.shard import ShardSpec
from tessera.tracing import scope


def moe(
    x: Any,
    *,
    experts: int,
    top_k: int = 2,
    hidden: int | None = None,
    axis: str | tuple[str, ...] = "ep",
    renormalize: bool = True,
    buffer_factor: float = 2.0,
) -> tuple[jax.Array, RouterStatistics]:
    """Send each token through the ``top_k`` experts that a router chooses for it.

    The experts are GeGLU MLPs; their parameters and those of the router are declared in
    the step being traced. Add the result to the residual, and the weighted losses of
    the statistics to the loss: without them a router learns to use few experts.

        out, router = op.moe(x, experts=8, top_k=2)
        loss = task_loss + 0.01 * router.load_balancing_loss + 0.001 * router.z_loss

    On a mesh with the axis, each device along it holds ``experts / n`` of the experts,
    and all-to-alls send tokens to them and back. The batch is split over ``dp``,
    ``fsdp`` and the axis, the experts' hidden dims over ``tp``, their other dims over
    ``fsdp``, where the mesh has these axes.

    Args:
      x: ``[B, S, D]`` floating-point activations.
      experts: Number of experts, a multiple of the axis' size.
      top_k: Experts of a token.
      hidden: Hidden size of an expert; by default ``4 · D``.
      axis: Mesh axis of the experts. Over a tuple, outer first, the all-to-all takes
        two hops, inside and then across. On a mesh without ``ep`` every device holds
        all experts.
      renormalize: Whether the weights of a token's experts add up to 1.
      buffer_factor: Size of the dropless exchange's buffers; see ``RoutingOptions``.

    Returns:
      ``[B, S, D]`` in the dtype of ``x``, and the router's statistics.

    Raises:
      OutsideTraceError: [T302] no step is being traced.
      OperandError: [T401] ``x`` has another rank, a size is out of range, or this is
        in a kernel.
      UnknownAxisError: [T103] the mesh has no such axis.
      ShardDivisibilityError: [T201] the mesh does not divide the experts, another dim
        of a parameter, or the batch.

    It is dropless: every assignment is computed, however popular an expert is.

    Source: Shazeer et al., arXiv 1701.06538; dropless after MegaBlocks, 2211.15841.
    """
    x = as_array(x)
    _check(x, experts, top_k)
    size = x.shape[-1]
    hidden = 4 * size if hidden is None else hidden
    for name, number in (("hidden", hidden), ("buffer_factor", buffer_factor)):
        check_positive("moe", name, number)
    here = scope.current()
    mesh = here.mesh if here is not None else None
    layout = _layout(mesh, (axis,) if isinstance(axis, str) else axis)
    _check_region(layout)
    if mesh is not None:
        spec = ShardSpec((0,), (layout.batch or None,))
        spec.resolve(x.shape, mesh, what="the batch of op.moe")
    declared = _declare(size, experts, hidden, layout)
    weights = Weights(declared.router, *(w.astype(x.dtype) for w in declared[1:4]))
    options = RoutingOptions(
        top_k=top_k, renormalize=renormalize, buffer_factor=buffer_factor
    )
    return expert_layer(x, weights, options, layout)


def _check(x: jax.Array, experts: int, top_k: int) -> None:
    check_activations("moe", x)
    check_positive("moe", "experts", experts)
    if not 1 <= top_k <= experts:
        raise OperandError(
            "a token of moe cannot have that many experts",
            got=f"top_k={top_k}, experts={experts}",
            fix=f"use a top_k from 1 to {experts}",
        )


def _check_region(layout: ExpertLayout) -> None:
    if used := sorted(layout.axes & set(manual_axes())):
        raise OperandError(
            "moe cannot be called in a kernel: it takes global arrays",
            got=f"an SPMD region over {', '.join(map(repr, used))}",
            fix="call it outside of the kernel, on the kernel's arguments or results",
        )


def _layout(mesh: Mesh | None, axes: tuple[str, ...]) -> ExpertLayout:
    """The layout of the layer on the mesh of the step."""
    if mesh is None:
        return ExpertLayout()
    if axes == ("ep",) and "ep" not in mesh.axes:
        axes = ()
    for axis in axes:
        if axis not in mesh.axes:
            raise UnknownAxisError(
                f"moe cannot split its experts over mesh axis {axis!r}",
                got=f"axis={axes}, {mesh.topology}",
                fix=did_you_mean(axis, mesh.axes),
            )

    others = tuple(axis for axis in mesh.axes if axis not in axes)
    return ExpertLayout(
        mesh=region_mesh(mesh),
        batch=(*(axis for axis in DATA_AXES if axis in others), *axes),
        experts=axes,
        hidden=("tp",) if "tp" in others else (),
        embed=("fsdp",) if "fsdp" in others else (),
    )


def _declare(size: int, experts: int, hidden: int, layout: ExpertLayout) -> Weights:
    wide, narrow = (experts, size, hidden), (experts, hidden, size)
    shapes = Weights((size, experts), wide, wide, narrow)
    with scope.named(scope.fresh_component("moe")):
        return Weights(
            *(
                scope.parameter(
                    name,
                    shape,
                    init=_router_init if name == "router" else _expert_init,
                    layout=ShardSpec(tuple(range(len(spec))), tuple(spec)),
                )
                for name, shape, spec in zip(
                    Weights._fields[:4], shapes[:4], layout.weights[:4], strict=True
                )
            )
        )


# Normal of variance 1 / fan-in. Module constants: an initializer is compiled once for
# all its uses.
_router_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_expert_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0
)
