# SPDX-License-Identifier: Apache-2.0
"""What a function assigns into dicts and lists of its arguments is the caller's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.errors import TesseraWarning, WriteBackError

X = jnp.arange(3.0)


def test_a_dict_gets_what_is_assigned_into_it():
    @ts.function
    def function(x, state):
        state["total"] = state["total"] + x
        state["new"] = {"a": x, "n": 1}
        state["inner"]["rows"][1] *= 2.0
        return x

    rows = [X, X]
    state = {"total": X, "inner": {"rows": rows}, "name": "s"}
    inner, kept = state["inner"], rows[0]
    function(X, state)
    np.testing.assert_array_equal(state["total"], 2 * X)
    np.testing.assert_array_equal(state["new"]["a"], X)
    assert state["new"]["n"] == 1
    assert state["inner"] is inner
    assert inner["rows"] is rows
    assert rows[0] is kept
    np.testing.assert_array_equal(rows[1], 2 * X)


def test_entries_go_and_lists_grow():
    @ts.function
    def function(x, *, state, rows):
        del state["old"]
        state["new"] = state.pop("older") + x
        rows.append(x)
        rows.pop(0)
        rows[0] = rows[0] + 1.0

    state, rows = {"old": X, "older": X, "kept": X}, [X, X]
    assert function(X, state=state, rows=rows) is None
    assert list(state) == ["kept", "new"]
    assert len(rows) == 2
    np.testing.assert_array_equal(rows[0], X + 1)


def test_a_container_that_only_loses_entries_stays_as_it_is():
    @ts.function
    def function(batch, rows):
        target = batch.pop("y")
        return target - batch.pop("x") + rows.pop(0)

    batch, rows = {"x": X, "y": 2 * X, "name": "b"}, [X, 3 * X]
    for _ in range(2):
        np.testing.assert_array_equal(function(batch, rows), 2 * X)
    assert list(batch) == ["x", "y", "name"]
    assert len(rows) == 2


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, x: jax.grad(lambda v: jnp.sum(f(v)))(x),
        lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
        lambda f, x: jax.checkpoint(f)(x),
        lambda f, x: jax.vmap(f)(x),
        lambda f, x: jax.jvp(f, (x,), (x,))[1],
    ],
    ids=["grad", "scan", "checkpoint", "vmap", "jvp"],
)
def test_a_scratch_value_of_a_transformation_is_not_given_back(transformed):
    def body(x, batch):
        def inner(v):
            batch["hidden"] = v * 2.0
            return batch["hidden"] * batch["scale"]

        return transformed(inner, x)

    batch = {"scale": jnp.float32(3)}
    for _ in range(2):
        found = ts.function(body)(X, batch)
        np.testing.assert_allclose(found, jax.jit(body)(X, batch))
    assert list(batch) == ["scale"]


def test_an_entry_that_a_transformation_changes_keeps_its_value_and_that_is_said():
    @ts.function
    def function(x, batch):
        def loss(v):
            batch["mean"] = jnp.mean(v)
            return jnp.sum(v**2)

        return jax.grad(loss)(x)

    batch = {"mean": jnp.float32(0)}
    with pytest.warns(TesseraWarning, match="'batch/mean' keeps its value"):
        np.testing.assert_allclose(function(X, batch), 2 * X)
    assert batch["mean"] == 0


def test_such_an_entry_stays_where_another_one_is_assigned():
    @ts.function
    def function(x, batch, rows):
        def loss(v):
            batch["mean"], rows[0] = jnp.mean(v), v
            batch["hidden"] = v
            return jnp.sum(v**2)

        batch["n"] = batch["n"] + 1.0
        rows[1] = rows[1] + 1.0
        return jax.grad(loss)(x)

    batch, rows = {"mean": X, "n": X}, [X, X]
    with pytest.warns(TesseraWarning, match="keeps its value"):
        function(X, batch, rows)
    assert list(batch) == ["mean", "n"]
    assert batch["mean"] is rows[0] is X
    np.testing.assert_array_equal(batch["n"], X + 1)
    np.testing.assert_array_equal(rows[1], X + 1)


def test_repeated_calls_use_one_program():
    @ts.function
    def function(x, state):
        if x[0] > 0:
            state["scale"] *= 0.5
        else:
            state["scale"] = jnp.minimum(state["scale"] * 2.0, jnp.float32(64))
        return x * state["scale"]

    state = {"scale": jnp.float32(8)}
    seen = []
    for first in (1, 0, 0, 0, 0, 1):
        function(X + first, state)
        seen.append(float(state["scale"]))
    assert seen == [4, 8, 16, 32, 64, 32]
    assert function.num_programs() == 1


def test_numbers_of_python_stay_numbers():
    @ts.function
    def function(x, config):
        config["rate"] = config["rate"] / 2
        config["name"] = "new"
        return x * config["rate"]

    config = {"rate": 0.5, "name": "old"}
    function(X, config)
    assert config == {"rate": 0.25, "name": "new"}
    assert isinstance(config["rate"], float)


def test_what_is_not_assigned_is_no_output():
    @ts.function
    def function(x, state):
        state["b"] = x
        return x

    graph = function.trace(X, {"a": X, "b": X}).graph
    assert [value.name for value in graph.outputs] == ["result", "state/b"]


def test_a_function_that_assigns_nothing_has_no_other_outputs():
    @ts.function
    def function(x, state):
        state = dict(state)
        state["a"] = x
        return state["a"]

    graph = function.trace(X, {"a": X}).graph
    assert [value.name for value in graph.outputs] == ["result"]


def test_a_call_that_fails_changes_nothing():
    @ts.function
    def function(x, state):
        state["a"] = x
        return x @ jnp.ones((5, 5))

    state = {"a": X}
    with pytest.raises(TypeError):
        function(X + 1, state)
    np.testing.assert_array_equal(state["a"], X)


def test_a_function_that_is_called_assigns_into_the_dicts_of_its_caller(dp_mesh):
    def inner(state):
        state["n"] = state["n"] + 1.0

    for options in ({}, {"mesh": dp_mesh}, {"in_specs": {"state": P()}}):
        called = ts.function(inner, **options)

        def outer(state, called=called):
            called(state)
            called({"n": state["n"]})
            return state["n"] * 10

        state = {"n": X}
        with dp_mesh:
            result = ts.function(outer)(state)
        np.testing.assert_array_equal(state["n"], X + 1)
        np.testing.assert_array_equal(result, (X + 1) * 10)


def test_in_a_program_that_jax_traces():
    @ts.function
    def inner(state):
        state["n"] = state["n"] + 1.0
        return state["n"]

    @jax.jit
    def outer(x):
        state = {"n": x}
        inner(state)
        return state["n"]

    np.testing.assert_array_equal(outer(X), X + 1)


def test_an_entry_keeps_its_layout(dp_mesh):
    @ts.function(mesh=dp_mesh, in_specs={"state": ts.ShardSpec((0,), ("dp",))})
    def function(x, state):
        state["m"] = state["m"] * 0.5 + x
        return x

    state = {"m": jnp.zeros(8)}
    for _ in range(2):
        function(jnp.ones(8), state)
    assert state["m"].sharding.spec == P("dp")
    assert state["m"][0] == 1.5
    assert function.num_programs() == 1


def test_donated_arguments_are_whole_afterwards():
    @ts.function(donate=["state"])
    def function(x, state):
        state["a"] = state["a"] + x
        return x

    held = {"a": jnp.ones(3), "b": jnp.ones(3), "inner": {"c": jnp.zeros(2)}}
    before = held["b"]
    function(X, held)
    assert before.is_deleted()
    np.testing.assert_array_equal(held["a"], X + 1)
    np.testing.assert_array_equal(held["b"], jnp.ones(3))
    np.testing.assert_array_equal(held["inner"]["c"], jnp.zeros(2))


def test_a_step_with_parameters():
    w = ts.dist.tensor((3,), init="ones", name="w")

    @ts.graph.training_step
    def step(batch):
        loss = jnp.sum(w * batch["x"])
        batch["metrics"]["loss"] = loss
        return ts.graph.backward(loss)

    batch = {"x": X, "metrics": {}}
    gradients = step(batch)
    assert batch["metrics"]["loss"] == 3
    np.testing.assert_array_equal(gradients["w"], X)


def test_defaults_keywords_and_positions_are_the_same():
    @ts.function
    def function(x, state, rate=0.5):
        state["x"] = x * rate

    for call in (
        lambda s: function(X, s),
        lambda s: function(state=s, x=X),
        lambda s: function(X, state=s, rate=0.5),
    ):
        state = {}
        call(state)
        np.testing.assert_array_equal(state["x"], X * 0.5)


# --- what cannot be given back


def test_a_dict_that_is_given_twice():
    @ts.function
    def function(a, b):
        a["x"] = b["x"] + 1.0

    state = {"x": X}
    with pytest.raises(WriteBackError) as caught:
        function(state, state)
    assert str(caught.value) == (
        "[T320] 'a' is assigned into, and is given to the call a second time\n"
        "  got: one dict in two places of the arguments\n"
        "  fix: pass it once, or pass a copy of it\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )
    np.testing.assert_array_equal(state["x"], X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array


def test_an_attribute_of_a_copy():
    @ts.function
    def function(state):
        state["box"].value = state["box"].value + 1.0

    with pytest.raises(WriteBackError) as caught:
        function({"box": Box(X)})
    assert str(caught.value) == (
        "[T320] 'state/box' was changed, and cannot be given back\n"
        "  got: a Box, of which the function has a copy\n"
        "  fix: return it, or assign into a dict or list argument\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T320.html"
    )
