# SPDX-License-Identifier: Apache-2.0
"""The fused loss on an NVIDIA GPU, beside the loss of logits that exist."""

import jax
import numpy as np
import pytest

from tessera.ops.fused_losses import fused_linear_cross_entropy
from tests.on_gpu import only_on_gpu
from tests.ops.test_fused_losses import drawn, whole, with_gradients

pytestmark = only_on_gpu


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)]
)
def test_loss_and_gradients_are_those_of_all_logits(dtype, tolerance, soft_cap):
    operands, labels = drawn(0, 2, 384, dtype=dtype, words=1000, width=64)
    with jax.default_matmul_precision("highest"):
        found, expected = (
            with_gradients(loss, operands, labels, soft_cap=soft_cap)
            for loss in (fused_linear_cross_entropy, whole)
        )
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        largest = np.abs(np.asarray(other, "f8")).max()
        np.testing.assert_allclose(
            np.asarray(one, "f8"), np.asarray(other, "f8"), atol=tolerance * largest
        )
