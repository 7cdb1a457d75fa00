# SPDX-License-Identifier: Apache-2.0
"""ZeRO as layouts: what each stage shards over a data axis, and along which dim.

The stages shard what data parallelism replicates: stage 1 the optimizer state, stage 2
also the gradients, stage 3 also the parameters. Each layout is a PartitionSpec with the
axis added to one dim; the partitioner then inserts the reduce-scatters and all-gathers.
Used by the trainer and by ``ts.distribute``.

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from jax.sharding import PartitionSpec

from tessera.mesh import Mesh
from tessera.shard_spec import axes_of_dims, local_shape, spec_of_axes

# The first stage that shards each kind of state.
SPLIT_FROM: Final[Mapping[str, int]] = MappingProxyType(
    {"optimizer_state": 1, "gradients": 2, "params": 3}
)


def split_further(
    spec: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh,
    axis: str,
    *,
    keep: Collection[int] = (),
) -> PartitionSpec:
    """A layout that is also sharded over one more mesh axis.

    The axis goes to the largest unsharded dim that it divides; where there is none, to
    the sharded dim with the largest block, as its innermost axis. The first of equals.

    Args:
      spec: The layout so far.
      shape: Global shape of the array.
      mesh: The mesh of both.
      axis: The axis to add; an axis of one device changes nothing.
      keep: Dims to leave as they are, such as one that is scanned over.

    Returns:
      The new layout; the old one where no dim divides.

    Example:
      >>> mesh = Mesh(["dp", "tp"], devices=range(8), shape=(4, 2))
      >>> split_further(PartitionSpec(None, "tp"), (12, 64), mesh, "dp")
      P('dp', 'tp')
      >>> split_further(PartitionSpec("tp"), (64, 3), mesh, "dp")
      P(('tp', 'dp'),)
    """
    axes = list(axes_of_dims(spec, len(shape)))
    size = mesh.axis_size((axis,))
    if size == 1 or any(axis in names for names in axes):
        return spec
    blocks = local_shape(shape, spec, mesh)
    fits = [d for d, n in enumerate(blocks) if n and n % size == 0 and d not in keep]
    if not fits:
        return spec
    best = max(fits, key=lambda dim: (not axes[dim], blocks[dim], -dim))
    axes[best] = (*axes[best], axis)
    return spec_of_axes(axes)
