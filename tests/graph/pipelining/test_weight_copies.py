# SPDX-License-Identifier: Apache-2.0
"""Stages that compute with narrow copies of their weights: gradients are f32 sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tessera.graph.pipelining import schedule
from tessera.graph.pipelining.device_stages import Stages
from tessera.graph.pipelining.schedule_loop import Pipeline
from tessera.mesh import Mesh
from tessera.ops.wide_gradients import read_copies
from tests.graph.pipelines import cases

MICROBATCHES, ROWS, WIDTH = 6, 4, 8
# Each is a bf16 number; the sum of a few of them is not.
INPUTS = (
    np.random.default_rng(0)
    .integers(64, 128, (MICROBATCHES, ROWS, WIDTH))
    .astype(np.float32)
    * 2
    + 1
)


def scaled(weights: Any, _: Any, wire: Any, micro: Any, index: Any) -> Any:
    """A stage that adds ``weights * x``, and a bias, to the loss, and passes x on."""
    x = jnp.where(index == 0, micro, wire)
    narrow = read_copies(weights)
    assert (narrow["scale"].dtype, narrow["bias"].dtype) == (jnp.bfloat16, jnp.float32)

    def added(total: Any, row: Any) -> tuple[Any, None]:
        # The gradient of a loop's constant is added up in the dtype of the constant.
        scale = read_copies(weights)["scale"].astype(jnp.float32)
        return total + jnp.sum(scale * row), None

    total, _ = jax.lax.scan(added, jnp.float32(0.0), x)
    return x, total + x.sum() * narrow["bias"].sum(), ((), ())


@pytest.mark.parametrize(
    "name",
    cases(["gpipe", "1f1b", "interleaved", "zero_bubble"], "1f1b", "zero_bubble"),
)
def test_gradients_of_integers_are_exact(name):
    mesh = Mesh(["pp", "fsdp"], devices=range(4), shape=(2, 2))
    chunks = 2 if name == "interleaved" else None
    table = schedule(name, 2, MICROBATCHES, chunks)
    layout = P(None, "pp", "fsdp")
    pipeline = Pipeline(
        table,
        Stages(
            [scaled],
            jax.ShapeDtypeStruct((ROWS // 2, WIDTH), jnp.float32),
            has_copies=True,
        ),
        mesh,
        "pp",
        ("fsdp",),
        ({"scale": layout, "bias": P(None, "pp")}, ()),
    )
    weights = {
        "scale": jnp.ones((table.chunks, 2, WIDTH), jnp.bfloat16),
        "bias": jnp.ones((table.chunks, 2, 1)),
    }

    def run(weights: Any) -> Any:
        return pipeline.gradients(weights, (), INPUTS, jnp.float32(1.0)).weights

    gradients = jax.jit(run)(weights)
    want = INPUTS.sum((0, 1))
    assert (want != np.asarray(want, jnp.bfloat16)).all()
    for part in np.asarray(gradients["scale"]).reshape(-1, WIDTH):
        np.testing.assert_array_equal(part, want)
    np.testing.assert_array_equal(
        gradients["bias"], np.full_like(weights["bias"], INPUTS.sum())
    )
    assert gradients["scale"].dtype == jnp.float32
    assert gradients["scale"].sharding.shard_shape((1, 2, WIDTH)) == (1, 1, WIDTH // 2)
