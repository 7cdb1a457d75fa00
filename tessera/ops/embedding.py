# SPDX-License-Identifier: Apache-2.0
"""``ts.nn.embedding``: rows of a table by index, inside SPMD regions too.

Where a mesh splits the table, each device looks up what it has of the rows, in a region
over all axes, and devices exchange the parts. Otherwise this is a gather, except inside
a region over some axes, such as the stages of a pipeline: XLA cannot partition a gather
over the other axes there, and aborts the process.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from tessera.errors import OperandError
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import as_array, map_free_axes, region_mesh


def embedding(numbers: Any, table: Any) -> Array:
    """The rows of a table by index; NaN where the table has no such row.

    Args:
      numbers: Integers of any shape, from 0.
      table: ``[R, D]`` floating-point.

    Returns:
      ``[*dims of numbers, D]`` in the dtype of the table.

    Raises:
      OperandError: [T401] the numbers are not integers, or the table has other dims.

    Example:
      >>> print(embedding(jnp.array([1, 0]), jnp.array([[1.0, 2.0], [3.0, 4.0]])))
      [[3. 4.]
       [1. 2.]]
    """
    numbers, table = as_array(numbers), as_array(table)
    is_table = table.ndim == 2 and jnp.issubdtype(table.dtype, jnp.floating)
    if not is_table or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise OperandError(
            "embedding takes integers, and a floating-point table [R, D]",
            got=f"numbers {numbers.dtype.name}{list(numbers.shape)}, "
            f"table {table.dtype.name}{list(table.shape)}",
            fix="pass the numbers first and the table second",
        )
    return look_up(table, numbers)


def look_up(
    table: Array,
    numbers: Array,
    *,
    mesh: Mesh | None = None,
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    split: PartitionSpec = PartitionSpec(),  # noqa: B008 - a constant
) -> Array:
    """``table[numbers]``; NaN where the table has no such row.

    Devices that have some of the columns exchange these for whole rows, which is less
    than the table where its rows are many.

    Args:
      table: Floating point, global ``[R, D]``, per device ``[R / rows, D / columns]``.
      numbers: Integers of any shape, from 0.
      mesh: The mesh of these axes; None looks up by the layouts that XLA chooses.
      rows: Mesh axes that split the rows of the table.
      columns: Mesh axes that split its columns, and the first dim of the numbers.
      split: Layout of the numbers; in a region, over the axes that it leaves free.

    Returns:
      ``[*dims, D]``, laid out as the numbers, replicated over ``rows``.
    """
    region = jax.sharding.get_abstract_mesh()
    manual = set(region.manual_axes)
    free = [axis for axis in region.axis_names if axis not in manual]
    is_split = mesh is not None and mesh.axis_size((*rows, *columns)) > 1
    in_region = bool(manual) and any(region.shape[axis] > 1 for axis in free)
    if not in_region and (manual or not is_split):
        return table.at[numbers].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )

    def own_rows(block: Array, numbers: Array) -> Array:
        if columns:
            numbers = jax.lax.all_gather(numbers, columns, axis=0, tiled=True)
        first = jax.lax.axis_index(rows) * block.shape[0] if rows else 0
        index = numbers - first
        is_own = (index >= 0) & (index < block.shape[0])
        out = jnp.take(block, jnp.where(is_own, index, 0), axis=0, mode="clip")
        out = jnp.where(is_own[..., None], out, 0)
        out = jax.lax.psum(out, rows) if rows else out
        if not columns:
            return out
        return jax.lax.all_to_all(out, columns, 0, out.ndim - 1, tiled=True)

    specs = PartitionSpec(rows or None, columns or None), split
    outer = region if mesh is None else region_mesh(mesh)
    out = map_free_axes(own_rows, outer, specs, split)(table, numbers)
    exists = (numbers >= 0) & (numbers < table.shape[0])
    return jnp.where(exists[..., None], out, jnp.nan)
