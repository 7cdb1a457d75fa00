# SPDX-License-Identifier: Apache-2.0
"""Calls that take turns: each finds its own program, and never one of another.

The quick way to a program is tried by calling each function twice with everything that
the next call differs from, so that the program of the other is there to be mistaken.
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph
from tessera.errors import ArgumentError, WriteBackError
from tessera.graph import function as function_module
from tessera.graph.training_steps import Step
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


def on(mesh, *spec, array=X):
    return jax.device_put(array, NamedSharding(mesh.jax, P(*spec)))


def alternate(step, *calls, rounds=3):
    """The results of some calls that take turns, those of the last round."""
    for _ in range(rounds):
        results = [step(*args) for args in calls]
    return results


@pytest.fixture
def full_comparisons(monkeypatch):
    """Counts the calls that did not find their program quickly."""
    counted = []
    run_new = function_module.Function._run_new

    def counting(self, args, kwargs):
        counted.append(args)
        return run_new(self, args, kwargs)

    monkeypatch.setattr(function_module.Function, "_run_new", counting)
    return counted


# --- what differs is seen


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, X[:4]),
        (X, X.reshape(2, 4)),
        (X, X.astype(jnp.bfloat16)),
        (X, X.astype(jnp.int32)),
        (jnp.float32(2), jnp.asarray(2.0)),
        (jnp.asarray(2.0), 2.0),
        (np.float32(2), 2.0),
        (np.float64(2), 2.0),
        (np.int32(2), 2),
        (np.bool_(True), True),
        (np.bool_(True), 1),
        (np.complex64(1), 1j),
        (2, 2.0),
        (1, True),
        (0.0, -0.0),
        ("mean", "sum"),
        (None, X),
        ((X, X), [X, X]),
        ({"a": X}, {"b": X}),
        ({"a": X, "b": 1}, {"a": 1, "b": X}),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
    ],
    ids=str,
)
@pytest.mark.parametrize("beside", [(), (X, {"deep": [X, 3]})], ids=["alone", "among"])
def test_what_differs_in_one_leaf_is_another_program(one, other, beside):
    @ts.function
    def step(value, *more):
        kinds = [getattr(leaf, "dtype", leaf) for leaf in jax.tree.leaves(value)]
        return str((jax.tree.structure(value), kinds))

    first, second = alternate(step, (one, *beside), (other, *beside))
    assert step.num_programs() == 2
    assert first == ts.function(step.body)(one, *beside)
    assert second == ts.function(step.body)(other, *beside)


def test_each_layout_has_its_program(dp_mesh, grid_mesh):
    step = ts.function(lambda x: x * 2)
    device = jax.devices()[3]
    arrays = [
        X,
        np.asarray(X),
        jax.device_put(X, jax.devices()[0]),
        jax.device_put(X, device),
        on(dp_mesh),
        on(dp_mesh, "dp"),
        on(grid_mesh, "tp"),
        on(grid_mesh, "dp"),
        on(grid_mesh, ("dp", "tp")),
    ]
    results = alternate(step, *((array,) for array in arrays))
    for array, result in zip(arrays[4:], results[4:], strict=True):
        assert result.sharding.is_equivalent_to(array.sharding, 1)
    assert results[3].devices() == {device}
    assert [len(result.devices()) for result in results[:3]] == [1, 1, 1]
    assert step.num_programs() == len(arrays) - 1  # NumPy's array is like JAX's


def test_each_mesh_and_each_autocast_has_its_program(dp_mesh, grid_mesh):
    weights = jnp.eye(8, dtype=jnp.float32)
    step = ts.function(lambda x: x @ weights)
    rounded = X.astype(jnp.bfloat16).astype(jnp.float32)
    for _ in range(3):
        np.testing.assert_array_equal(step(X), X)
        with ts.autocast(ts.bf16):
            np.testing.assert_array_equal(step(X), rounded)
        with dp_mesh:
            assert step(X).sharding.mesh == dp_mesh.jax
            with ts.autocast(ts.bf16):
                np.testing.assert_array_equal(step(X), rounded)
            np.testing.assert_array_equal(step(X), X)
        with grid_mesh:
            assert step(X).sharding.mesh == grid_mesh.jax
        with jax.default_matmul_precision("highest"):
            np.testing.assert_array_equal(step(X), X)
    assert step.num_programs() == 6


def test_arguments_that_trade_places_keep_their_roles():
    step = ts.function(lambda a, b, c=X, *, d=2.0: (a, b, c, d))
    calls = [
        ((X, 1), {}),
        ((1, X), {}),
        ((), {"b": X, "a": 1}),
        ((), {"a": X, "b": 1}),
        ((1,), {"c": X + 1, "b": X}),
        ((X,), {"d": X + 2, "b": X + 1}),
        ((X,), {"d": 3.0, "b": X + 1}),
        ((X, X + 1, X + 2), {"d": X + 3}),
    ]
    for _ in range(3):
        for args, kwargs in calls:
            found, expected = step(*args, **kwargs), step.body(*args, **kwargs)
            for value, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(value, wanted)


def test_statics_among_many_arrays_are_compared_by_value():
    step = ts.function(lambda state, config: state["b"] * config["rate"] + state["a"])
    state = {"a": X, "b": X + 1, "c": X + 2}
    rates = [{"rate": rate, "name": "sgd"} for rate in (0.5, 0.25, 0.5, 1.0)]
    results = alternate(step, *((state, dict(rate)) for rate in rates))
    for rate, result in zip(rates, results, strict=True):
        np.testing.assert_array_equal(result, (X + 1) * rate["rate"] + X)
    assert step.num_programs() == 3


# --- values that change in place


@dataclass(unsafe_hash=True)
class Rate:
    """Compares and hashes by a number that may change."""

    number: float


def test_an_object_that_changed_in_place_is_another_value():
    step = ts.function(lambda x, rate: x * rate.number)
    rate = Rate(2.0)
    for number in (2.0, 2.0, 3.0, 3.0, 2.0):
        rate.number = number
        np.testing.assert_array_equal(step(X, rate), X * number)
    assert step.num_programs() == 2


def test_an_object_equal_to_one_that_changed_is_not_mistaken_for_its_old_value():
    step = ts.function(lambda x, rate: x * rate.number)
    rate = Rate(2.0)
    alternate(step, (X, rate))
    rate.number = 3.0
    np.testing.assert_array_equal(step(X, Rate(3.0)), X * 3)
    np.testing.assert_array_equal(step(X, Rate(2.0)), X * 2)


def test_an_object_may_change_while_it_is_traced():
    @ts.function
    def step(x, rate):
        rate.number += 1.0
        return x * rate.number

    np.testing.assert_array_equal(step(X, Rate(2.0)), X * 3)


def test_a_variable_that_a_callable_closes_over_is_compared():
    def scaling(factor):
        def apply(x):
            return x * factor

        def change(value):
            nonlocal factor
            factor = value

        return apply, change

    step = ts.function(lambda apply, x: apply(x))
    apply, change = scaling(2.0)
    for factor in (2.0, 2.0, 3.0, 3.0, 2.0):
        change(factor)
        np.testing.assert_array_equal(step(apply, X), X * factor)
    assert step.num_programs() == 2


def test_options_of_a_partial_that_change_in_place_are_compared():
    step = ts.function(lambda apply, x: apply(x))
    apply = functools.partial(lambda x, factor: x * factor, factor=2.0)
    for factor in (2.0, 2.0, 3.0, 3.0):
        apply.keywords["factor"] = factor
        np.testing.assert_array_equal(step(apply, X), X * factor)


def test_a_captured_tensor_is_read_at_each_call():
    table = tensor((8,), init="ones", name="table")
    step = ts.function(lambda x: x * table)
    other = X[:, None]
    alternate(step, (X,), (other,))
    table.materialize(jax.random.key(0))
    before = table[:]
    np.testing.assert_array_equal(step(X), X * before)


# --- what else a call does


def test_annotations_are_checked_for_each_combination_of_shapes():
    def body(x: ts.Tensor["N", ts.f32], y: ts.Tensor["N", ts.f32]):  # noqa: F821
        return x + y

    step = ts.function(body)
    alternate(step, (X, X), (X[:4], X[:4]))
    for _ in range(2):
        with pytest.raises(Exception, match="N"):
            step(X, X[:4])
    np.testing.assert_array_equal(step(X[:4], X[:4]), X[:4] * 2)


def test_each_call_writes_back_into_its_own_dict():
    @ts.function
    def step(state, x, training):
        if training:
            state["count"] = state["count"] + 1
        return x * state["count"]

    one, other = {"count": jnp.float32(0)}, {"count": jnp.float32(10)}
    for count in range(1, 4):
        assert step(one, X, True).shape == (8,)
        assert step(one, X[:4], False).shape == (4,)
        step(other, X[:4], True)
        assert (one["count"], other["count"]) == (count, 10 + count)
    assert step.num_programs() == 3


def test_a_dict_that_is_two_arguments_is_refused_quickly_too():
    @ts.function
    def step(one, other, x):
        one["a"] = other["a"] + x
        return x

    for shape in (8, 4, 8, 4):
        x = X[:shape]
        step({"a": x}, {"a": x}, x)
    shared = {"a": X}
    with pytest.raises(WriteBackError):
        step(shared, shared, X)


def test_donated_arrays_are_those_of_the_call():
    step = ts.function(lambda w, x: w + x, donate=["w"])
    for shape in (8, 4, 8, 4, 8):
        weights, x = X[:shape] + 1, X[:shape] * 1
        step(weights, x)
        assert weights.is_deleted()
        assert not x.is_deleted()


def test_what_has_no_hash_is_refused_after_other_calls():
    step = ts.function(lambda x, config: x)
    alternate(step, (X, "a"), (X, "b"))
    for value in ({"a"}, SimpleNamespace(rate=1)):
        with pytest.raises(ArgumentError, match="T301"):
            step(X, value)


def test_tensors_and_arrays_take_turns(dp_mesh):
    step = ts.function(lambda x: x * 2)
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, init="ones", name="t")
    short = tensor((6,), init="ones", name="s")
    calls = [(table,), (on(dp_mesh, "dp"),), (short,), (X,)]
    found = alternate(step, *calls)
    assert [result.shape for result in found] == [(8,), (8,), (6,), (8,)]
    np.testing.assert_array_equal(np.asarray(found[2]), np.full(6, 2.0))


def test_programs_with_callbacks_take_turns(full_comparisons):
    seen = []

    @ts.function
    def step(x):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x * 2

    results = alternate(step, (X,), (X[:4],), (X.astype(jnp.int32),))
    jax.effects_barrier()
    assert [result.shape for result in results] == [(8,), (4,), (8,)]
    assert len(seen) == 9
    assert len(full_comparisons) == 3


def test_objects_of_nnx_take_turns():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    @ts.function
    def step(model, x):
        return model(x)

    for _ in range(3):
        model.train()
        assert bool(jnp.any(step(model, jnp.ones(64)) == 0.0))
        model.eval()
        assert bool(jnp.all(step(model, jnp.ones(64)) == 1.0))
    assert step.num_programs() == 2


@pytest.mark.parametrize("axis", ["tp", "dp"], ids=["one layout", "two layouts"])
def test_parameters_are_in_the_layout_of_the_program_that_runs(grid_mesh, axis):
    @graph.training_step(mesh=grid_mesh)
    def step(x, training):
        layout = ShardSpec((0,), ("tp" if training else axis,))
        weights = scope.parameter("weights", (8,), init="normal", layout=layout)
        return x * weights if training else x + weights

    x = np.ones((2, 8), np.float32)
    step.init(jax.random.key(0), x, True)
    for _ in range(3):
        weights = np.asarray(step.params["weights"])
        np.testing.assert_allclose(step(x, True), x * weights, rtol=1e-6)
        np.testing.assert_allclose(step(x, False), x + weights, rtol=1e-6)
        assert step.params["weights"].sharding.spec == P(axis)
        step.params = {"weights": weights + 1}  # on the host
    assert step.num_programs() == 2


def test_parameters_are_placed_once_for_programs_of_one_layout(grid_mesh, monkeypatch):
    placed = []
    place = Step._place
    monkeypatch.setattr(Step, "_place", lambda *args: placed.append(1) or place(*args))

    @graph.training_step(mesh=grid_mesh)
    def step(x, training):
        weights = scope.parameter("weights", (8,), init="normal")
        return x * weights if training else x + weights

    x = np.ones((2, 8), np.float32)
    step.init(jax.random.key(0), x, True)
    alternate(step, (x, True), (x, False))
    before = len(placed)
    alternate(step, (x, True), (x, False))
    assert len(placed) == before <= 3


# --- how many


@pytest.mark.full
def test_the_last_32_kinds_of_call_are_found_quickly(full_comparisons):
    step = ts.function(lambda x, n: x * n)
    calls = [(X, n) for n in range(16)] + [(jnp.ones(n), 2) for n in range(9, 25)]
    alternate(step, *calls, rounds=1)
    assert len(full_comparisons) == 32
    alternate(step, *calls, *reversed(calls))
    assert len(full_comparisons) == 32
    assert step.num_programs() == 32


@pytest.mark.full
def test_a_program_that_is_not_among_them_is_found_without_compiling(full_comparisons):
    step = ts.function(lambda x: x * 2)
    arrays = [jnp.ones(n) for n in range(1, 35)]
    for array in arrays:
        step(array)
    del full_comparisons[:]
    for array in (arrays[0], arrays[1], arrays[0], arrays[33]):
        np.testing.assert_array_equal(step(array), array * 2)
    assert len(full_comparisons) == 2
    assert step.num_programs() == 34
    assert len(step._kinds) == 32
