# SPDX-License-Identifier: Apache-2.0
"""Assigns contiguous layers to pipeline stages of about equal cost."""

from collections.abc import Callable, Sequence

import numpy as np

from tessera.errors import PipelineSizeError


def balanced(
    costs: Sequence[float], parts: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """The contiguous split whose slowest part is as fast as possible.

    Ties go to the least sum of squares, so the other parts are as equal as possible.
    Every layer is in exactly one part, and no part is empty.

    Args:
      costs: The cost of each layer, in any unit; not negative.
      parts: How many parts to make: the virtual stages of a pipeline.
      first: Cost of the first part beside its layers, such as the embedding.
      last: Cost of the last part beside its layers, such as the head and the loss.

    Returns:
      The layers of each part, in order.

    Raises:
      PipelineSizeError: [T311] there are fewer layers than parts, or no part at all, or
        a cost is negative or not finite.

    Example:
      >>> balanced([1.0] * 10, 4)
      (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
      >>> balanced([1.0] * 10, 4, last=2.0)
      (range(0, 3), range(3, 6), range(6, 9), range(9, 10))
    """
    _check(costs, parts, first, last)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    total = sums[-1] + first + last or 1.0
    # [begin, end]: what layers begin to end - 1 cost, as a share of the whole; rounded,
    # here and below, so that sums of equal costs are equal.
    shares = np.round((sums[None] - sums[:, None]) / total, 12)
    shares[np.tril_indices_from(shares)] = np.inf
    tables = [shares] * parts
    tables[0] = tables[0] + first / total
    tables[-1] = tables[-1] + last / total

    limit = _best(tables, np.maximum)[0] + 1e-11
    squares = [np.where(table <= limit, table**2, np.inf) for table in tables]
    ends = _best(squares, np.add)[1]
    return tuple(range(a, b) for a, b in zip([0, *ends], ends, strict=False))


def describe(
    split: Sequence[range],
    costs: Sequence[float],
    *,
    first: float = 0.0,
    last: float = 0.0,
) -> str:
    """One line with the layers of each stage and its share of the cost.

    Args:
      split: What :func:`balanced` returned.
      costs: As for :func:`balanced`, and so are the others.
      first: See above.
      last: See above.

    Example:
      >>> print(describe(balanced([1.0] * 5, 2), [1.0] * 5))
      stage 0: layers 0-2, cost 0.60; stage 1: layers 3-4, cost 0.40
    """
    each = [sum(costs[layer] for layer in part) for part in split]
    each[0] += first
    each[-1] += last
    total = sum(each) or 1.0
    return "; ".join(
        f"stage {stage}: {_layers(part)}, cost {cost / total:.2f}"
        for stage, (part, cost) in enumerate(zip(split, each, strict=True))
    )


def _layers(part: range) -> str:
    if len(part) == 1:
        return f"layer {part[0]}"
    return f"layers {part[0]}-{part[-1]}"


def _check(costs: Sequence[float], parts: int, first: float, last: float) -> None:
    if parts < 1:
        raise PipelineSizeError(
            "a pipeline has at least one stage", got=f"{parts} stages", fix="use 1"
        )
    if len(costs) < parts:
        raise PipelineSizeError(
            "a pipeline has fewer layers than stages, so that a stage would be empty",
            got=f"{len(costs)} layers, {parts} stages",
            fix=f"use at most {len(costs)} stages (devices x chunks), "
            f"or at least {parts} layers",
        )
    wrong = [cost for cost in (*costs, first, last) if not 0.0 <= cost < float("inf")]
    if wrong:
        raise PipelineSizeError(
            "the cost of a layer is a number that is not negative",
            got=f"cost {wrong[0]!r}",
            fix="give every layer a cost such as its number of operations",
        )


def _best(
    tables: Sequence[np.ndarray],
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[float, list[int]]:
    """The split with the least combined value, by dynamic programming over parts.

    Args:
      tables: For each part float64 [begin, end], the value of those layers in it.
      combine: The value of parts together: their maximum, or their sum.

    Returns:
      That value, and where each part ends.
    """
    best = np.full(len(tables[0]), np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    for values in tables:
        candidates = np.round(combine(best[:, None], values), 12)
        # The last of equals: earlier parts have the more layers.
        choice = len(best) - 1 - np.argmin(candidates[::-1], axis=0)
        best = np.take_along_axis(candidates, choice[None], axis=0)[0]
        choices.append(choice)
    ends = [len(best) - 1]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return float(best[-1]), ends[::-1]
