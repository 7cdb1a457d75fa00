# SPDX-License-Identifier: Apache-2.0
"""JAX's attention kernels for TPUs, interpreted on a CPU, against attention in f64."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import op
from tessera.jax_compat import jaxprs
from tessera.ops.attention import dispatch, splash
from tessera.ops.attention.dispatch import Device, Operands, Options, fastest
from tests.ops.attention import reference
from tests.ops.attention.exact import check_as_exact_as_the_reference, drawn

TPU = Device("tpu", "TPU v5")
CAUSAL = Options(causal=True, scale=0.125)

interpreted = partial(splash.attend_with, max_block=128, interpret=True)


@pytest.fixture
def on_tpu(monkeypatch):
    """Dispatch as on a TPU, whose kernels are interpreted."""
    monkeypatch.setattr(Device, "here", classmethod(lambda cls: TPU))
    monkeypatch.setattr(splash, "attend", interpreted)
    dispatch._program.cache_clear()
    yield
    dispatch._program.cache_clear()


def segments(batch, length):
    """Runs of tokens, whose ends are not those of blocks."""
    starts = np.random.default_rng(1).random((batch, length)) < 4 / length
    return jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


# Sizes of the operands, options, and whether rows are packed.
CASES = {
    "causal": ({"width": 64}, {}, False),
    "blocks": ({"queries": 300, "keys": 300, "heads": 4, "groups": 2}, {}, False),
    "window": ({"queries": 384, "keys": 384}, {"window": 100}, False),
    "cap": ({"width": 128}, {"soft_cap": 0.7}, False),
    "segments": ({"queries": 200, "keys": 200, "batch": 2}, {}, True),
    "both ways": ({"queries": 130, "keys": 200}, {"causal": False}, False),
    "both ways in segments": ({"batch": 2}, {"causal": False}, True),
    "wide": ({"width": 256, "groups": 2}, {"window": 9}, False),
    "bf16": ({"width": 80, "dtype": "bfloat16"}, {"soft_cap": 2.0}, False),
    "everything": (
        {"batch": 2, "queries": 200, "keys": 200, "heads": 4, "groups": 2, "width": 80},
        {"window": 100, "soft_cap": 2.0},
        True,
    ),
}
FAST = ("everything", "both ways")


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(
    ("sizes", "options", "is_packed"),
    [
        pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.full)
        for name, case in CASES.items()
    ],
)
def test_results_and_gradients_are_those_of_attention(sizes, options, is_packed):
    operands, gradient = drawn(**sizes)
    options = Options(**({"causal": True, "scale": 0.3} | options))
    if is_packed:
        ids = segments(operands.q.shape[0], operands.q.shape[2])
        operands = operands._replace(segments=ids)
    # More than others are allowed: the scale rounds each query once.
    check_as_exact_as_the_reference(
        lambda x: interpreted(x, options), operands, options, gradient, factor=3
    )


def struct(dtype="bfloat16", width=64, queries=32, keys=32, **others):
    def made(length):
        return jax.ShapeDtypeStruct((2, 4, length, width), jnp.dtype(dtype))

    return Operands(made(queries), made(keys), made(keys), **others)


def ids(length=32):
    return jax.ShapeDtypeStruct((2, length), jnp.int32)


PACKED = {"segments": ids()}


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({"dtype": "float16"}, CAUSAL, "bfloat16 and float32, and got float16"),
        ({"width": 520}, CAUSAL, "heads up to 512 in bfloat16, and got 520"),
        ({"width": 264, "dtype": "float32"}, CAUSAL, "up to 256 in float32"),
        ({"window": jax.ShapeDtypeStruct((), jnp.int32)}, CAUSAL, "before the call"),
    ],
)
def test_it_says_what_it_does_not_support(given, options, reason):
    found = dispatch.unsupported_reason("splash", struct(**given), options, TPU)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, CAUSAL),
        ({"keys": 33}, Options(False, 1.0)),
        ({"width": 512}, Options(True, 1.0, window=3, soft_cap=2.0)),
        (PACKED, Options(True, 1.0, window=3)),
    ],
)
def test_it_is_the_fastest_on_one_tpu(given, options, monkeypatch):
    monkeypatch.setattr(dispatch.scope, "num_devices", lambda: 1)
    assert fastest(struct(**given), options, TPU) == "splash"


def test_it_is_not_used_where_xla_would_have_to_split_it():
    assert jax.device_count() > 1
    assert fastest(struct(), CAUSAL, TPU) == "xla"


@pytest.mark.slow(reason="it compiles several programs")
def test_a_function_has_the_kernel_under_its_name(on_tpu, monkeypatch):
    monkeypatch.setattr(dispatch.scope, "num_devices", lambda: 1)

    @ts.function
    def step(q, k, v):
        out = op.flash_attention(q, k, v, causal=True, window=20)
        return out, ts.grad(out.sum(), q)

    (q, k, v, *_), _ = drawn()
    text = step.trace(q, k, v).as_text()
    assert set(re.findall(r"flash_attention_(splash|xla)", text)) == {"splash"}
    for found, wanted in zip(
        step(q, k, v),
        step_of_reference(q, k, v),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def step_of_reference(q, k, v):
    def out(q):
        options = Options(True, q.shape[-1] ** -0.5, window=20)
        return reference.attend(Operands(q, k, v), options)

    return out(q), jax.grad(lambda q: out(q).sum())(q)


def kernels(program):
    """The kernels in a program, but for those that nothing reads."""
    found = []
    for equation in jaxprs.equations(program):
        if equation.primitive.name == "pallas_call":
            found += re.findall("fwd|dkv|dq", equation.params["name"])
        elif equation.outvars:
            inner = [kernels(program) for _, program in jaxprs.nested(equation)]
            found += itertools.chain(*inner)
    return sorted(found)


@pytest.mark.parametrize(("policy", "forward"), [("dots", 1), ("full", 2)])
def test_rematerialization_can_save_its_residuals(policy, forward):
    """``dots`` saves the output and the log-sum-exp: no second forward kernel."""
    arrays = drawn()[0][:3]

    @ts.remat(policy=policy)
    def layer(is_global, *arrays):
        def attend(window):
            return interpreted(Operands(*arrays), Options(True, 1.0, window=window))

        return jax.lax.cond(is_global, lambda: attend(None), lambda: attend(9))

    def loss(*arrays):
        return (layer(jnp.asarray(True), *arrays) ** 2).sum()

    found = kernels(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays))
    # Each kernel is there for both values of the flag.
    assert found == sorted(2 * ["dkv", "dq", *["fwd"] * forward])


@pytest.mark.full
def test_each_device_attends_to_its_own_rows_and_heads(on_tpu, grid_mesh):
    operands, _ = drawn(batch=2, heads=8, groups=4, width=8)
    packed = segments(2, 48)

    def step(q, k, v, ids):
        def loss(*arrays):
            out = op.flash_attention(*arrays, causal=True, segment_ids=ids)
            return (out**2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    spec, row = P("dp", "tp"), P("dp")
    mapped = partial(
        jax.shard_map,
        step,
        mesh=grid_mesh.jax,
        in_specs=(spec, spec, spec, row),
        out_specs=(spec,) * 3,
    )
    arrays = *operands[:3], packed
    unchecked = jax.make_jaxpr(mapped(check_vma=False))(*arrays)
    assert kernels(unchecked) == ["dkv", "dq", "fwd"]
    found = jax.jit(mapped(check_vma=False))(*arrays)
    # There the kernel would have to say that its results vary.
    checked = jax.jit(mapped(check_vma=True))
    assert kernels(jax.make_jaxpr(checked)(*arrays)) == []
    for one, other in zip(found, checked(*arrays), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
