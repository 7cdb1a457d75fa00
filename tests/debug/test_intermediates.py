# SPDX-License-Identifier: Apache-2.0
"""The values inside a program: which there are, in what order, and what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tessera.debug.intermediates import intermediates
from tessera.jax_compat import jaxprs

X = jnp.arange(6.0).reshape(2, 3) / 6


def traced(function, *args):
    return jax.make_jaxpr(function)(*args)


def listed_in(program, platform="cpu"):
    inputs = [f"in{i}" for i in range(len(jaxprs.inputs(program)))]
    outputs = [f"out{i}" for i in range(len(jaxprs.outputs(program)))]
    return intermediates(program, inputs, outputs, platform)[0]


def values(program, *args):
    """The values of a program by operation, as its program of outputs gives them."""
    names = [f"in{i}" for i in range(len(jaxprs.inputs(program)))]
    results = [f"out{i}" for i in range(len(jaxprs.outputs(program)))]
    listed, collecting = intermediates(program, names, results, "cpu")
    got = jaxprs.evaluate(collecting, *args)
    return {site.operation: each for site, each in zip(listed, got, strict=True)}


def operations(program):
    return [site.operation for site in listed_in(program)]


def test_inputs_come_first_then_operations_in_order_then_outputs():
    program = traced(lambda x: jnp.sum(jnp.sin(x) * 2), X)
    listed = listed_in(program)
    assert [site.operation for site in listed] == [
        *("input", "sin", "mul", "reduce_sum", "output")
    ]
    assert (listed[0].path, listed[-1].path) == ("in0", "out0")
    assert [site.shape for site in listed] == [(2, 3)] * 3 + [()] * 2


def test_the_values_are_those_that_the_program_computes():
    got = values(traced(lambda x: jnp.sum(jnp.sin(x) * 2), X), X)
    expected = X, jnp.sin(X), jnp.sin(X) * 2, jnp.sum(jnp.sin(X) * 2)
    for one, other in zip(got.values(), [*expected, expected[-1]], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_operations_that_only_move_data_are_left_out():
    program = traced(lambda x: jnp.exp(jnp.reshape(x.T, (6,))[None]), X)
    assert operations(program) == ["input", "exp", "output"]


def test_values_that_nothing_reads_are_left_out():
    def two(x):
        jnp.cos(x)
        return jnp.sin(x)

    assert operations(traced(two, X)) == ["input", "sin", "output"]


def test_calls_are_entered_and_scopes_are_a_path():
    @jax.jit
    def inner(x):
        with jax.named_scope("b"):
            return jnp.sin(x)

    def outer(x):
        with jax.named_scope("a"):
            return jax.checkpoint(inner)(x)

    (site,) = [s for s in listed_in(traced(outer, X)) if s.operation == "sin"]
    assert site.path.split("/")[0] == "a"
    assert site.path.split("/")[-1] == "b"
    assert f"{__file__}:" in site.source


def test_functions_with_rules_of_their_own_are_entered():
    @jax.custom_vjp
    def doubled(x):
        return jnp.sin(x) * 2

    doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (g * x,))
    program = traced(lambda x: jax.nn.relu(doubled(x)), X)
    assert operations(program) == ["input", "sin", "mul", "max", "output"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_gives_the_values_of_every_iteration(reverse):
    def looped(x):
        def body(carry, item):
            carry = jnp.tanh(carry) + item
            return carry, jnp.exp(carry)

        return jax.lax.scan(body, x, jnp.arange(4.0), reverse=reverse)

    program = traced(looped, X)
    (site,) = [site for site in listed_in(program) if site.operation == "tanh"]
    (loop,) = site.loops
    assert (loop.length, loop.is_reversed) == (4, reverse)
    assert site.full_shape == (4, 2, 3)
    got = values(program, X)["tanh"]
    carry, expected = X, {}
    for i in reversed(range(4)) if reverse else range(4):
        expected[i] = jnp.tanh(carry)
        carry = expected[i] + i
    np.testing.assert_allclose(got, [expected[i] for i in range(4)], rtol=1e-6)


def test_values_are_ordered_by_iteration_before_operation():
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.cos(jnp.sin(c)), None), x, length=2)[0]

    listed = listed_in(traced(looped, X))
    sin, cos = (s for s in listed if s.operation in ("sin", "cos"))
    assert sin.when([0]) < cos.when([0]) < sin.when([1]) < cos.when([1])
    assert cos.when([1]) < listed[-1].when()


def test_prints_are_left_out(capsys):
    def printing(x):
        jax.debug.print("x = {}", x)
        return jnp.sin(x)

    values(traced(printing, X), X)
    assert capsys.readouterr().out == ""


# --- precision


def epsilons(program, platform="cpu"):
    return {site.operation: site.epsilon for site in listed_in(program, platform)}


def test_inputs_are_exact_and_results_have_the_precision_of_their_dtype():
    by_operation = epsilons(traced(jnp.sin, X))
    assert by_operation == {"input": 0.0, "sin": 2.0**-23, "output": 2.0**-23}


def test_values_computed_from_a_coarse_dtype_stay_coarse():
    def narrow(x):
        return jnp.cos(jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32))

    assert epsilons(traced(narrow, X))["cos"] == 2.0**-7


def test_rounding_to_fewer_bits_counts_as_its_dtype():
    def rounded(x):
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) * 2

    assert epsilons(traced(rounded, X))["mul"] == 2.0**-7


def test_matmuls_of_accelerators_are_coarser_than_their_dtype():
    program = traced(lambda x: x @ x.T, X)
    by_platform = {
        p: epsilons(program, p)["dot_general"] for p in ("cpu", "gpu", "tpu")
    }
    assert by_platform == {"cpu": 2.0**-23, "gpu": 2.0**-10, "tpu": 2.0**-7}


# --- SPMD regions


def per_device(mesh):
    def body(x):
        y = jnp.sin(x)
        return jax.lax.psum(jnp.sum(y), "dp")

    return jax.shard_map(body, mesh=mesh.jax, in_specs=P("dp"), out_specs=P())


def test_an_spmd_region_is_one_operation_that_names_what_computed_it(dp_mesh):
    program = traced(lambda x: per_device(dp_mesh)(x) + 1, jnp.arange(8.0))
    listed = listed_in(program)
    assert [site.operation for site in listed] == [
        *("input", "shard_map", "add", "output")
    ]
    assert listed[1].inside.startswith("psum")
    assert f"at {__file__}:" in listed[1].inside
