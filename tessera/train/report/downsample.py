# SPDX-License-Identifier: Apache-2.0
"""Reduces a curve to the points that a screen can show, and keeps every spike.

The steps are divided into buckets, of each of which the lowest and the highest value
stay, where they are. A value that is not finite stays as a gap of its bucket.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Final

MOST_POINTS: Final = 2000
"""Points of one curve in the report."""


def downsample(
    steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[int], list[float | None]]:
    """The lowest and the highest point of each bucket, of a curve with too many.

    Args:
      steps: In rising order.
      values: One for each step.
      most: The most points to leave, gaps aside; at least 4.

    Returns:
      Steps and values, where None is a gap: a value that is not finite.

    Example:
      >>> downsample(range(6), [0, 9, 1, 1, -9, 1], most=4)
      ([0, 1, 4, 5], [0, 9, -9, 1])
    """
    chosen: list[int] = [*range(len(steps))]
    if len(steps) > most:
        size = -(-len(steps) // ((most - 2) // 2))
        picked = {0, len(steps) - 1}
        for start in range(0, len(steps), size):
            bucket = range(start, min(start + size, len(steps)))
            finite = [i for i in bucket if isfinite(values[i])]
            if finite:
                picked.add(min(finite, key=values.__getitem__))
                picked.add(max(finite, key=values.__getitem__))
            if len(finite) < len(bucket):
                picked.add(next(i for i in bucket if not isfinite(values[i])))
        chosen = sorted(picked)
    return (
        [steps[i] for i in chosen],
        [values[i] if isfinite(values[i]) else None for i in chosen],
    )
