# SPDX-License-Identifier: Apache-2.0
"""Two processes that call one function, with the same values or with their own."""

import pytest

from tests.two_processes import found_by_two

PROGRAM = """
import jax.numpy as jnp
import tessera as ts
from jax.sharding import NamedSharding, PartitionSpec as P
from tessera import dist

mesh = dist.Mesh(axes=["dp"], devices=range(4))
ROWS = np.arange(8, dtype=np.float32) ** 2


def loss(w, batch):
    return jnp.mean(batch["x"] * w)


def call(w, x, captured=0.0, **options):
    step = ts.function(
        lambda w, batch: loss(w, batch) + jnp.sum(captured),
        mesh=mesh, in_specs={"batch": P("dp")}, **options,
    )
    try:
        return float(step(w, {"x": x}))
    except ts.TesseraError as error:
        return f"{error.code} {error.got.partition(':')[0]}"


own = np.split(ROWS, 2)[rank]
placed = jax.make_array_from_process_local_data(NamedSharding(mesh.jax, P("dp")), own)
one = np.float32(1)
found = {
    "whole": call(one, ROWS),
    "parts": call(one, own),
    "parts on a device": call(one, jnp.asarray(own)),
    "shapes": call(one, ROWS[: 8 - 4 * rank]),
    "global": call(one, placed),
    "weights": call(np.float32(1 + rank), placed),
    "number": call(1.0 + rank, placed),
    "closed over": call(one, placed, np.full(3, rank, np.float32)),
}
print("FOUND", json.dumps(found))
"""


@pytest.mark.full
def test_values_of_one_process_are_refused_where_the_whole_is_expected():
    expected = {
        "whole": 17.5,
        "parts": "T707 batch/x",
        "parts on a device": "T707 batch/x",
        "shapes": "T707 batch/x",
        "global": 17.5,
        "weights": "T707 w",
        "number": "T707 w",
        "closed over": "T707 closed-over array 0",
    }
    assert found_by_two(PROGRAM) == [expected, expected]
