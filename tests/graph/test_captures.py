# SPDX-License-Identifier: Apache-2.0
"""Arrays that functions close over become inputs, and are never baked in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.graph.captures import lift_captures
from tessera.jax_compat import jaxprs
from tessera.mesh import Mesh

HELD = jnp.arange(9.0).reshape(3, 3)
X = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)


def times_held(x):
    return x @ HELD


def mapped(function):
    return jax.shard_map(
        function,
        mesh=Mesh(["z"], devices=range(2)).jax,
        in_specs=P("z"),
        out_specs=P("z"),
    )


NESTS = {
    "plain": times_held,
    "jit": jax.jit(times_held),
    "jit in jit": jax.jit(lambda x: jax.jit(times_held)(x) * 2.0),
    "remat": jax.checkpoint(times_held),
    "vmap of jit": jax.vmap(jax.jit(times_held)),
    "cond": lambda x: lax.cond(x.sum() > 0, times_held, lambda x: x, x),
    "while": lambda x: lax.while_loop(lambda c: c[0, 0] < 0, times_held, x),
    "scan": lambda x: lax.scan(lambda c, _: (times_held(c), None), x, None, length=2)[
        0
    ],
    "jit in shard_map": mapped(jax.jit(times_held)),
}


@pytest.mark.parametrize("nest", NESTS)
def test_an_array_is_one_input_wherever_it_is_used(nest):
    def function(x):
        return NESTS[nest](x) + times_held(x)

    program, arrays = lift_captures(jax.make_jaxpr(function)(X))
    assert [array is HELD for array in arrays] == [True]
    assert not jaxprs.constants(program)
    assert all(
        not jaxprs.constants(inner)
        for equation in jaxprs.equations(program)
        for _, inner in jaxprs.nested(equation)
    )
    result = jax.jit(lambda *v: jaxprs.evaluate(program, *v))(X, HELD)
    np.testing.assert_allclose(result[0], jax.jit(function)(X), rtol=1e-6)


def test_numpy_arrays_are_inputs_too():
    held = np.arange(9.0, dtype=np.float32).reshape(3, 3)
    _, arrays = lift_captures(jax.make_jaxpr(lambda x: x @ held)(X))
    np.testing.assert_array_equal(arrays[0], held)


def test_a_program_that_holds_nothing_stays_as_it_is():
    program = jax.make_jaxpr(jax.jit(jnp.sin))(X)
    assert lift_captures(program) == (program, [])


def test_a_jit_keeps_its_name_and_its_shardings(dp_mesh):
    sharding = jax.sharding.NamedSharding(dp_mesh.jax, P())
    inner = jax.jit(times_held, in_shardings=sharding, out_shardings=sharding)
    program, _ = lift_captures(jax.make_jaxpr(inner)(X))
    params = jaxprs.equations(program)[0].params
    assert params["name"] == "times_held"
    assert params["in_shardings"][0] == params["out_shardings"][0] == sharding


def test_no_captured_array_is_a_constant_of_the_compiled_module():
    large = jnp.arange(4096.0)
    step = ts.function(lambda x: jax.jit(lambda x: x * large)(x))
    compiled = step.compile(large)
    assert "4096]{0} constant" not in compiled.as_text()
    assert compiled.captured[0] is large


def test_a_gradient_by_an_array_that_a_nested_jit_closes_over():
    inner = jax.jit(times_held)

    @ts.function
    def slope(x):
        return ts.grad(jnp.sum(inner(x) ** 2), HELD)

    expected = jax.grad(lambda held: jnp.sum((X @ held) ** 2))(HELD)
    np.testing.assert_allclose(slope(X), expected, rtol=1e-6)


class Model:
    def __init__(self, weight):
        self.layers = [{"kernel": weight}]

    def __call__(self, x):
        return x * self.layers[0]["kernel"]


def with_default(weight):
    def function(x, weights={"w": weight}):  # noqa: B006
        return x * weights["w"]

    return function


def with_rule(weight):
    @jax.custom_vjp
    def total(x):
        return x.sum()

    total.defvjp(lambda x: (x.sum(), x), lambda x, slope: (x * slope * weight,))
    return ts.value_and_grad(lambda x: total(x))


HOLDERS = {
    "closure": lambda held: lambda x: x * held,
    "asarray": lambda held: lambda x: x * jnp.asarray(held),
    "default": with_default,
    "object": Model,
    "method": lambda held: Model(held).__call__,
    "partial": lambda held: functools.partial(lambda w, x: x * w, held),
    "keyword": lambda held: functools.partial(lambda x, w: x * w[0], w=[held]),
    "jit": lambda held: jax.jit(lambda x: x * held),
    "scan": lambda held: (
        lambda x: lax.scan(lambda c, _: (c * held, None), x, None, length=2)[0]
    ),
    "derivative rule": with_rule,
}


@pytest.mark.parametrize("mesh", [None, Mesh(["dp"], devices=range(2))], ids=str)
@pytest.mark.parametrize("holder", HOLDERS)
def test_numpy_arrays_keep_the_values_of_the_trace_as_in_jax_jit(holder, mesh):
    results = []
    for compiled in (jax.jit, functools.partial(ts.function, mesh=mesh)):
        held = np.ones(3, np.float32)
        function = compiled(HOLDERS[holder](held))
        before = jax.tree.map(np.array, function(jnp.ones(3)))
        held[:] = 5.0
        after = function(jnp.ones(3))
        results.append((before, after, function(jnp.ones((2, 3)))))
        np.testing.assert_array_equal(jax.tree.leaves(after)[-1], 1.0)
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("mesh", [None, "cpu"])
def test_a_captured_array_is_on_the_device_before_a_call(mesh):
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    mesh = mesh and Mesh(["z"], devices=range(2))
    add = ts.function(lambda x: x + table, mesh=mesh)
    x = add(X)
    with jax.transfer_guard_host_to_device("disallow"):
        found = add(x)
    np.testing.assert_array_equal(found, x + table)
