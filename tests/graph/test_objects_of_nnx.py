# SPDX-License-Identifier: Apache-2.0
"""NNX objects as arguments and results: what ``nnx.jit`` does is what is expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tessera as ts
from tessera.tracing import scope
from tests.graph.nnx_modules import (
    Block,
    X,
    block,
    check_equal,
    check_steps,
    loss_of,
    optimizer,
    state_of,
    train,
    train_by_nnx,
)

# --- as arguments


@pytest.mark.full
def test_a_call_changes_the_callers_module_as_nnx_jit_does():
    ours, theirs = block(), block()
    for _ in range(2):
        found = ts.function(lambda model, x: model(x))(ours, X)
        expected = nnx.jit(lambda model, x: model(x))(theirs, X)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    check_equal(state_of(ours), state_of(theirs))
    assert ours.calls.get_value() == 2


@pytest.mark.parametrize(
    "body", [train, pytest.param(train_by_nnx, marks=pytest.mark.full)]
)
def test_a_training_step_is_that_of_nnx_jit(body, steps):
    step = ts.function(body)
    check_steps(step, steps)
    assert step.num_programs() == 1


@pytest.mark.slow(reason="it compiles several programs")
def test_objects_of_equal_structure_share_a_program():
    step = ts.function(train)
    for _ in range(2):
        model = block()
        step(model, optimizer(model), X)
    # Optax's functions are others for each optimizer, as for nnx.jit.
    assert step.num_programs() == 2
    forward = ts.function(loss_of)
    forward(block(), X)
    forward(block(), X)
    assert forward.num_programs() == 1


def test_a_partial_of_nnx_with_cached_objects_trains_them():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])

    def double(model, x):
        model.kernel[...] *= 2.0
        return model(x)

    step = nnx.cached_partial(ts.jit(double), model)
    for _ in range(2):
        step(X)
    np.testing.assert_allclose(model.kernel[...], before * 4.0)


def test_a_trace_or_a_compilation_leaves_the_module_as_it_is():
    model = block()
    before = state_of(model)
    step = ts.function(loss_of)
    assert "model/up/kernel: float32[4,8]" in step.trace(model, X).as_text()
    step.compile(model, X)
    check_equal(state_of(model), before)
    step(model, X)
    assert step.num_programs() == 1


def test_a_module_of_shapes_alone_is_enough_to_compile():
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0, dropout=1)))
    compiled = ts.function(loss_of).compile(model, jax.ShapeDtypeStruct((8, 4), "f4"))
    assert "f32[8,4]" in compiled.as_text()


def test_a_step_that_is_traced_twice_changes_the_module_once():
    @ts.graph.training_step
    def step(model, x):
        # The first trace finds this parameter, the second one has it.
        weight = scope.parameter("weight", (4, 2), init="normal")
        return jnp.mean((model(x) @ weight) ** 2)

    model = block()
    step(model, X)
    step(model, X)
    assert model.calls.get_value() == 2
    assert model.dropout.rngs.count.get_value() == 2


def test_a_call_that_fails_changes_nothing():
    @ts.function
    def fail(model, x):
        model(x)
        raise KeyError("mine")

    model = block()
    before = state_of(model)
    with pytest.raises(KeyError):
        fail(model, X)
    check_equal(state_of(model), before)


def test_what_is_shared_within_a_module_stays_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.head = self.embed

        def __call__(self, x):
            return self.head(jnp.tanh(self.embed(x)))

    found = []
    for wrap, body in ((ts.function, train), (nnx.jit, train_by_nnx)):
        model = Tied(nnx.Rngs(0))
        state = optimizer(model)
        wrap(body)(model, state, X)
        wrap(body)(model, state, X)
        assert model.head is model.embed
        found.append(state_of(model, state))
    check_equal(*found)


def test_what_is_shared_between_arguments_is_one_object_in_the_function():
    def body(model, part, parts):
        assert model.up is part
        assert parts["down"] is model.down[0]
        part.kernel.set_value(part.kernel.get_value() * 2)
        parts["down"].bias.set_value(parts["down"].bias.get_value() + 1)

    ours, theirs = block(), block()
    up, down = ours.up, ours.down[0]
    ts.function(body)(ours, up, {"down": down})
    nnx.jit(body)(theirs, theirs.up, {"down": theirs.down[0]})
    check_equal(state_of(ours), state_of(theirs))
    assert ours.up is up
    assert ours.down[0] is down


def test_one_module_may_be_given_twice():
    def body(model, same):
        assert model is same
        model.calls.set_value(model.calls.get_value() + 1)
        same.calls.set_value(same.calls.get_value() + 1)

    model = block()
    ts.function(body)(model, model)
    assert model.calls.get_value() == 2


def test_attributes_that_come_go_and_change_do_so_for_the_caller():
    def body(model, x):
        model.seen = nnx.Variable(jnp.sum(x))
        model.scale = 3.0
        model.twin = model.up
        del model.norm
        return x

    model = block()
    ts.function(body)(model, X)
    np.testing.assert_allclose(model.seen.get_value(), jnp.sum(X), atol=1e-6)
    assert model.scale == 3.0
    assert model.twin is model.up
    assert not hasattr(model, "norm")


def test_another_static_attribute_is_another_program():
    step = ts.function(lambda model, x: model(x))
    model = block()
    model.eval()
    first = step(model, X)
    model.scale = 2.0
    np.testing.assert_allclose(step(model, X), 2 * first, rtol=1e-6)
    assert step.num_programs() == 2


def test_objects_in_containers_change_and_so_do_the_containers():
    @ts.function
    def step(state, rest):
        state["losses"].append(train(state["model"], rest[0], rest[1]["x"]))
        state["steps"] = state["steps"] + 1
        rest[1]["x"] = rest[1]["x"] * 2

    ours, theirs = block(), block()
    ours_by, theirs_by = optimizer(ours), optimizer(theirs)
    state = {"model": ours, "steps": jnp.int32(0), "losses": []}
    rest = (ours_by, {"x": X})
    step(state, rest)
    loss = nnx.jit(train_by_nnx)(theirs, theirs_by, X)
    check_equal(state_of(ours, ours_by), state_of(theirs, theirs_by))
    np.testing.assert_allclose(state["losses"], [loss], rtol=1e-6)
    assert state["steps"] == 1
    assert state["model"] is ours
    np.testing.assert_array_equal(rest[1]["x"], 2 * X)


def test_a_variable_by_itself_is_an_argument_too():
    count, same = nnx.Variable(jnp.int32(3)), nnx.Variable(jnp.int32(3))

    def body(variable):
        variable.set_value(variable.get_value() * 2)
        return variable.get_value() + 1

    assert ts.function(body)(count) == nnx.jit(body)(same) == 7
    assert count.get_value() == same.get_value() == 6


def test_a_traced_decision_in_a_module_is_converted():
    class Gate(nnx.Module):
        def __init__(self):
            self.last = nnx.Variable(jnp.float32(0))

        def __call__(self, x):
            if jnp.sum(x) > 0:
                x = x * 2
            self.last.set_value(jnp.sum(x))
            return x

    gate = Gate()
    step = ts.function(lambda gate, x: gate(x))
    np.testing.assert_array_equal(step(gate, X + 2), 2 * (X + 2))
    np.testing.assert_allclose(gate.last.get_value(), jnp.sum(2 * (X + 2)), rtol=1e-6)
    np.testing.assert_array_equal(step(gate, X - 2), X - 2)


def test_donated_objects_live_on_in_what_they_became(steps):
    step = ts.function(train, donate=("model", "optimizer"))
    check_steps(step, steps, Block(nnx.Rngs(0, dropout=1)))


# --- states


def test_a_state_is_taken_and_given():
    model = block()
    state = nnx.state(model, nnx.Param)
    doubled = ts.function(lambda s: jax.tree.map(lambda leaf: 2 * leaf, s))(state)
    assert isinstance(doubled, nnx.State)
    np.testing.assert_array_equal(
        doubled["up"]["kernel"][...], 2 * model.up.kernel[...]
    )
    assert isinstance(doubled["up"]["kernel"], nnx.Param)


def test_a_variable_of_a_state_is_changed_for_the_caller():
    def body(state):
        bias = state["up"]["bias"]
        bias.set_value(bias.get_value() + 1)

    ours, theirs = (nnx.state(block(), nnx.Param) for _ in range(2))
    ts.function(body)(ours)
    nnx.jit(body)(theirs)
    check_equal(state_of(ours), state_of(theirs))
    np.testing.assert_array_equal(ours["up"]["bias"][...], np.ones(8))


def test_split_and_merge_by_hand_work_as_in_nnx_jit():
    model = block()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def body(params, rest, x):
        merged = nnx.merge(graphdef, params, rest)
        loss = loss_of(merged, x)
        return ts.grad(loss, params), nnx.state(merged, nnx.BatchStat)

    slopes, statistics = ts.function(body)(params, rest, X)
    other = block()
    expected = nnx.jit(nnx.grad(loss_of))(other, X)
    check_equal(state_of(slopes), state_of(expected))
    check_equal(state_of(statistics), state_of(nnx.state(other, nnx.BatchStat)))
    # Flax splits and merges variables themselves, and no copies of them.
    check_equal(state_of(model), state_of(other))


# --- as results


def test_a_result_that_is_the_callers_object_is_that_object():
    model = block()

    def body(model, x):
        return model, {"part": model.up, "y": model(x)}

    first, rest = ts.function(body)(model, X)
    assert first is model
    assert rest["part"] is model.up


def test_a_new_object_of_the_function_is_the_callers():
    def body(model, rate):
        twin = nnx.clone(model)
        twin.up.kernel.set_value(twin.up.kernel.get_value() * rate)
        return twin, nnx.state(twin, nnx.BatchStat)

    model = block()
    twin, state = ts.function(body)(model, 2)
    assert isinstance(twin, Block)
    assert twin is not model
    assert isinstance(state, nnx.State)
    np.testing.assert_array_equal(twin.up.kernel[...], 2 * model.up.kernel[...])
    built = ts.function(lambda: Block(nnx.Rngs(0, dropout=1)))()
    check_equal(state_of(built), state_of(block()))
