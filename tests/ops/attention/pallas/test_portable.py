# SPDX-License-Identifier: Apache-2.0
"""The portable kernel, run by Pallas' interpreter, against attention in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.mesh import Mesh
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas.block_sizes import Blocks, Portable
from tessera.ops.attention.pallas.kernel_attention import (
    attend_with,
    unsupported_reason,
)
from tests.ops.attention.pallas.exact import (
    check_as_exact_as_the_reference,
    drawn,
    exact,
    with_gradients,
)

BLOCKS = Blocks(16, 32)


def attended(setting, blocks=BLOCKS):
    return lambda operands: attend_with(Portable(blocks), operands, setting)


CASES = {
    "head dim 80": ({}, {"width": 80}),
    "head dim 256": ({"causal": True}, {"width": 256}),
    "bf16": ({"causal": True}, {"dtype": "bfloat16", "width": 64}),
    "fewer keys than a block, more heads": (
        {"scale": 0.7, "soft_cap": 3.0},
        {"keys": 20, "heads": 4, "groups": 2},
    ),
    "packed": (
        {"causal": True, "window": 9, "soft_cap": 5.0},
        {"segments": 3, "batch": 2, "heads": 4, "groups": 2},
    ),
    "queries after the keys": (
        {"causal": True, "window": 20, "offset": 40},
        {"queries": 24, "keys": 70},
    ),
    "queries that see nothing": ({"causal": True, "offset": -20}, {}),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "packed" else pytest.param(name, marks=pytest.mark.full)
        for name in CASES
    ],
)
def test_it_is_as_exact_as_the_reference(name):
    setting, sizes = CASES[name]
    setting = Options(**{"causal": False, "scale": 0.25} | setting)
    operands, gradient = drawn(**sizes)
    check_as_exact_as_the_reference(attended(setting), operands, setting, gradient)


@pytest.mark.full
@settings(max_examples=3, phases=[Phase.generate])  # to shrink one takes minutes
@given(
    queries=st.integers(1, 48),
    keys=st.integers(1, 70),
    causal=st.booleans(),
    window=st.integers(1, 60),
    segments=st.integers(0, 3),
    offset=st.integers(-8, 40),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_any_shape_and_mask_is_as_exact_as_the_reference(
    queries, keys, causal, window, segments, offset, dtype
):
    setting = Options(causal, 0.3, window if causal else None)
    # Of few queries in 16 bits, rounding the gradients of scores is all of the error.
    factor = 3 if queries < 8 and dtype != "float32" else 2
    operands, gradient = drawn(
        queries=queries, keys=keys, segments=segments, dtype=dtype
    )
    operands = operands._replace(offset=jnp.int32(offset))
    check_as_exact_as_the_reference(
        attended(setting), operands, setting, gradient, factor=factor
    )


def test_blocks_that_the_mask_empties_are_not_read():
    # What is not a number and read once would be in every sum.
    setting = Options(causal=True, scale=0.25, window=8)
    operands, gradient = drawn(queries=64, keys=64)
    seen = exact(operands, setting, gradient)
    spoilt = (
        operands.k.at[:, :, 48:].set(jnp.nan),
        operands.v.at[:, :, 48:].set(jnp.nan),
    )
    operands = operands._replace(k=spoilt[0], v=spoilt[1])
    out, of_q, *_ = with_gradients(
        attended(setting, Blocks(16, 16)), operands, gradient
    )
    np.testing.assert_allclose(out[:, :, :48], seen[0][:, :, :48], atol=1e-5)
    np.testing.assert_allclose(of_q[:, :, :48], seen[1][:, :, :48], atol=1e-5)


@pytest.mark.full
def test_segments_that_do_not_meet_are_not_read():
    setting = Options(causal=True, scale=0.25)
    operands, gradient = drawn(queries=64, keys=64)
    ids = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 32)[None]
    operands = operands._replace(query_segments=ids, key_segments=ids)
    seen = exact(operands, setting, gradient)
    operands = operands._replace(
        k=operands.k.at[:, :, :32].set(jnp.nan), v=operands.v.at[:, :, :32].set(jnp.nan)
    )
    results = with_gradients(attended(setting, Blocks(32, 16)), operands, gradient)
    for ours, wanted in zip(results, seen, strict=True):
        np.testing.assert_allclose(ours[:, :, 32:], wanted[:, :, 32:], atol=1e-5)


@pytest.mark.full
def test_it_goes_with_vmap_and_recomputation():
    setting = Options(causal=True, scale=0.25)
    operands, gradient = drawn(batch=3)

    def one(q, k, v, gradient):
        run = jax.checkpoint(attended(setting))
        rows = (x[None] for x in (q, k, v))
        out, back = jax.vjp(lambda *x: run(Operands(*x)), *rows)
        return out[0], *(x[0] for x in back(gradient[None]))

    results = jax.jit(jax.vmap(one))(*operands[:3], gradient)
    for ours, wanted in zip(results, exact(operands, setting, gradient), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-5)


@pytest.mark.full
def test_operands_may_be_split_over_a_mesh(grid_mesh: Mesh):
    setting = Options(causal=True, scale=0.25)
    operands, gradient = drawn(batch=2, heads=8, groups=4)
    split = NamedSharding(grid_mesh.jax, P("dp", "tp"))
    arrays = jax.device_put(operands[:3], split)
    out = jax.jit(lambda *x: attended(setting)(Operands(*x)))(*arrays)
    np.testing.assert_allclose(out, exact(operands, setting, gradient)[0], atol=1e-5)


def test_a_region_that_checks_what_varies_is_refused(dp_mesh: Mesh):
    setting = Options(causal=True, scale=0.25)
    operands, gradient = drawn(batch=8)
    reasons = []

    def block(check, q, k, v):
        reasons.append(unsupported_reason(Operands(q, k, v), setting, Device("cpu")))
        return q if check else attend_with(Portable(BLOCKS), Operands(q, k, v), setting)

    def run(check):
        def body(q, k, v):
            return block(check, q, k, v)

        spec = P("dp")
        region = jax.shard_map(
            body, mesh=dp_mesh.jax, in_specs=spec, out_specs=spec, check_vma=check
        )
        return jax.jit(region)(*operands[:3])

    run(check=True)
    out = run(check=False)
    assert reasons == [
        "Pallas' interpreter, which runs the portable kernel, does not say what "
        "varies between devices, and this region checks it (check_vma=True)",
        None,
    ]
    np.testing.assert_allclose(out, exact(operands, setting, gradient)[0], atol=1e-5)
