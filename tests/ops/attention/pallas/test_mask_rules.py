# SPDX-License-Identifier: Apache-2.0
"""The ranges of blocks that the kernels visit, against the mask of each pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.attention import reference
from tessera.ops.attention.dispatch import Operands, Options
from tessera.ops.attention.pallas.mask_rules import Rules

QUERIES, KEYS = 64, 80  # padded to 96 keys
ROWS, COLUMNS = 32, 16


def masked(options):
    """Which of the padded keys each query attends to: bool ``[QUERIES, 96]``."""
    q, k = (jax.ShapeDtypeStruct((1, 1, n, 8), jnp.float32) for n in (QUERIES, KEYS))
    mask = np.asarray(reference.visible(Operands(q, k, k), options))[0]
    return np.pad(mask, ((0, 0), (0, 96 - KEYS)))


def check_ranges(visible, ranges):
    """``visible`` and ``ranges`` are by block, of the blocks that are iterated over."""
    (start, stop), (first, last) = (map(int, pair) for pair in ranges)
    blocks = np.arange(len(visible))
    iterated = (start <= blocks) & (blocks < stop)
    assert not visible[~iterated].any()
    # As in the loop, which clamps the range to the blocks that it iterates over.
    whole = iterated & (first <= blocks) & (blocks < last)
    assert visible[whole].all()


@pytest.mark.parametrize("offset", [0, -20, 25, 70])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), *((True, n) for n in (None, 1, 24, 60))]
)
def test_blocks_outside_of_a_range_are_masked_and_whole_ones_are_not(
    causal, window, offset
):
    options = Options(causal, 1.0, window, offset=offset)
    rules, mask = Rules(options, KEYS, padded=True), masked(options)
    for first in range(0, QUERIES, ROWS):
        at = first + offset, ROWS, COLUMNS
        check_ranges(
            mask[first : first + ROWS].reshape(ROWS, -1, COLUMNS).swapaxes(0, 1),
            (rules.key_blocks(*at), rules.whole_key_blocks(*at)),
        )
    count = QUERIES // COLUMNS
    for first in range(0, 96, ROWS):
        at = first - offset, ROWS, COLUMNS, count
        begin, end = rules.whole_query_blocks(*at)
        # The caller knows whether there is padding among the keys.
        end = 0 if first + ROWS > KEYS else end
        check_ranges(
            mask[:, first : first + ROWS].reshape(count, COLUMNS, ROWS),
            (rules.query_blocks(*at), (begin, end)),
        )
    query = offset + jnp.arange(QUERIES)[:, None]
    visible = rules.visible(query, jnp.arange(96)[None])
    np.testing.assert_array_equal(np.broadcast_to(visible, mask.shape), mask)
