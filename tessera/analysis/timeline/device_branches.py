# SPDX-License-Identifier: Apache-2.0
"""Finds how often branches are taken that a device chooses by its place in the mesh.

Stages of a pipeline compute and idle in turn, and devices of a ring mask different
blocks. Where the devices that differ also communicate in each iteration around a
branch, they wait for the one that takes longest, and its branch counts; elsewhere each
has work of its own, and the mean over them counts.
"""

from collections.abc import Collection, Sequence

import numpy as np

from tessera.analysis.constant_values import Frame
from tessera.analysis.hlo import Instruction
from tessera.mesh import Mesh

_MOST_ALONG_AXIS = 16


class DeviceBranches:
    """Looks at the devices along each axis of a mesh, at the beginning of the others.

    Args:
      mesh: The mesh of the program, in the order of its devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._axes, self._sizes = mesh.axes, tuple(mesh.shape.values())
        self._partitions = sorted(
            {
                int(np.ravel_multi_index(self._place(number, index), self._sizes))
                for number, size in enumerate(self._sizes)
                for index in range(0, size, -(-size // _MOST_ALONG_AXIS))
            }
        )

    def shares(
        self,
        frame: Frame,
        conditional: Instruction,
        seconds: Sequence[float],
        synchronized: Collection[str],
    ) -> tuple[float, ...] | None:
        """How often each branch is taken, as shares of 1; None where data decide.

        Args:
          frame: Of the computation that contains the conditional.
          conditional: It.
          seconds: How long each branch takes.
          synchronized: The axes along which devices wait for each other in each
            iteration of the loop around it.
        """
        on_devices = frame.on(self._partitions)
        taken, lanes = on_devices.taken(conditional), on_devices.lanes
        if taken is None or lanes.partitions is None:
            return None
        _, steps = np.unique(lanes.steps, return_inverse=True)
        places = np.array(np.unravel_index(lanes.partitions.astype(int), self._sizes))
        lines = [places.sum(0) == along for along in places]
        varying = [
            number
            for number, line in enumerate(lines)
            if _differs(steps[line], taken[line])
        ]
        if varying:
            chosen = np.any([lines[number] for number in varying], axis=0)
            steps, taken = steps[chosen], taken[chosen]
        if any(self._axes[number] in synchronized for number in varying):
            order = np.lexsort((np.array(seconds)[taken], steps))
            last = np.append(np.diff(steps[order]) > 0, True)
            taken = taken[order][last]
        counts = np.bincount(taken, minlength=len(seconds))
        return tuple(float(each) for each in counts / len(taken))

    def _place(self, number: int, index: int) -> list[int]:
        return [index if axis == number else 0 for axis in range(len(self._sizes))]


def _differs(steps: np.ndarray, taken: np.ndarray) -> bool:
    """Whether lanes of one step take different branches."""
    if not len(steps):
        return False
    least = np.full(steps.max() + 1, np.iinfo(int).max)
    most = np.full(steps.max() + 1, -1)
    np.minimum.at(least, steps, taken)
    np.maximum.at(most, steps, taken)
    return bool((least < most).any())
