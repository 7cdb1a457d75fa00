# SPDX-License-Identifier: Apache-2.0
"""Ring attention: queries stay, keys and values are passed around the ring.

Each device folds the keys that it holds into the online softmax of its own queries
while it sends them on. After n - 1 hops every query has attended to every key, and no
device has ever held more than the keys of two devices. The backward pass sends them
around once more instead of saving them; the gradients of keys and values travel with
them, and one hop further, back to their device.

Source: H. Liu, M. Zaharia, P. Abbeel, arXiv 2310.01889.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array, lax

from tessera.ops.attention.context_parallel_residuals import KeyExchange
from tessera.ops.attention.tiling import Rows, Tiling


@dataclass(frozen=True)
class Ring(KeyExchange):
    """Attention over an axis around which keys and values are passed.

    After h hops a device holds the keys of the device h ranks before it.
    Sends, for each device, n - 1 times its keys and values forward; as much again
    backward, and n times their f32 gradients.
    """

    @property
    def hops(self) -> int:
        """After the last hop, nothing is sent."""
        return self.sharding.arrangement.size - 1

    def collect(self, kv: Array) -> Array:
        """The keys and values of this device, in the dtype that is sent."""
        return kv.astype(self.sharding.wire or kv.dtype)

    def collect_vjp(self, kv: Array) -> tuple[Array, Callable[[Array], Array]]:
        """:meth:`collect`, and one more hop, which returns gradients to their owner."""

        def transpose(gradient: Array) -> Array:
            return self.send(gradient).astype(kv.dtype)

        return self.collect(kv), transpose

    def send(self, x: Array) -> Array:
        """Pass an array on to the next device, and receive that of the previous one."""
        size = self.sharding.arrangement.size
        pairs = [(rank, (rank + 1) % size) for rank in range(size)]
        return lax.ppermute(x, self.sharding.axis, pairs)

    def blocks(
        self, length: int, segments: Array | None
    ) -> tuple[tuple[Tiling, Rows], tuple[Tiling, Callable[[Any], Rows]]]:
        """How queries, and keys after some hops, are cut into blocks."""
        tiling = Tiling(self.sharding.arrangement.runs, length)

        def rows(hop: Any) -> Rows:
            return self.rows_of_device(tiling, hop, segments)

        return (tiling, rows(0)), (tiling, rows)
