# SPDX-License-Identifier: Apache-2.0
"""What the ragged matmuls of experts cost beside their FLOPs.

On CPUs XLA has no kernel for them. There it multiplies each row by the matrices of all
groups, with zeros in the place of rows of other groups: as many times the work, and
operands as many times as large. Over the axes of experts rows are exchanged in buffers
that are larger than what is in them.
"""

from collections.abc import Iterator
from typing import Final

from tessera.ops.moe.routing import RoutingOptions
from tessera.train.models.partition_rules import Placement
from tessera.train.planner.matmuls import Product
from tessera.train.planner.workload import LEAST, Workload

_F32: Final = 4
# Buffers of an exchange, counted in programs for CPUs, H100 and v5p: those that a layer
# has at a time if there may be further rounds, by platform, and those that it keeps for
# its backward pass, by the policy of rematerialization.
_OF_ROUNDS: Final = {"cpu": 16.0, "gpu": 0.0, "tpu": 16.0}
_KEPT: Final = {"none": 5.5, "full": 0.0, LEAST: 0.0}
_KEPT_OTHERWISE: Final = 3.0


class RaggedProducts:
    """The ragged matmuls of one device.

    Args:
      work: What is computed.
      place: The layout of the model's dims on the mesh.
      platform: Of the device.
    """

    def __init__(self, work: Workload, place: Placement, platform: str) -> None:
        self.work, self._num_devices = work, place.size("experts")
        self._platform, self._has_masks = platform, platform == "cpu"

    def devices(self, product: Product) -> int:
        """Over which the matrices of a product are split."""
        is_split = product.groups > 1 and "experts" in product.outer_names
        return self._num_devices if is_split else 1

    def rows(self, product: Product) -> float:
        """Of one sequence, with those of buffers that are empty if all is even."""
        is_exchanged = self.devices(product) > 1
        return product.rows * (RoutingOptions.buffer_factor if is_exchanged else 1.0)

    def matrices(self, product: Product) -> float:
        """By which the device multiplies each row of a product."""
        is_masked = self._has_masks and product.groups > 1
        return product.groups / self.devices(product) if is_masked else 1.0

    def buffer_bytes(self) -> float:
        """Of buffers of all layers at a time, beside those of one round."""
        return _OF_ROUNDS[self._platform] * sum(
            nbytes for nbytes, has_rounds in self._exchanges() if has_rounds
        )

    def kept_bytes(self, policy: str) -> float:
        """Of the buffers of one sequence that layers keep for their backward pass."""
        number = _KEPT.get(policy, _KEPT_OTHERWISE)
        return number * sum(nbytes for nbytes, _ in self._exchanges())

    def _exchanges(self) -> Iterator[tuple[float, bool]]:
        """Bytes of the rows of one sequence, and whether there may be more rounds."""
        seen: set[int] = set()
        for each in self.work.products:
            is_first = "mlp" in each.outer_names and each.source not in seen
            if self.devices(each) == 1 or not is_first:
                continue
            seen.add(each.source)
            choices = each.rows / self.work.sequence_length
            most = min(choices * self.devices(each), each.groups)
            has_rounds = most > RoutingOptions.buffer_factor * choices
            yield each.times * self.rows(each) * each.inner * _F32, has_rounds
