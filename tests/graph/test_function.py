# SPDX-License-Identifier: Apache-2.0
"""ts.function: calls, the programs they share, and where else it may be called."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import AbstractMeshError, ArgumentError, MeshConflictError
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)
W = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)


def on(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh.jax, P(*spec)))


@pytest.fixture
def scaled():
    """A function of an array and of anything."""
    return ts.function(lambda x, factor: x * factor)


# --- calling


def test_a_call_gives_what_the_body_gives():
    def body(x, power, *, offset=1.0, **rest):
        return {"y": x**power + offset + rest["more"], "note": "ok", "none": None}

    found = ts.function(body)(X, 2, more=X)
    np.testing.assert_allclose(found["y"], X**2 + 1.0 + X, rtol=1e-6)
    assert (found["note"], found["none"]) == ("ok", None)


def test_the_function_looks_like_its_body():
    def body(x):
        """Says what it does."""
        return x

    step = ts.function(body)
    assert (step.__name__, step.__doc__) == ("body", "Says what it does.")
    assert step.body is body


def test_options_make_it_a_decorator(dp_mesh):
    @ts.function(mesh=dp_mesh, in_specs={"x": P("dp")}, out_specs=P("dp"))
    def step(x):
        return x * 2.0

    assert step(X).sharding.spec == P("dp")


def test_jit_is_the_same_and_takes_a_function_that_is_one_already(dp_mesh):
    assert ts.jit is ts.function
    inner = ts.function(lambda x: x * 2.0)
    step = ts.jit(inner, mesh=dp_mesh)
    assert step.body is inner.body
    np.testing.assert_array_equal(step(X), X * 2)


def test_defaults_are_the_bodys_own():
    step = ts.function(lambda x, scale=3, bias=X: x * scale + bias)
    np.testing.assert_array_equal(step(X), X * 3 + X)
    np.testing.assert_array_equal(step(X, 2), X * 2 + X)


def test_a_wrong_call_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing a required argument: 'factor'"):
        ts.function(lambda x, factor: x)(X)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3.0, dtype=np.float32),
        np.float32(2.5),
        jnp.arange(3.0),
        tensor((3,), init="ones", name="t"),
        jax.random.key(7),
    ],
    ids=["numpy", "numpy scalar", "jax", "lazy tensor", "PRNG key"],
)
def test_every_kind_of_array_is_taken(array):
    step = ts.function(lambda x: x)
    for _ in range(2):
        found = step(array)
        assert isinstance(found, jax.Array)
        assert bool(jnp.all(found == jnp.asarray(array)))
    assert step.num_programs() == 1


def test_a_function_in_a_class_is_a_method():
    class Model:
        scale = 3.0

        @ts.function
        def apply(self, x):
            return x * self.scale

    np.testing.assert_array_equal(Model().apply(X), X * 3)
    assert Model.apply.num_programs() == 1


def test_callables_of_every_kind_can_be_compiled():
    np.testing.assert_array_equal(ts.function(jnp.add)(X, X), X + X)
    half = functools.partial(jnp.multiply, jnp.float32(0.5))
    np.testing.assert_array_equal(ts.function(half)(X), X * 0.5)


# --- which calls share a program


def test_calls_of_the_same_types_share_a_program(scaled):
    for i in range(4):
        np.testing.assert_array_equal(scaled(X + i, 2), (X + i) * 2)
    assert scaled.num_programs() == 1


def test_another_shape_dtype_or_static_is_another_program(scaled):
    for args in [(X, 2), (X, 3), (X, 2.0), (X[:4], 2), (X.astype(jnp.bfloat16), 2)]:
        assert scaled(*args).dtype == args[0].dtype
    assert scaled.num_programs() == 5


def test_going_back_to_an_earlier_call_compiles_nothing(scaled):
    for _ in range(3):
        scaled(X, 2)
        scaled(X[:4], 2)
        scaled(X, 3)
    assert scaled.num_programs() == 3


def test_another_layout_is_another_program(dp_mesh, grid_mesh, scaled):
    for _ in range(2):
        assert scaled(on(dp_mesh, "dp"), 2).sharding.spec == P("dp")
        scaled(on(dp_mesh), 2)
        scaled(on(grid_mesh, "tp"), 2)
        scaled(X, 2)
    assert scaled.num_programs() == 4


def test_another_device_is_another_program(scaled):
    for device in (jax.devices()[3], jax.devices()[5], jax.devices()[3]):
        assert scaled(jax.device_put(X, device), 2).devices() == {device}
    assert scaled.num_programs() == 2


def test_an_open_mesh_is_another_program(dp_mesh, grid_mesh, scaled):
    for _ in range(2):
        scaled(X, 2)
        with dp_mesh:
            assert scaled(X, 2).sharding.mesh == dp_mesh.jax
        with grid_mesh:
            assert scaled(X, 2).sharding.mesh == grid_mesh.jax
    assert scaled.num_programs() == 3


def test_a_setting_of_jax_is_another_program():
    product = ts.function(lambda x: jnp.outer(x, x) @ x)
    product(X)
    with jax.default_matmul_precision("highest"):
        product(X)
        assert "highest" in product.last.traced.lower().as_text().lower()
    product(X)
    assert product.num_programs() == 2


def test_keywords_in_another_order_are_the_same_call():
    step = ts.function(lambda x, y: x - y)
    np.testing.assert_array_equal(step(x=X, y=X + 1), step(y=X + 1, x=X))
    assert step.num_programs() == 1


def test_what_comes_out_does_not_depend_on_what_was_called_before():
    half = X.astype(jnp.bfloat16)
    factors = [jnp.float32(2), jnp.asarray(2.0), 2.0, np.float32(2)]
    with jax.numpy_dtype_promotion("standard"):
        expected = [jax.jit(jnp.multiply)(half, f).dtype for f in factors]
        for order in ([0, 1, 2, 3], [2, 1, 0, 3], [3, 2, 1, 0]):
            step = ts.function(lambda x, factor: x * factor)
            found = {i: step(half, factors[i]).dtype for i in order}
            assert [found[i] for i in range(4)] == expected


def test_a_program_that_was_compiled_ahead_serves_the_call(scaled):
    compiled = scaled.compile(jax.ShapeDtypeStruct((8,), jnp.float32), 2)
    scaled(X, 2)
    assert scaled.last is compiled
    assert scaled.num_programs() == 1


def test_two_functions_of_one_body_have_programs_of_their_own():
    def body(x):
        return x

    first, second = ts.function(body), ts.function(body)
    first(X)
    assert (first.num_programs(), second.num_programs()) == (1, 0)


def test_the_arrays_of_a_call_are_not_kept_alive(scaled):
    x = X + 1.0
    scaled(x, 2)
    buffer_holders = [
        leaf.value
        for program in scaled._programs.values()
        for leaf in program.call.leaves
    ]
    assert not any(isinstance(value, jax.Array) for value in buffer_holders)


# --- captured tensors


def test_a_captured_tensor_is_created_in_its_layout(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, init="ones", name="table")
    step = ts.function(lambda x: x * table)
    np.testing.assert_array_equal(step(X), X)
    assert step.last.jax.input_shardings[0][1][0].spec == P("dp")
    np.testing.assert_array_equal(step(X + 1), X + 1)
    assert step.num_programs() == 1


def test_a_tensor_without_a_mesh_is_replicated_on_the_steps(dp_mesh):
    table = tensor((8,), init="ones", name="table")
    step = ts.function(lambda x: x * table, mesh=dp_mesh)
    np.testing.assert_array_equal(step(X), X)
    assert [v.spec for v in step.last.traced.graph.inputs] == [P(), P()]


# --- with other libraries


def test_flax_and_optax_work_inside():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    definition, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    descent = optax.sgd(0.1, momentum=0.9)

    def loss_of(state, x):
        return jnp.mean(nnx.merge(definition, state)(x) ** 2)

    @ts.function(donate=["state", "moments"])
    def step(state, moments, x):
        loss = loss_of(state, x)
        updates, moments = descent.update(ts.grad(loss, state), moments, state)
        return optax.apply_updates(state, updates), moments, loss

    @jax.jit
    def plain(state, moments, x):
        loss, slope = jax.value_and_grad(loss_of)(state, x)
        updates, moments = descent.update(slope, moments, state)
        return optax.apply_updates(state, updates), moments, loss

    x = X.reshape(4, 2)
    ours = theirs = (state, descent.init(state), None)
    ours = jax.tree.map(jnp.copy, ours)
    for _ in range(3):
        ours, theirs = step(*ours[:2], x), plain(*theirs[:2], x)
        np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-6)
    assert step.num_programs() == 1


# --- mistakes and threads


def test_meshes_that_do_not_agree_are_refused_at_the_call(dp_mesh):
    grid_mesh = ts.Mesh(["dp", "tp"], devices=range(7, -1, -1), shape=(2, 4))
    step = ts.function(lambda x, y: x + y)
    with pytest.raises(MeshConflictError, match="T308"):
        step(on(dp_mesh, "dp"), on(grid_mesh, "tp"))


def test_a_mesh_of_other_machines_cannot_run(large_mesh):
    step = ts.function(lambda x: x, mesh=large_mesh)
    assert step.trace(X).graph.mesh == large_mesh
    with pytest.raises(AbstractMeshError, match="T105"):
        step(X)


def test_a_function_that_failed_works_when_it_is_mended():
    broken = [True]

    @ts.function
    def step(x):
        if broken[0]:
            raise RuntimeError("mine")
        return x * 2.0

    with pytest.raises(RuntimeError, match="mine"):
        step(X)
    assert scope.current() is None
    broken[0] = False
    np.testing.assert_array_equal(step(X), X * 2)


def test_an_error_at_run_time_is_not_taken_for_a_change_of_arguments():
    calls = []

    @ts.function
    def step(x):
        calls.append(0)
        return x * 2.0

    step(X)
    deleted = X + 1.0
    deleted.delete()
    with pytest.raises(ArgumentError, match="'x' is deleted"):
        step(deleted)
    assert len(calls) == 1


def test_two_threads_do_not_mix_their_functions():
    barrier = threading.Barrier(2, timeout=240)
    found = {}

    def run(power):
        table = tensor((8,), init="ones", name=f"table_{power}")

        @ts.function
        def step(x):
            barrier.wait()  # both are being traced now
            loss = jnp.sum(x**power * table)
            barrier.wait()
            return ts.grad(loss, x)

        step.trace(X)
        found[power] = step.trace(X)

    threads = [threading.Thread(target=run, args=(power,)) for power in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for power in (2, 3):
        assert list(found[power].origin.parameters) == [f"table_{power}"]


def test_a_program_that_threads_compile_at_once_counts_as_one():
    def scaled(x, n):
        if n:
            together.wait(timeout=60)
        return x * n

    together = threading.Barrier(5)
    step = ts.function(scaled)
    step(X, 0)
    threads = [threading.Thread(target=step, args=(X, 1)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # a warning in a thread fails the test
    assert step.num_programs() == 2


def test_one_function_called_by_many_threads():
    step = ts.function(lambda x, n: x * n)
    found = {}

    def run(n):
        found[n] = [step(X, n % 3).sum() for _ in range(5)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(6):
        np.testing.assert_allclose(found[n], [jnp.sum(X * (n % 3))] * 5, atol=1e-6)
