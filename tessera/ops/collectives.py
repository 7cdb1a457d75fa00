# SPDX-License-Identifier: Apache-2.0
"""Collectives: what devices tell each other along a mesh axis.

Every one of them has one meaning, per device. Inside an SPMD region (``op.kernel``)
the operand is this device's block. On a global array outside, the operand is taken
apart by its own layout, each device does the same to its block, and the results are
put together again: what the devices then hold alike is replicated, what differs is
split. So ``all_reduce(x, "dp")`` of an array whose dim 0 is split over ``dp`` adds the
blocks up, and of an array that is replicated over ``dp`` adds its copies up.

In the shapes below n is the number of devices along the axis. An axis may be a tuple
of axes, outer first; ranks then count along all of them, the last fastest. An operand
may be a tree of arrays: each leaf is an operand by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from tessera.errors import CollectiveError
from tessera.jax_compat.traces import manual_axes
from tessera.ops import device_collectives
from tessera.ops.collective_call import Axis, Operand, each
from tessera.ops.device_collectives import Reduction
from tessera.tracing import scope

Ranks: TypeAlias = int | Sequence[int]


def all_reduce(x: Any, axis: Axis = (), op: Reduction = "sum") -> Any:
    """Reduce the blocks of all devices along an axis, element by element.

    Per device ``[...]`` to ``[...]``, the same on every device. A global array loses
    the axis from its layout: a dim that the axis split is n times shorter.

    Over a tuple of axes a sum is hierarchical: reduce-scatter along the inner axis,
    all-reduce across the outer ones, all-gather along the inner one. So the slow
    outer links carry 1/n of the array; it is padded where n does not divide it.

    Args:
      x: Array of any dtype; booleans have no sum, integers no mean.
      axis: Mesh axis, or a tuple of axes, outer first.
      op: ``sum``, ``mean``, ``max`` or ``min``.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      CollectiveError: [T206] the dtype has no such reduction, or the layout of a
        traced array is not known.

    Example:
      >>> from tessera.mesh import Mesh
      >>> from tessera.shard import ShardSpec, tensor
      >>> with Mesh(["dp"], devices=range(4)):
      ...     x = tensor((8,), ShardSpec(("row",), ("dp",)), init="ones")
      ...     all_reduce(x, "dp")
      Array([4., 4.], dtype=float32)
    """

    def one(operand: Operand) -> Array:
        _check_reduction(operand, op)
        return operand.run(device_collectives.reduce, op, out_dim=None)

    return each(one, x, axis)


def reduce_scatter(
    x: Any, axis: Axis = (), dim: int | None = None, op: Reduction = "sum"
) -> Any:
    """Reduce the blocks along an axis and give each device one part of the result.

    Per device ``[..., D, ...]`` to ``[..., D/n, ...]``, part r on the device of rank
    r. A global array has the axis moved to ``dim``.

    Args:
      x: Array; booleans have no sum, integers no mean.
      axis: Mesh axis, or a tuple of axes, outer first.
      dim: The dim to divide. By default the last one in an SPMD region; of a global
        array the one that the axis splits already (all of them, if there are several),
        or else the last.
      op: ``sum`` or ``mean``.

    Raises:
      ShardDivisibilityError: [T201] the dim of the block is not a multiple of n.
      UnknownAxisError: [T103] the mesh has no such axis.
      DimError: [T203] the array has no such dim.
      CollectiveError: [T206] the reduction is not ``sum`` or ``mean``.
    """

    def one(operand: Operand) -> Array:
        if op not in ("sum", "mean"):
            raise CollectiveError(
                "reduce_scatter cannot compute this reduction",
                got=f"op {op!r}",
                fix="use 'sum' or 'mean', or all_reduce and take a part",
            )
        _check_reduction(operand, op)
        fallback = operand.split_dim
        along = operand.dim(dim, default=-1 if fallback is None else fallback)
        return operand.run(device_collectives.reduce_scatter, along, op, out_dim=along)

    return each(one, x, axis)


def all_gather(x: Any, axis: Axis = (), dim: int | None = None) -> Any:
    """Give every device the concatenated blocks of all devices along an axis.

    Per device ``[..., D, ...]`` to ``[..., D*n, ...]``, the same on every device. A
    global array loses the axis from its layout; if ``dim`` is the dim that the axis
    splits (as its innermost axis), it keeps its values.

    Args:
      x: Array of any dtype.
      axis: Mesh axis, or a tuple of axes, outer first.
      dim: The dim to concatenate along. By default the last one in an SPMD region; of a
        global array the one that the axis splits.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      DimError: [T203] the array has no such dim.
      CollectiveError: [T206] the axis splits no dim of the global array, and ``dim``
        is not given.
    """

    def one(operand: Operand) -> Array:
        along = operand.dim(dim, default=-1 if operand.is_block else operand.split_dim)
        return operand.run(device_collectives.all_gather, along, out_dim=None)

    return each(one, x, axis)


def all_to_all(x: Any, axis: Axis, split_dim: int, concat_dim: int) -> Any:
    """Send part j of every block to device j, which concatenates what it receives.

    Per device ``[..., S, ..., C, ...]`` to ``[..., S/n, ..., C*n, ...]``. A global
    array that the axis splits along ``concat_dim`` keeps its values and is split along
    ``split_dim`` instead.

    Args:
      x: Array of any dtype.
      axis: Mesh axis, or a tuple of axes, outer first.
      split_dim: The dim that every block is divided along.
      concat_dim: The dim that the parts are concatenated along, by rank.

    Raises:
      ShardDivisibilityError: [T201] ``split_dim`` of the block is not a multiple of n.
      UnknownAxisError: [T103] the mesh has no such axis.
      DimError: [T203] the array has no such dim.
    """

    def one(operand: Operand) -> Array:
        split, concat = operand.dim(split_dim), operand.dim(concat_dim)
        return operand.run(device_collectives.all_to_all, split, concat, out_dim=split)

    return each(one, x, axis)


def broadcast(x: Any, axis: Axis = (), root: int = 0) -> Any:
    """Give every device along an axis the block of one of them.

    It is a sum of that block and zeros, so -0.0 may arrive as 0.0.

    Per device ``[...]`` to ``[...]``, the same on every device. A global array loses
    the axis from its layout: a dim that the axis split is n times shorter.

    Args:
      x: Array of any dtype.
      axis: Mesh axis, or a tuple of axes, outer first.
      root: Rank of the device whose block it is.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      CollectiveError: [T206] the axis has no such rank.
    """

    def one(operand: Operand) -> Array:
        return operand.run(
            device_collectives.broadcast, operand.rank(root), out_dim=None
        )

    return each(one, x, axis)


def scatter(x: Any, axis: Axis, root: int = 0, dim: int = 0) -> Any:
    """Divide the block of one device among all devices along an axis.

    Per device ``[..., D, ...]`` to ``[..., D/n, ...]``: the device of rank r gets part
    r of the root's block. A global array has the axis moved to ``dim``.

    Args:
      x: Array of any dtype; only the root's block is read.
      axis: Mesh axis, or a tuple of axes, outer first.
      root: Rank of the device whose block is divided.
      dim: The dim to divide.

    Raises:
      ShardDivisibilityError: [T201] the dim of the block is not a multiple of n.
      UnknownAxisError: [T103] the mesh has no such axis.
      DimError: [T203] the array has no such dim.
      CollectiveError: [T206] the axis has no such rank.
    """
    return _by_root(device_collectives.scatter, x, axis, root, dim)


def gather(x: Any, axis: Axis, root: int = 0, dim: int = 0) -> Any:
    """Give one device the concatenated blocks of all; the others get zeros.

    Per device ``[..., D, ...]`` to ``[..., D*n, ...]``. A global array has the axis
    moved to ``dim``: its blocks along that dim are the root's, whole, and zeros.

    Args:
      x: Array of any dtype.
      axis: Mesh axis, or a tuple of axes, outer first.
      root: Rank of the device that gets the blocks.
      dim: The dim to concatenate along.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      DimError: [T203] the array has no such dim.
      CollectiveError: [T206] the axis has no such rank.
    """
    return _by_root(device_collectives.gather, x, axis, root, dim)


def send(x: Any, axis: Axis, source: Ranks, destination: Ranks) -> Any:
    """Send blocks from some devices to others; devices that receive none get zeros.

    Per device ``[...]`` to ``[...]``. Every device runs the same program, so one call
    is both ends of the transfer. A global array keeps its layout; one that the axis
    does not split comes out split by it along the leading dim, a block per device.

    Args:
      x: Array of any dtype.
      axis: Mesh axis, or a tuple of axes, outer first.
      source: Rank that sends, or several.
      destination: Rank that receives, or as many; each rank receives at most once.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      CollectiveError: [T206] ranks that do not exist or do not pair up.
    """
    return _transferred(device_collectives.permuted, x, axis, source, destination)


def recv(x: Any, axis: Axis, source: Ranks, destination: Ranks) -> Any:
    """Like :func:`send`, but devices that receive no block keep their own.

    Per device ``[...]`` to ``[...]``. A global array keeps its layout; one that the
    axis does not split comes out split by it along the leading dim.

    Args:
      x: Array of any dtype.
      axis: Mesh axis, or a tuple of axes, outer first.
      source: Rank that sends, or several.
      destination: Rank that receives, or as many; each rank receives at most once.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      CollectiveError: [T206] ranks that do not exist or do not pair up.
    """
    return _transferred(device_collectives.recv, x, axis, source, destination)


def recv_from(source: int, what: Any, axis: Axis | None = None) -> Any:
    """The block of another device, or a parameter that another rank owns.

    In an SPMD region every device calls it with its own block and receives that of
    ``source``, as in :func:`broadcast`. In a function with the strategy
    ``zero_redundancy_optimizer`` it is called in the branch of ranks that do not own a
    parameter, with the parameter's name: that branch is never taken, because the state
    is sharded over all devices and each of them owns a part of every parameter.

    Args:
      source: Rank of the device.
      what: Array or tree of arrays; under the strategy a name.
      axis: Mesh axis that the rank is along, or a tuple of axes, outer first; by
        default all axes of the region.

    Raises:
      UnknownAxisError: [T103] the mesh has no such axis.
      CollectiveError: [T206] the axis has no such rank, or a name for a value that
        no rank sends.
    """
    manual = manual_axes()
    if isinstance(what, str) or not manual:
        raise CollectiveError(
            f"no rank sends the value that recv_from({source!r}, …) receives",
            got=f"name {what!r}"
            if isinstance(what, str)
            else "a call outside of any SPMD region",
            fix="in a function with the strategy zero_redundancy_optimizer, write it "
            "after 'else' of 'if ts.mesh.current().rank == owner:'\n"
            "in an SPMD region, give it the array: recv_from(source, x), or use "
            "dist.broadcast(x, axis, root=source)",
        )
    return broadcast(what, tuple(manual) if axis is None else axis, root=source)


def _by_root(
    function: Callable[..., Array], x: Any, axis: Axis, root: int, dim: int
) -> Any:
    def one(operand: Operand) -> Array:
        along = operand.dim(dim)
        return operand.run(function, operand.rank(root), along, out_dim=along)

    return each(one, x, axis)


def _transferred(
    function: Callable[..., Array], x: Any, axis: Axis, source: Ranks, to: Ranks
) -> Any:
    def one(operand: Operand) -> Array:
        return operand.run(function, _pairs(operand, source, to), out_dim="same")

    return each(one, x, axis)


# --- checks


def _check_reduction(operand: Operand, op: str) -> None:
    dtype = operand.value.dtype
    if op == "sum" and not operand.is_block and scope.is_gradient(operand.value):
        raise CollectiveError(
            "the gradient is summed over all devices already",
            got=f"{jax.typeof(operand.value)}, by a loss of whole arrays",
            fix="leave the collective out: the compiler inserts it",
        )
    if op not in ("sum", "mean", "max", "min"):
        raise CollectiveError(
            "there is no such reduction",
            got=f"op {op!r}",
            fix="use 'sum', 'mean', 'max' or 'min'",
        )
    if op in ("sum", "mean") and dtype == jnp.bool_:
        raise CollectiveError(
            f"booleans have no {op}",
            got=f"{dtype.name}{list(operand.value.shape)}",
            fix="use op='max' for any, op='min' for all, or cast to i32 to count",
        )
    if op == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise CollectiveError(
            "integers have no mean of their own dtype",
            got=f"{dtype.name}{list(operand.value.shape)}",
            fix="use op='sum', or cast to f32 first",
        )


def _pairs(
    operand: Operand, source: Ranks, destination: Ranks
) -> tuple[tuple[int, int], ...]:
    sources = [source] if isinstance(source, int) else list(source)
    destinations = [destination] if isinstance(destination, int) else list(destination)
    paired = len(sources) == len(destinations)
    once = all(len(set(r)) == len(r) for r in (sources, destinations))
    if not paired or not once:
        raise CollectiveError(
            "sources and destinations do not pair up",
            got=f"sources {sources}, destinations {destinations}",
            fix="give one destination per source, each rank at most once on each side",
        )
    return tuple(
        (operand.rank(a), operand.rank(b))
        for a, b in zip(sources, destinations, strict=True)
    )
