# SPDX-License-Identifier: Apache-2.0
"""Packed rows for cuDNN: the arrays that it takes, and who computes other rows.

cuDNN does not run here. A stand-in computes what it would from the same arrays.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.attention import cudnn
from tessera.ops.attention.dispatch import Operands, Options
from tessera.ops.attention.packed_rows import Segments
from tests.ops.attention import reference
from tests.ops.attention.exact import drawn, exact

MOST = 4
# Whether cuDNN gets a row, and its ids.
ROWS = {
    "one segment": (True, [3] * 12),
    "padding at the end": (True, [1] * 5 + [2] * 4 + [0] * 3),
    "ids in any order": (True, [9, 9, 2, 2, 2, -1, -1, 5, 5, 5, 5, 5]),
    "as many as there may be": (True, [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4]),
    "one too many": (False, [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5]),
    "a segment of two runs": (False, [1] * 4 + [2] * 4 + [1] * 4),
}


@pytest.fixture(scope="module")
def stand_in():
    """In the place of cuDNN: attention within the runs that it is told of.

    Tokens of none get NaN. It counts its calls at run time.
    """
    calls = []

    def attend(q, k, v, lengths, offsets, *, scale, causal, window):
        index = jnp.arange(q.shape[1])
        first, length = offsets[:, :-1, None], lengths[:, :, None]
        inside = (index >= first) & (index < first + length) & (first >= 0)
        ids = jnp.where(inside.any(1), inside.argmax(1), -1).astype(jnp.int32)
        heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        operands = Operands(*heads_first, segments=ids)
        out = reference.attend(operands, Options(causal, scale, window))
        jax.debug.callback(lambda: calls.append(1))
        return jnp.where(
            inside.any(1)[..., None, None], jnp.swapaxes(out, 1, 2), np.nan
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "packed_attention", attend)
        patch.setattr(cudnn, "max_segments", lambda length: MOST)
        yield calls


@pytest.mark.parametrize(("is_listed", "ids"), ROWS.values(), ids=ROWS)
def test_segments_are_runs_of_equal_ids(is_listed, ids):
    lengths, offsets, are_listed = Segments.of(jnp.asarray([ids], jnp.int32), MOST)
    assert bool(are_listed) == is_listed
    if not is_listed:
        return
    runs = np.flatnonzero(np.diff([ids[0] - 1, *ids])).tolist()
    rest = MOST - len(runs)
    assert offsets.tolist() == [runs + [-1] * (rest + 1)]
    assert lengths.tolist() == [np.diff([*runs, len(ids)]).tolist() + [-1] * rest]


def test_rows_may_be_shorter_than_the_number_of_segments():
    found = Segments.of(jnp.asarray([[4, 4, 6]]), 8)
    assert found.lengths.tolist() == [[2, 1] + [-1] * 6]
    assert found.offsets.tolist() == [[0, 2] + [-1] * 7]
    assert found.are_listed


@cache
def step(window):
    """The output and the gradients; one program for all rows."""
    options = Options(True, 0.3, window)

    def run(operands, gradient):
        def attend(q, k, v):
            return cudnn.attend(operands._replace(q=q, k=k, v=v), options)

        out, backward = jax.vjp(attend, *operands[:3])
        return out, *backward(gradient)

    return jax.jit(run), options


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize("window", [None, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(("is_listed", "ids"), ROWS.values(), ids=ROWS)
def test_a_token_attends_to_its_own_segment(stand_in, is_listed, ids, window):
    stand_in.clear()
    rows = jnp.asarray([ids, [1] * 12], jnp.int32)
    operands, gradient = drawn(batch=2, heads=4, groups=2, queries=12, keys=12)
    operands = operands._replace(segments=rows)
    run, options = step(window)
    found = run(operands, gradient)
    jax.effects_barrier()
    assert bool(stand_in) == is_listed
    for one, other in zip(found, exact(operands, options, gradient), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
