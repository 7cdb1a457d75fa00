# SPDX-License-Identifier: Apache-2.0
"""Assigns a model's layers to pipeline stages, and stores them by stage.

A model keeps each kind of layer parameter in one array with a leading ``layers`` dim.
For a pipeline this dim becomes three: ``[chunks, stages, layers, ...]``. The second is
sharded over the mesh axis ``pp``, so a device stores its own stages and no others,
their gradients and their optimizer state. Virtual stage ``k``, which has the ``k``-th
range of layers, is at ``[k // stages, k % stages]``; of a "v", where chunk ``c`` of
device ``d`` is the stage of ``stage_of("v", stages, d, c)``.

Where the layers do not divide, some stages have fewer than others, and padding: zeros
that no layer reads, whose gradient is zero, so that they stay zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tessera.foundations.tree import Tree
from tessera.graph.pipelining import Placement, stage_of
from tessera.mesh import Mesh
from tessera.train.models.balance_stages import balanced


@dataclass(frozen=True)
class StageSplit:
    """The layers of each virtual stage.

    Attributes:
      stages: Devices along the pipeline.
      layers: The range of layers of each virtual stage, in the order in which stages
        are stored; as many as ``stages``, or a multiple.
      blocks: The entry of the parameters that is stored so.

    Example:
      >>> split = StageSplit(2, (range(0, 3), range(3, 5)))
      >>> split.numbers.tolist()
      [[[0, 1, 2], [3, 4, 5]]]
    """

    stages: int
    layers: tuple[range, ...]
    blocks: str = "decoder"

    @classmethod
    def of(
        cls,
        config: Any,
        stages: int,
        chunks: int = 1,
        placement: Placement = "loop",
    ) -> "StageSplit":
        """The split whose slowest virtual stage is as fast as possible.

        ``config.layer_costs`` are sizes of matmuls, as those of ``Model``. The first
        stage has the embedding, whose cost is negligible, and the last the logits.

        Raises:
          PipelineSizeError: [T311] there are more virtual stages than layers.
        """
        costs, head = config.layer_costs
        runs = _balanced(tuple(costs), stages * chunks, head)
        places = product(range(chunks), range(stages))
        stored = [stage_of(placement, stages, d, chunk) for chunk, d in places]
        return cls(stages, tuple(runs[stage] for stage in stored))

    @property
    def chunks(self) -> int:
        """Virtual stages of each device."""
        return len(self.layers) // self.stages

    @property
    def depth(self) -> int:
        """The number of layers that each virtual stage stores, padding included."""
        return max(map(len, self.layers))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return max(layers.stop for layers in self.layers)

    @property
    def runs(self) -> tuple[range, ...]:
        """The range of layers of each virtual stage, in the order of the layers."""
        return tuple(sorted(self.layers, key=lambda layers: layers[0]))

    @property
    def numbers(self) -> np.ndarray:
        """int32 ``[chunks, stages, depth]``: the number of each stored layer.

        The numbers of padding are those from the number of layers on.
        """
        table = self._numbers_of(self.layers)
        return table.reshape(self.chunks, self.stages, self.depth)

    @property
    def by_stage(self) -> np.ndarray:
        """int32 ``[virtual stages, depth]``: the same for each virtual stage."""
        return self._numbers_of(self.runs)

    def _numbers_of(self, runs: Sequence[range]) -> np.ndarray:
        padding = range(self.num_layers, self.num_layers + self.depth)
        rows = [[*layers, *padding] for layers in runs]
        return np.array([row[: self.depth] for row in rows], np.int32)

    @property
    def is_even(self) -> bool:
        """Whether no stage has padding."""
        return len(set(map(len, self.layers))) == 1

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of an array ``[layers, ...]``."""
        return (self.chunks, self.stages, self.depth, *shape[1:])

    def dim_names(self, names: Tree) -> Tree:
        """The logical names of stored dims, from those of arrays ``[layers, ...]``."""

        def staged(dims: tuple[str | None, ...]) -> tuple[str | None, ...]:
            return (None, "stages", *dims)

        return jax.tree.map(staged, names, is_leaf=lambda x: isinstance(x, tuple))

    def stack(self, layers: Tree) -> Tree:
        """Arrays ``[layers, ...]`` in their stored shape."""
        return jax.tree.map(self._stacked, layers)

    def unstack(self, stored: Tree) -> Tree:
        """Stored arrays as ``[layers, ...]``, without padding."""
        return jax.tree.map(self._unstacked, stored)

    def _stacked(self, layers: Array) -> Array:
        shape = self.shape(layers.shape)
        if self._is_plain:
            return layers.reshape(shape)
        rows = jnp.take(
            layers, self.numbers.reshape(-1), axis=0, mode="fill", fill_value=0
        )
        return rows.reshape(shape)

    def _unstacked(self, stored: Array) -> Array:
        rows = stored.reshape(-1, *stored.shape[3:])
        if self._is_plain:
            return rows
        order = np.argsort(self.numbers.reshape(-1), kind="stable")
        return rows[order[: self.num_layers]]

    @property
    def _is_plain(self) -> bool:
        """Whether layers are stored in their order, without padding."""
        return self.is_even and self.layers == self.runs


@cache
def _balanced(costs: tuple[float, ...], parts: int, head: float) -> tuple[range, ...]:
    return balanced(costs, parts, last=head)


def split_of(
    mesh: Mesh | None, config: Any, chunks: int, placement: Placement = "loop"
) -> StageSplit | None:
    """The layers of each stage; None where the mesh has no ``pp``.

    Raises:
      PipelineSizeError: [T311] there are more virtual stages than layers.
    """
    if mesh is None or "pp" not in mesh.axes:
        return None
    return StageSplit.of(config, mesh.shape["pp"], chunks, placement)
