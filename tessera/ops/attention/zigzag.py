# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a sequence are distributed over the devices of a mesh axis.

Contiguous: each of n devices holds one run of tokens, in order. Under a causal mask the
last device then has the most work, and the others wait for it. Zigzag: the sequence is
cut into 2n chunks and device r holds chunks r and 2n - 1 - r, so that every device has
the same number of pairs of a query and a key that it attends to.

    n = 4, chunks 0 … 7        device 0   device 1   device 2   device 3
    contiguous                   0 1        2 3        4 5        6 7
    zigzag                       0 7        1 6        2 5        3 4

Source: A. Dubey et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2;
balancing a ring: W. Brandon et al., Striped Attention, arXiv 2311.09431.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from tessera.errors import ShardDivisibilityError, nearest_multiples

Order: TypeAlias = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Arrangement:
    """The order in which the devices of an axis hold the tokens of a sequence.

    Attributes:
      order: ``contiguous`` or ``zigzag``.
      size: Devices along the axis.

    Example:
      >>> Arrangement("zigzag", 2).positions(8)
      array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """

    order: Order
    size: int

    @property
    def runs(self) -> int:
        """Chunks of a device, each of consecutive tokens."""
        return 2 if self.order == "zigzag" else 1

    @property
    def chunks(self) -> npt.NDArray[np.int32]:
        """The chunks in the order of the devices that hold them."""
        ascending = np.arange(self.size, dtype=np.int32)
        if self.order == "contiguous":
            return ascending
        return np.stack([ascending, 2 * self.size - 1 - ascending], axis=1).reshape(-1)

    def positions(self, length: int) -> npt.NDArray[np.int32]:
        """The position of each token in the sequence, in the order of the devices.

        Raises:
          ShardDivisibilityError: [T201] the chunks do not divide the sequence.
        """
        rows = np.arange(self.chunk_length(length), dtype=np.int32)
        return (self.chunks[:, None] * rows.size + rows).reshape(-1)

    def chunk_length(self, length: int) -> int:
        """Tokens of one chunk of a sequence.

        Raises:
          ShardDivisibilityError: [T201] the chunks do not divide the sequence.
        """
        count = self.size * self.runs
        if length % count == 0:
            return length // count
        raise ShardDivisibilityError(
            f"a sequence cannot be cut into the {count} chunks that {self.size} "
            f"devices hold in {self.order} order",
            got=f"{length} tokens: {length} / {count} leaves {length % count}",
            fix=f"use a sequence of {nearest_multiples(count, length)} tokens",
        )

    def apply(self, x: Any, dim: int) -> Any:
        """Reorder an array from the order of the sequence to that of the devices."""
        return self._permuted(x, dim, self.chunks)

    def undo(self, x: Any, dim: int) -> Any:
        """Reorder an array from the order of the devices to that of the sequence."""
        return self._permuted(x, dim, np.argsort(self.chunks))

    def _permuted(self, x: Any, dim: int, chunks: npt.NDArray[Any]) -> Any:
        if self.order == "contiguous":
            return x
        dim %= x.ndim
        rows = self.chunk_length(x.shape[dim])
        parts = x.reshape(*x.shape[:dim], chunks.size, rows, *x.shape[dim + 1 :])
        return jnp.take(parts, chunks, axis=dim).reshape(x.shape)


@dataclass(frozen=True)
class ContextSharding:
    """How the sequences of an attention are split over a mesh axis.

    Attributes:
      axis: The mesh axis.
      arrangement: Which tokens each device of the axis holds.
      causal: Whether a query attends only to keys at or before its position.
      wire: The dtype in which operands of matmuls are sent; None is their own.
      divergent: Whether the devices of the axis may be in a branch of the program that
        other devices are not in, as the stages of a pipeline are.
      soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; None leaves them.
    """

    axis: str
    arrangement: Arrangement
    causal: bool = True
    wire: str | None = None
    divergent: bool = False
    soft_cap: float | None = None
