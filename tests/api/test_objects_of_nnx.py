# SPDX-License-Identifier: Apache-2.0
"""NNX objects as arguments and results: what ``nnx.jit`` does is what is expected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import scope
from tessera.errors import (
    ArgumentError,
    KernelError,
    LossFormError,
    SpecFormError,
    StrategyError,
    UnconnectedGradientError,
    WriteBackError,
)

X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Block(nnx.Module):
    """Has every kind of state: weights, statistics, random streams, a counter."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.List([nnx.Linear(8, 4, rngs=rngs)])
        self.calls = nnx.Variable(0)
        self.scale = 1.0

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        x = self.dropout(nnx.relu(self.norm(self.up(x))))
        return self.down[0](x) * self.scale


@functools.cache
def made():
    return Block(nnx.Rngs(0, dropout=1))


def block():
    return nnx.clone(made())


def optimizer(model):
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def train(model, optimizer, x):
    loss = loss_of(model, x)
    optimizer.update(model, ts.grad(loss, model))
    return loss


def train_by_nnx(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def state_of(*objects):
    """Every array of some objects, by path."""
    flat = jax.tree_util.tree_flatten_with_path(nnx.state(objects))[0]

    def plain(leaf):
        dtype = getattr(leaf, "dtype", jnp.int32)
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return {jax.tree_util.keystr(path): plain(leaf) for path, leaf in flat}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=2e-6, err_msg=name)


@pytest.fixture
def steps():
    """The model, optimizer and losses of three steps of ``nnx.jit``."""
    model = block()
    state = optimizer(model)
    step = nnx.jit(train_by_nnx)
    losses = [step(model, state, X) for _ in range(3)]
    return state_of(model, state), losses


def check_steps(step, steps, model=None):
    model = model or block()
    state = optimizer(model)
    losses = [step(model, state, X) for _ in range(3)]
    np.testing.assert_allclose(losses, steps[1], rtol=1e-5)
    check_equal(state_of(model, state), steps[0])
    return model, state


# --- as arguments


def test_a_call_changes_the_callers_module_as_nnx_jit_does():
    ours, theirs = block(), block()
    for _ in range(2):
        found = ts.function(lambda model, x: model(x))(ours, X)
        expected = nnx.jit(lambda model, x: model(x))(theirs, X)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    check_equal(state_of(ours), state_of(theirs))
    assert ours.calls.get_value() == 2


@pytest.mark.parametrize("body", [train, train_by_nnx])
def test_a_training_step_is_that_of_nnx_jit(body, steps):
    step = ts.function(body)
    check_steps(step, steps)
    assert step.num_programs() == 1


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


@pytest.mark.parametrize("wrap", [lambda f: f, ts.function])
def test_value_and_grad_by_a_module_changes_its_other_state(wrap):
    ours, theirs = block(), block()
    loss, found = wrap(ts.value_and_grad(loss_of))(ours, X)
    expected, slopes = nnx.jit(nnx.value_and_grad(loss_of))(theirs, X)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    check_equal(state_of(found), state_of(slopes))
    check_equal(state_of(ours), state_of(theirs))


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
    with jax.disable_jit(), pytest.raises(UnconnectedGradientError, match="alone"):
        ts.function(step)(block(), X)
    with pytest.raises(LossFormError) as refused:
        ts.function(lambda model, x: ts.grad(loss_of(model, x), nnx.state(model)))(
            block(), X
        )
    assert refused.value.fix.splitlines()[-1] == hint
    found = ts.function(lambda model, x: step(model, x, nnx.Param))(block(), X)
    assert len(jax.tree.leaves(found)) == 4


# --- inside other functions


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


@pytest.mark.parametrize(
    ("strategy", "options", "spec", "moment"),
    [
        ("data_parallel", {}, P(), P()),
        ("zero_redundancy_optimizer", {"stage": 1}, P(), P(None, "dp")),
        ("zero_redundancy_optimizer", {"stage": 2}, P(), P(None, "dp")),
        (
            "zero_redundancy_optimizer",
            {"stage": 3},
            P(None, "dp"),
            P(None, "dp"),
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
    meshes = [ts.Mesh(["dp"], devices=range(size)) for size in (1, 2)]
    report = ts.compare_layouts(ts.function(loss_of), (model, X), meshes)
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


# --- what cannot be


def test_a_static_attribute_without_a_hash_is_refused():
    """One that is changed in place would be taken for what it was."""

    class Listed(nnx.Module):
        def __init__(self):
            self.sizes = nnx.static([1, 2])

    with pytest.raises(ArgumentError) as caught:
        ts.function(lambda model, x: x)(Listed(), X)
    assert str(caught.value) == (
        "[T301] a static attribute of 'model' cannot be told from others\n"
        "  got: unhashable type: 'list', in a Listed\n"
        "  fix: make it a value that hashes, such as a tuple, or nnx.data(...)\n"
        "  docs: docs/errors/T301.md"
    )


def test_an_object_in_a_users_own_tree_changes_and_the_tree_does_not():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        model: nnx.Module
        steps: jax.Array

    @ts.function
    def step(state, x):
        state.model(x)
        return dataclasses.replace(state, steps=state.steps + 1)

    @ts.function
    def assign(state):
        state.steps = state.steps + 1

    model = block()
    state = State(model, jnp.int32(0))
    new = step(state, X)
    assert new.model is model
    assert (new.steps, state.steps, model.calls.get_value()) == (1, 0, 1)
    with pytest.raises(WriteBackError, match="a State among the arguments was changed"):
        assign(state)


def test_another_variable_in_a_state_is_refused():
    @ts.function
    def body(state):
        state["up"]["bias"] = nnx.Param(jnp.ones(8))

    with pytest.raises(WriteBackError) as caught:
        body(nnx.state(block(), nnx.Param))
    assert str(caught.value) == (
        "[T320] a State among the arguments was changed, and cannot be given back\n"
        "  got: another object in the place of one that it held\n"
        "  fix: return it, or change the objects that it holds\n"
        "  docs: docs/errors/T320.md"
    )


def test_a_returned_state_is_the_way_that_the_refusal_names():
    @ts.function
    def body(state):
        state = jax.tree.map(lambda leaf: leaf, state)
        state["up"]["bias"] = nnx.Param(jnp.ones(8))
        return state

    state = body(nnx.state(block(), nnx.Param))
    np.testing.assert_array_equal(state["up"]["bias"][...], np.ones(8))


def test_another_object_in_the_place_of_an_entry_is_refused():
    @ts.function
    def body(state):
        state["model"] = nnx.clone(state["model"])

    with pytest.raises(WriteBackError) as caught:
        body({"model": block()})
    assert str(caught.value) == (
        "[T320] 'model' of a dict among the arguments was an object, and is another "
        "one\n"
        "  got: a Block before\n"
        "  fix: return the new object, or change the one that is there\n"
        "  docs: docs/errors/T320.md"
    )


def test_a_module_that_is_closed_over_is_not_changed():
    model = block()
    before = state_of(model)

    @ts.function
    def forward(x):
        return model(x)

    with pytest.raises(WriteBackError) as caught:
        forward(X)
    line = Block.__call__.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        "[T320] an NNX object was changed, and cannot be given back\n"
        "  got: Cannot mutate Variable from a different trace level\n"
        f"  got: at {__file__}:{line}\n"
        "  fix: pass it to the function as an argument, where it is closed over\n"
        "  fix: in a loop, a branch or a transformation use Flax's own: nnx.scan, "
        "nnx.cond, nnx.vmap\n"
        "  fix: in a stage of a pipeline return what is new\n"
        "  docs: docs/errors/T320.md"
    )
    check_equal(state_of(model), before)


def test_a_kernel_takes_the_arrays_of_a_module(dp_mesh):
    @ts.op.kernel
    def project(layer, x):
        return x @ layer

    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(KernelError) as caught:
        project(layer, X)
    assert str(caught.value) == (
        "[T208] a kernel takes arrays, and argument 'layer' holds NNX objects\n"
        "  got: a Linear\n"
        "  fix: pass its arrays: layer.kernel[...]\n"
        "  docs: docs/errors/T208.md"
    )
    rows = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    found = project(layer.kernel[...], rows)
    np.testing.assert_allclose(found, X @ layer.kernel[...], atol=1e-6)


def test_tensor_parallel_takes_the_arrays_of_a_module():
    mesh = ts.Mesh(["tp"], devices=range(2))

    @ts.function(mesh=mesh)
    @ts.distribute("tensor_parallel")
    def whole(x: ts.Tensor["B", "D_in"], layer):  # noqa: F821
        return layer(x)

    layer = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(StrategyError) as caught:
        whole(X, layer)
    assert str(caught.value) == (
        "[T313] strategy 'tensor_parallel' does not know the dims of the arrays in "
        "'layer'\n"
        "  got: a Linear, which no annotation describes\n"
        '  fix: give \'whole\' its arrays: kernel: ts.Tensor["D_in", "D_out"], and '
        "layer.kernel[...] in the call\n"
        "  docs: docs/errors/T313.md"
    )

    @ts.function(mesh=mesh)
    @ts.distribute("tensor_parallel")
    def of_arrays(
        x: ts.Tensor["B", "D_in"],  # noqa: F821
        kernel: ts.Tensor["D_in", "D_out"],  # noqa: F821
    ) -> ts.Tensor["B", "D_out"]:  # noqa: F821
        return x @ kernel

    np.testing.assert_allclose(of_arrays(X, layer.kernel[...]), layer(X), atol=1e-6)
