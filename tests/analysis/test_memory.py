# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis.memory import Memory, format_bytes, memory
from tessera.mesh import Mesh


def test_arguments_and_outputs_are_counted_per_device():
    mesh = Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])
    place = NamedSharding(mesh.jax, PartitionSpec("dp", "tp"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=place)
    found = memory(jax.jit(lambda x: x * 2.0).lower(x).compile())
    assert (found.arguments, found.outputs, found.aliased) == (1024, 1024, 0)


def test_a_donated_argument_is_counted_once_in_the_peak():
    x = jax.ShapeDtypeStruct((256,), jnp.float32)
    step = jax.jit(lambda x: x * 2.0, donate_argnums=0)
    found = memory(step.lower(x).compile())
    assert found.aliased == 1024
    assert found.peak == 1024 + found.temporaries + found.code


def test_temporaries_are_what_is_neither_read_nor_returned():
    def chain(x):
        stacked = jax.lax.scan(lambda c, _: (jnp.sin(c @ x), c), x, None, length=8)[1]
        return jnp.sort(stacked, axis=0)[4]

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = memory(jax.jit(chain).lower(x).compile())
    assert found.temporaries >= 8 * 64 * 64 * 4
    assert (found.arguments, found.outputs) == (64 * 64 * 4, 64 * 64 * 4)


def test_the_peak_is_the_sum_with_donated_buffers_once():
    parts = Memory(arguments=100, outputs=70, temporaries=30, aliased=60, code=5)
    assert parts.peak == 145


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (20 << 20, "20.0 MiB"),
        (141 << 30, "141 GiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_bytes_have_the_largest_unit_that_fits(count, text):
    assert format_bytes(count) == text
