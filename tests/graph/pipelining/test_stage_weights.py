# SPDX-License-Identifier: Apache-2.0
"""Parameters sent to the devices of their stages, and gradients sent back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.ledger import collectives
from tessera.graph.pipelining.stage_packing import Packing
from tessera.graph.pipelining.stage_weights import StageWeights, WeightForm
from tessera.mesh import Mesh

MESH = Mesh(["dp", "pp", "tp"], devices=range(8), shape=(2, 2, 2))

# A matrix in parts over pp within tp, a vector in parts, a scalar that has none.
MATRIX = WeightForm((4, 8), "float32", P(None, ("tp", "pp")))
# The other order: no block of a device is a block of another one's in the other layout.
OUTER = WeightForm((4, 8), "float32", P(None, ("pp", "tp")))
VECTOR = WeightForm((6,), "float32", P("pp"))
SCALAR = WeightForm((), "float32", P())


def arrays(stages: list[list[WeightForm]]) -> list[list[Any]]:
    """Other numbers in each, laid out as stored."""
    found, count = [], 0
    for forms in stages:
        found.append([])
        for form in forms:
            size = int(np.prod(form.shape))
            values = np.arange(count, count + size, dtype=np.float32)
            place = NamedSharding(MESH.jax, form.spec)
            found[-1].append(jax.device_put(values.reshape(form.shape), place))
            count += size
    return found


@pytest.mark.parametrize(
    "stages",
    [
        [[MATRIX, VECTOR], [MATRIX, VECTOR]],
        [[MATRIX, SCALAR], [VECTOR, MATRIX, MATRIX]],
        [[OUTER], [OUTER, VECTOR]],
        [[VECTOR], [MATRIX], [], [VECTOR, SCALAR]],  # two stages on a device
    ],
)
def test_each_device_gets_its_own_stages_weights_and_gives_their_gradients(stages):
    numbers = np.arange(len(stages)).reshape(-1, MESH.shape["pp"])
    weights = StageWeights(Packing.of(stages), MESH, "pp", numbers)
    given = arrays(stages)

    def there_and_back(given: Any) -> Any:
        slots, pull_back = jax.vjp(weights.gather, given)
        return slots, pull_back(jax.tree.map(lambda slot: 3.0 * slot, slots))[0]

    slots, back = jax.jit(there_and_back)(given)
    empty = [np.zeros(form.shape, np.float32) for form in weights.packing.slots]
    for stage, own in enumerate(given):
        held = [np.asarray(slot)[stage // 2, stage % 2] for slot in slots]
        want = weights.packing.pack(stage, list(map(np.asarray, own)), empty)
        for got, array in zip(held, want, strict=True):
            np.testing.assert_array_equal(got, array)
    for slot, form in zip(slots, weights.packing.slots, strict=True):
        assert slot.sharding.spec == P(None, "pp", *form.without("pp"))
    for got, array in zip(jax.tree.leaves(back), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(got, 3.0 * np.asarray(array))
        assert got.sharding == array.sharding


def test_one_all_to_all_carries_a_form_of_all_stages():
    stages = [[MATRIX, VECTOR], [MATRIX, VECTOR]]
    weights = StageWeights(Packing.of(stages), MESH, "pp", np.arange(2)[None])
    compiled = jax.jit(weights.gather).lower(arrays(stages)).compile()
    rows = collectives(compiled, MESH).rows
    assert [row.kind for row in rows] == ["all-to-all", "all-to-all"]
    assert {row.axes for row in rows} == {("pp",)}


def test_a_stage_has_a_weight_whole_over_the_axis():
    assert MATRIX.without("pp") == P(None, "tp")
    assert jnp.dtype(MATRIX.dtype) == jnp.float32
