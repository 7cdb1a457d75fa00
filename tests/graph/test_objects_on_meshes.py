# SPDX-License-Identifier: Apache-2.0
"""Gradients by NNX objects; objects on meshes, under strategies and in pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import (
    LossFormError,
    SpecFormError,
    UnconnectedGradientError,
    WriteBackError,
)
from tests.graph.nnx_modules import (
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

FULL = pytest.mark.full

# --- gradients


def test_the_gradient_by_a_module_is_that_by_its_parameters():
    @ts.function
    def slopes(model, x):
        loss = loss_of(model, x)
        return ts.grad(loss, model), ts.grad(loss, {"all": model})

    found, inside = slopes(block(), X)
    expected = nnx.jit(nnx.grad(loss_of))(block(), X)
    check_equal(state_of(found), state_of(expected))
    check_equal(state_of(inside["all"]), state_of(expected))


@pytest.mark.parametrize("wrap", [pytest.param(lambda f: f, marks=FULL), ts.function])
def test_value_and_grad_by_a_module_changes_its_other_state(wrap):
    ours, theirs = block(), block()
    loss, found = wrap(ts.value_and_grad(loss_of))(ours, X)
    expected, slopes = nnx.jit(nnx.value_and_grad(loss_of))(theirs, X)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    check_equal(state_of(found), state_of(slopes))
    check_equal(state_of(ours), state_of(theirs))


@pytest.mark.full
def test_a_recomputed_layer_changes_its_module_once_and_has_its_gradient():
    def loss(model, x, wrap):
        return jnp.mean(wrap(lambda model, x: model(x))(model, x) ** 2)

    @ts.function
    def step(model, x):
        return ts.grad(loss(model, x, ts.checkpoint), model)

    ours, theirs = block(), block()
    found = step(ours, X)
    expected = nnx.jit(nnx.grad(lambda model, x: loss(model, x, nnx.remat)))(theirs, X)
    check_equal(state_of(found), state_of(expected))
    check_equal(state_of(ours), state_of(theirs))
    assert ours.calls.get_value() == 1
    ts.checkpoint(lambda model, x: model(x))(ours, X)
    assert ours.calls.get_value() == 2


def test_value_and_grad_sees_through_transformations_of_flax():
    def loss(model, x):
        y = nnx.cond(jnp.sum(x) > -1, lambda m, x: m(x), lambda m, x: x, model, x)
        return jnp.mean(y**2)

    ours, theirs = block(), block()
    _, found = ts.function(ts.value_and_grad(loss))(ours, X)
    expected = nnx.jit(nnx.grad(loss))(theirs, X)
    check_equal(state_of(found), state_of(expected))
    check_equal(state_of(ours), state_of(theirs))


def test_a_parameter_that_the_loss_does_not_use_is_named():
    @ts.function
    def step(model, x):
        return ts.grad(jnp.sum(model.up(x)), model)

    with pytest.raises(UnconnectedGradientError, match="allow_unused=True") as caught:
        step(block(), X)
    assert "'down/0/bias/value'" in caught.value.what
    assert "norm/mean" not in caught.value.what


def test_a_gradient_by_all_the_variables_of_a_module_names_the_parameters():
    hint = "by a model's parameters alone: ts.grad(loss, nnx.state(model, nnx.Param))"

    def step(model, x, *filters):
        loss = jnp.mean(model.norm(model.up(x)) ** 2)
        return ts.grad(loss, nnx.state((model.norm, model.up), *filters))

    with pytest.raises(UnconnectedGradientError) as caught:
        ts.function(step)(block(), X)
    assert "'0/mean/value', '0/var/value'" in caught.value.what
    assert caught.value.fix.splitlines()[-1] == hint
    with pytest.raises(LossFormError) as refused:
        ts.function(lambda model, x: ts.grad(loss_of(model, x), nnx.state(model)))(
            block(), X
        )
    assert refused.value.fix.splitlines()[-1] == hint
    found = ts.function(lambda model, x: step(model, x, nnx.Param))(block(), X)
    assert len(jax.tree.leaves(found)) == 4


# --- inside other functions


@pytest.mark.full
def test_a_function_inside_another_one_changes_the_same_object(dp_mesh):
    plain = ts.function(train)
    laid_out = ts.function(train, in_specs={"x": P("dp")}, mesh=dp_mesh)
    for inner in (plain, laid_out):
        check = block()

        @ts.function
        def outer(model, optimizer, x, inner=inner):
            return inner(model, optimizer, x)

        by = optimizer(check)
        outer(check, by, X)
        expected = block()
        by_nnx = optimizer(expected)
        nnx.jit(train_by_nnx)(expected, by_nnx, X)
        check_equal(state_of(check, by), state_of(expected, by_nnx))


def test_a_function_inside_nnx_jit_changes_the_same_object(steps):
    step = ts.function(train)
    check_steps(nnx.jit(lambda model, state, x: step(model, state, x)), steps)


# --- on a mesh


def test_weights_keep_the_layout_in_which_they_are_given(grid_mesh, steps):
    def layout(leaf):
        spec = P(None, "tp") if leaf.shape == (4, 8) else P()
        return NamedSharding(grid_mesh.jax, spec)

    model = block()
    model.calls.set_value(jnp.int32(0))
    state = optimizer(model)
    for holder in (model, state):
        held = nnx.state(holder)
        nnx.update(
            holder, jax.tree.map(lambda leaf: jax.device_put(leaf, layout(leaf)), held)
        )
    step = ts.function(train, in_specs={"x": P("dp")})
    losses = [step(model, state, X) for _ in range(3)]
    np.testing.assert_allclose(losses, steps[1], rtol=1e-5)
    check_equal(state_of(model, state), steps[0])
    moments = nnx.state(state, nnx.OptState)
    split = [leaf for leaf in jax.tree.leaves(moments) if leaf.shape == (4, 8)]
    assert len(split) == 1
    for leaf in (model.up.kernel[...], *split):
        assert leaf.sharding.spec == P(None, "tp")
    assert step.num_programs() == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "options", "spec", "moment"),
    [
        pytest.param("data_parallel", {}, P(), P(), marks=FULL),
        ("zero_redundancy_optimizer", {"stage": 1}, P(), P(None, "dp")),
        pytest.param(
            "zero_redundancy_optimizer", {"stage": 2}, P(), P(None, "dp"), marks=FULL
        ),
        pytest.param(
            "zero_redundancy_optimizer",
            {"stage": 3},
            P(None, "dp"),
            P(None, "dp"),
            marks=FULL,
        ),
        ("fsdp", {"mesh_axes": ["dp"]}, P(None, "dp"), P(None, "dp")),
    ],
)
def test_a_strategy_takes_modules_for_parameters_and_optimizers_for_state(
    strategy, options, spec, moment, dp_mesh, steps
):
    distributed = ts.distribute(strategy, batch="x", **options)(train)
    model, state = check_steps(ts.function(distributed, mesh=dp_mesh), steps)
    assert model.up.kernel[...].sharding.spec == spec
    moments = jax.tree.leaves(nnx.state(state, nnx.OptState))
    assert {m.sharding.spec for m in moments if m.shape == (4, 8)} == {moment}


@pytest.mark.parametrize(
    "specs",
    [
        {"up": {"kernel": P(None, "tp")}, "down": {0: {"kernel": P("tp")}}},
        nnx.State(
            {
                "up": {"kernel": nnx.Variable(P(None, "tp")), "bias": None},
                "down": {0: {"kernel": nnx.Variable(P("tp", None))}},
            }
        ),
    ],
)
def test_layouts_of_a_module_are_declared_by_its_own_names(specs, grid_mesh, steps):
    step = ts.function(train, mesh=grid_mesh, in_specs={"model": specs, "x": P("dp")})
    model, _ = check_steps(step, steps)
    assert model.up.kernel[...].sharding.spec == P(None, "tp")
    assert model.down[0].kernel[...].sharding.spec[0] == "tp"
    assert model.up.bias[...].sharding.is_fully_replicated


def test_a_layout_of_an_array_that_a_module_lacks_is_refused(grid_mesh):
    step = ts.function(train, mesh=grid_mesh, in_specs={"model": {"up": {"w": P()}}})
    with pytest.raises(SpecFormError, match="a layout for 'up/w', which is no array"):
        step(block(), None, X)


def test_meshes_are_compared_for_a_module():
    model = block()
    mesh = ts.Mesh(["dp"], devices=range(2))
    report = ts.compare_layouts(ts.function(loss_of), (model, X), mesh)
    assert "no difference" in str(report)
    assert model.calls.get_value() == 0


class Stages(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))


@ts.graph.stage("first")
def first(model, x):
    return jnp.tanh(model.first(x))


@ts.graph.stage("second")
def second(model, x):
    return model.second(x)


def test_a_pipeline_reads_a_module_and_leaves_it_as_it_is():
    mesh = ts.Mesh(["pp"], devices=range(2))

    @ts.distribute("pipeline_parallel", params="model")
    def reads(model, x):
        return second(model, first(model, x))

    @ts.distribute("pipeline_parallel", params="model")
    def changes(model, x):
        model.calls.set_value(model.calls.get_value() + 1)
        return second(model, first(model, x))

    @ts.function(mesh=mesh)
    def step(model, x, body):
        return ts.grad(jnp.mean(body(model, x) ** 2), model)

    def plain(model, x):
        return jnp.mean(model.second(jnp.tanh(model.first(x))) ** 2)

    model = Stages(nnx.Rngs(0))
    found = step(model, X, reads)
    check_equal(state_of(found), state_of(nnx.jit(nnx.grad(plain))(model, X)))
    with pytest.raises(WriteBackError, match="in a stage of a pipeline return"):
        step(model, X, changes)


def test_a_training_step_splits_the_batch_and_not_the_module(dp_mesh, steps):
    step = ts.graph.training_step(mesh=dp_mesh)(train)
    model, _ = check_steps(step, steps)
    assert model.up.kernel[...].sharding.is_fully_replicated
    specs = {value.name: value.spec for value in step.last.traced.graph.inputs}
    assert specs["x"] == P(("dp",))
    assert specs["model/up/bias"] == P()
