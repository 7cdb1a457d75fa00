# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention that a GPU has, beside attention in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.attention.dispatch import (
    Device,
    Operands,
    Options,
    attend,
    unsupported_reason,
)
from tests.on_gpu import only_on_gpu
from tests.ops.attention.exact import check_as_exact_as_the_reference, drawn

pytestmark = only_on_gpu

MASKS = {
    "no mask": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 200},
    "soft cap": {"causal": True, "soft_cap": 20.0},
    "window and soft cap": {"causal": True, "window": 200, "soft_cap": 20.0},
    "packed": {"causal": True},
    "packed, window": {"causal": True, "window": 100},
}
# Those of cuDNN first, then what it refuses.
CALLS = [
    *((name, "cudnn", width) for name in MASKS for width in (64, 128, 256)),
    *((name, "xla", 128) for name in MASKS),
]


def packed(operands: Operands) -> Operands:
    """Five segments of unequal lengths in each row."""
    rows, length = operands.q.shape[0], operands.q.shape[2]
    ids = np.random.default_rng(1).integers(0, 5, (rows, length))
    ids = jnp.asarray(np.sort(ids, axis=1), jnp.int32)
    return operands._replace(segments=ids)


@pytest.mark.parametrize(("mask", "name", "width"), CALLS)
def test_values_and_gradients_are_as_exact_as_the_reference(mask, name, width):
    setting = Options(**{"causal": False, "scale": width**-0.5} | MASKS[mask])
    operands, gradient = drawn(
        batch=2, heads=4, groups=2, queries=512, keys=512, width=width, dtype="bfloat16"
    )
    if mask.startswith("packed"):
        operands = packed(operands)
    if reason := unsupported_reason(name, operands, setting, Device.here()):
        pytest.skip(reason)

    def attended(operands: Operands) -> jax.Array:
        return attend(name, operands, setting)

    check_as_exact_as_the_reference(attended, operands, setting, gradient)


@pytest.mark.parametrize("name", ["cudnn", "xla"])
@pytest.mark.parametrize("length", [1, 500])
def test_lengths_that_fill_no_tile(name, length):
    setting = Options(causal=True, scale=0.125)
    operands, gradient = drawn(
        heads=2, queries=length, keys=length, width=64, dtype="bfloat16"
    )
    if reason := unsupported_reason(name, operands, setting, Device.here()):
        pytest.skip(reason)
    check_as_exact_as_the_reference(
        lambda operands: attend(name, operands, setting), operands, setting, gradient
    )
