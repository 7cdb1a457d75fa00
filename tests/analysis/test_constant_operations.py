# SPDX-License-Identifier: Apache-2.0
"""Single operations on known numbers, against NumPy and against what JAX computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tessera.analysis.constant_values import Frame
from tessera.analysis.hlo import parse


def result_of(*lines):
    text = "\n  ".join(["HloModule m\nENTRY e {", *lines]) + "\n}"
    frame = Frame.entry(parse(text))
    known = frame.value(frame.computation.root.name)
    return None if known is None else known[0].tolist()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ROOT c = s32[2,2] constant({ { 1, 2 }, { 3, -4 } })"], [[1, 2], [3, -4]]),
        (["ROOT c = pred[2] constant({true, false})"], [True, False]),
        (["ROOT i = s32[2,3] iota(), iota_dimension=1"], [[0, 1, 2], [0, 1, 2]]),
        (
            [
                "a = s32[] constant(-7)",
                "b = s32[] constant(2)",
                "ROOT d = s32[] divide(a, b)",
            ],
            -3,
        ),
        (
            [
                "a = s32[] constant(-7)",
                "b = s32[] constant(2)",
                "ROOT d = s32[] remainder(a, b)",
            ],
            -1,
        ),
        (
            [
                "a = f32[] constant(-7)",
                "b = f32[] constant(2)",
                "ROOT d = f32[] divide(a, b)",
            ],
            -3.5,
        ),
        (
            [
                "a = u8[] constant(250)",
                "b = u8[] constant(10)",
                "ROOT d = u8[] add(a, b)",
            ],
            4,
        ),
        (
            [
                "i = s32[4] iota(), iota_dimension=0",
                "z = s32[] constant(1)",
                "t = s32[] constant(2)",
                "ROOT c = s32[4] clamp(z, i, t)",
            ],
            [1, 1, 2, 2],
        ),
        (
            [
                "i = s32[5] iota(), iota_dimension=0",
                "ROOT s = s32[2] slice(i), slice={[1:5:2]}",
            ],
            [1, 3],
        ),
        # A slice that would leave the array is moved into it.
        (
            [
                "i = s32[5] iota(), iota_dimension=0",
                "n = s32[] constant(4)",
                "ROOT s = s32[2] dynamic-slice(i, n), dynamic_slice_sizes={2}",
            ],
            [3, 4],
        ),
        (
            [
                "i = s32[2,3] iota(), iota_dimension=1",
                "ROOT t = s32[3,2] transpose(i), dimensions={1,0}",
            ],
            [[0, 0], [1, 1], [2, 2]],
        ),
        (
            [
                "i = s32[2] iota(), iota_dimension=0",
                "v = s32[] constant(9)",
                "ROOT p = s32[5] pad(i, v), padding=1_2",
            ],
            [9, 0, 1, 9, 9],
        ),
        (
            [
                "i = s32[4] iota(), iota_dimension=0",
                "u = s32[2] constant({7, 8})",
                "n = s32[] constant(3)",
                "ROOT s = s32[4] dynamic-update-slice(i, u, n)",
            ],
            [0, 1, 7, 8],
        ),
        (["ROOT c = s32[40] constant({...})"], None),
        (["x = s32[] parameter(0)", "ROOT y = s32[] negate(x)"], None),
        # A bitcast between layouts changes the order of the elements.
        (
            [
                "i = s32[2,3]{1,0} iota(), iota_dimension=1",
                "ROOT b = s32[3,2]{0,1} bitcast(i)",
            ],
            None,
        ),
        (
            [
                "i = s32[2,3]{0,1} iota(), iota_dimension=1",
                "ROOT b = s32[3,2]{1,0} bitcast(i)",
            ],
            None,
        ),
        (
            [
                "i = s32[1,3]{0,1} iota(), iota_dimension=1",
                "ROOT b = s32[3]{0} bitcast(i)",
            ],
            [0, 1, 2],
        ),
    ],
)
def test_operations_are_evaluated_as_xla_does(lines, expected):
    assert result_of(*lines) == expected


def causal_blocks():
    """Which blocks of causal attention are visible, and other integer arithmetic."""
    rows = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    first, last = rows.min(1), rows.max(1)
    some = first[None, :] <= last[:, None]
    every = (last[None, :] <= first[:, None]) & (last[:, None] - first[None, :] < 7)
    kinds = jnp.where(every, 0, jnp.where(some, 1, 2)).astype(jnp.int32)
    row = lax.dynamic_slice(kinds, (jnp.int32(2), jnp.int32(1)), (1, 3))
    return jnp.concatenate([kinds.ravel(), (row * 5 % 3 - 1).ravel()])


@pytest.mark.parametrize("optimization", [True, False], ids=["optimized", "lowered"])
def test_a_program_of_integers_evaluates_to_what_it_computes(optimization):
    lowered = jax.jit(causal_blocks).lower()
    text = (
        lowered.compile().as_text() if optimization else lowered.as_text(dialect="hlo")
    )
    frame = Frame.entry(parse(text))
    known = frame.value(frame.computation.root.name)
    if known is None and optimization:
        pytest.skip("XLA folded the program into a constant that it does not print")
    np.testing.assert_array_equal(known[0], causal_blocks())
