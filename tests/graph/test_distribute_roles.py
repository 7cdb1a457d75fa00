# SPDX-License-Identifier: Apache-2.0
"""What the arguments of a strategy's function are, whatever they are called."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph
from tessera.errors import SpecFormError, StrategyError, UndecidedRoleError
from tessera.mesh import Mesh

DP = Mesh(["dp"], devices=range(8))
FSDP = Mesh(["fsdp"], devices=range(8))
DRAW = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype(np.float32)


THETA = {"up": normal(16, 32), "down": normal(32, 8)}
DATA = {"x": normal(16, 16), "y": normal(16, 8)}
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def loss_of(theta: Any, data: Any) -> jax.Array:
    hidden = jnp.tanh(data["x"] @ theta["up"])
    return jnp.mean((hidden @ theta["down"] - data["y"]) ** 2)


def specs(function: Any, *arguments: Any, mesh: Mesh = FSDP) -> dict[str, P]:
    """Where the arguments of a function lie, by path."""
    with mesh:
        return {v.name: v.spec for v in function.trace(*arguments).graph.inputs}


def split(axis: str = "fsdp") -> dict[str, P]:
    return {"up": P(None, axis), "down": P(axis)}


def under(prefix: str, found: dict[str, P]) -> dict[str, P]:
    """Those inside of an argument, or a part of one."""
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in found.items() if k.startswith(start)}


# --- optimizer state


class Slots(NamedTuple):
    """A container that no library has."""

    inner: Any
    rate: Any


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "stage"),
    [
        ("fsdp", 3),
        ("zero_redundancy_optimizer", 1),
        *(
            pytest.param("zero_redundancy_optimizer", stage, marks=pytest.mark.full)
            for stage in (2, 3)
        ),
    ],
)
def test_state_of_an_optimizer_is_split_whatever_it_is_called(strategy, stage):
    """On eight devices a copy on each would be eight times the memory."""
    axis, mesh = ("fsdp", FSDP) if strategy == "fsdp" else ("dp", DP)
    options = {} if strategy == "fsdp" else {"stage": stage}

    @ts.distribute(strategy, **options)
    def step(theta, whatever, data):
        loss = loss_of(theta, data)
        slopes = ts.grad(loss, theta)
        updates, inner = ADAM.update(slopes, whatever[0].inner, theta)
        return (
            loss,
            optax.apply_updates(theta, updates),
            [Slots(inner, whatever[0].rate)],
        )

    with jax.numpy_dtype_promotion("standard"):
        state = [Slots(ADAM.init(THETA), np.float32(0.1))]
        found = specs(step, THETA, state, DATA, mesh=mesh)
        with mesh:
            _, theta, after = step(THETA, state, DATA)
            step(theta, after, DATA)
    for moment in ("mu", "nu"):
        assert under(f"whatever/0/inner/1/0/{moment}", found) == split(axis)
        held = getattr(after[0].inner[1][0], moment)["up"]
        assert held.addressable_shards[0].data.nbytes == held.nbytes // 8
    whole = {"up": P(), "down": P()}
    assert under("theta", found) == (split(axis) if stage == 3 else whole)
    assert under("data", found) == {"x": P(axis), "y": P(axis)}
    assert theta["up"].sharding.spec == found["theta/up"]
    assert step.num_programs() == 1


def test_parameters_and_their_state_may_be_one_argument():
    @ts.distribute("zero_redundancy_optimizer")
    def step(state, data):
        loss = loss_of(state["theta"], data)
        slopes = ts.grad(loss, state["theta"])
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], slopes)
        theta = jax.tree.map(lambda w, m: w - 0.1 * m, state["theta"], m)
        return loss, {"theta": theta, "m": m}

    found = specs(step, {"theta": THETA, "m": THETA}, DATA, mesh=DP)
    assert under("state/theta", found) == {"up": P(), "down": P()}
    assert under("state/m", found) == split("dp")


def test_factored_state_is_split_too():
    """As Adafactor has it: rows and columns, of no parameter's shape."""

    @ts.distribute("fsdp")
    def step(theta, rows, data):
        slopes = ts.grad(loss_of(theta, data), theta)
        return jax.tree.map(lambda r, g: 0.9 * r + jnp.abs(g).mean(1), rows, slopes)

    rows = {"up": normal(16), "down": normal(32)}
    found = specs(step, THETA, rows, DATA)
    assert under("rows", found) == {"up": P("fsdp"), "down": P("fsdp")}


def test_a_large_array_that_cannot_be_split_is_said_to_stay_whole():
    @ts.distribute("fsdp")
    def step(theta, data):
        return ts.grad(jnp.sum(data @ theta), theta)

    with FSDP, pytest.warns(ts.TesseraWarning) as caught:
        step.trace(np.ones((513, 513), np.float32), np.ones((8, 513), np.float32))
    assert str(caught[0].message) == (
        "strategy 'fsdp' leaves 'theta' of shape (513, 513) whole on each device, "
        "1.00 MiB: 8 devices along 'fsdp' divide none of its dims"
    )


# --- data


def test_weights_that_are_as_large_as_the_batch_are_no_batch():
    """The names and the sizes say the opposite of what the step does."""

    @ts.distribute("data_parallel")
    def step(batch, weights):
        return ts.grad(jnp.mean((weights @ batch) ** 2), batch)

    found = specs(step, normal(16, 16), normal(16, 16), mesh=DP)
    assert found == {"batch": P(), "weights": P("dp")}


def test_data_in_several_arguments_has_to_be_named():
    def step(theta, x, y):
        loss = loss_of(theta, {"x": x, "y": y})
        return ts.grad(loss, theta)

    with pytest.raises(UndecidedRoleError) as caught:
        specs(ts.distribute("fsdp")(step), THETA, DATA["x"], DATA["y"])
    assert str(caught.value) == (
        "[T324] strategy 'fsdp' cannot tell what the arguments 'x', 'y' of 'step' are\n"
        "  got: x, y: a loss reads them, and no gradient is taken by them\n"
        "  fix: say it: ts.distribute('fsdp', batch=['x', 'y'])\n"
        "  fix: and likewise params=, gradients=, optimizer_state=\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T324.html"
    )
    named = ts.distribute("fsdp", batch=["x", "y"])(step)
    found = specs(named, THETA, DATA["x"], DATA["y"])
    assert found["x"] == found["y"] == P("fsdp")


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp"])
def test_arguments_of_unknown_roles_are_not_all_said_to_have_one(strategy):
    """Weights and data: neither ``params=['w', 'x']`` nor ``batch=['w', 'x']`` is."""
    forward = ts.distribute(strategy)(lambda w, x: x @ w)
    with pytest.raises(UndecidedRoleError) as caught:
        forward.trace(normal(16, 8), normal(16, 16))
    assert "say which of 'w', 'x' are what: " in caught.value.fix
    assert f"ts.distribute('{strategy}', params=[…], batch=[…])" in caught.value.fix
    assert "and likewise gradients=, optimizer_state=" in caught.value.fix


def test_frozen_weights_beside_a_batch_are_split_like_parameters():
    def step(theta, base, data):
        both = jax.tree.map(jnp.add, theta, base)
        return ts.grad(loss_of(both, data), theta)

    with pytest.raises(UndecidedRoleError, match="'base', 'data'"):
        specs(ts.distribute("fsdp")(step), THETA, THETA, DATA)
    found = specs(ts.distribute("fsdp", batch="data")(step), THETA, THETA, DATA)
    assert under("base", found) == under("theta", found) == split()


def test_data_and_weights_in_one_dict_are_told_apart_by_path():
    def step(all_of_it):
        loss = loss_of(all_of_it["theta"], all_of_it)
        return ts.grad(loss, all_of_it["theta"])

    given = {"theta": THETA, **DATA}
    with pytest.raises(UndecidedRoleError, match="all_of_it/x, all_of_it/y"):
        specs(ts.distribute("fsdp")(step), given)
    named = ts.distribute("fsdp", batch=["all_of_it/x", "all_of_it/y"])(step)
    found = specs(named, given)
    assert under("all_of_it/theta", found) == split()
    assert found["all_of_it/x"] == P("fsdp")


def test_a_gradient_in_a_loop_shows_the_parameters():
    @ts.distribute("fsdp")
    def step(theta, momentum, data):
        def one(part):
            loss = loss_of(theta, part)
            return loss, ts.grad(loss, theta)

        _, slopes = ts.accumulate_gradients(one, data, microbatches=2)
        return jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, slopes)

    found = specs(step, THETA, THETA, DATA)
    assert under("theta", found) == under("momentum", found) == split()
    assert found["data/x"] == P("fsdp")


def test_value_and_grad_shows_the_parameters():
    @ts.distribute("fsdp")
    def step(theta, data):
        return ts.value_and_grad(loss_of)(theta, data)

    with FSDP:
        loss, slopes = step(THETA, DATA)
    want, expected = jax.value_and_grad(loss_of)(THETA, DATA)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(slopes["up"], expected["up"], rtol=1e-4, atol=1e-6)


def test_a_gradient_that_only_jax_knows_of_shows_nothing():
    def step(theta, data):
        return jax.grad(loss_of)(theta, data)

    for strategy in ("data_parallel", "fsdp"):
        with pytest.raises(UndecidedRoleError, match=r"ts\.grad"):
            specs(ts.distribute(strategy, mesh_axes=["fsdp"])(step), THETA, DATA)
    found = specs(ts.distribute("fsdp", batch="data")(step), THETA, DATA)
    assert under("theta", found) == split()


def test_evaluation_has_to_name_its_batch():
    with pytest.raises(UndecidedRoleError, match="'data', 'theta' of 'loss_of'"):
        specs(ts.distribute("data_parallel")(loss_of), THETA, DATA, mesh=DP)
    named = ts.distribute("data_parallel", batch="data")(loss_of)
    found = specs(named, THETA, DATA, mesh=DP)
    assert found["theta/up"] == P()
    assert found["data/x"] == P("dp")


# --- updates


def test_an_update_replaces_its_parameters():
    @ts.distribute("zero_redundancy_optimizer")
    def update(a, b, c):
        return jax.tree.map(lambda a, b, c: b - a / (jnp.sqrt(c) + 1.0), a, b, c)

    found = specs(update, THETA, THETA, THETA, mesh=DP)
    assert under("b", found) == {"up": P(), "down": P()}
    assert under("a", found) == under("c", found) == split("dp")


def test_an_update_that_replaces_nothing_visibly_has_to_be_told():
    def update(a, b):
        return jax.tree.map(lambda a, b: jnp.sign(a) * b, a, b)

    strategy = "zero_redundancy_optimizer"
    with pytest.raises(UndecidedRoleError, match="which of 'a', 'b' are what"):
        specs(ts.distribute(strategy)(update), THETA, THETA, mesh=DP)
    found = specs(ts.distribute(strategy, params="a")(update), THETA, THETA, mesh=DP)
    assert under("a", found) == {"up": P(), "down": P()}
    assert under("b", found) == split("dp")


def test_stage_one_has_to_be_told_gradients_from_state():
    def update(w, g):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g)

    def made(**said: Any) -> Any:
        return ts.distribute("zero_redundancy_optimizer", stage=1, **said)(update)

    with pytest.raises(UndecidedRoleError, match="stage 1 splits optimizer state"):
        specs(made(), THETA, THETA, mesh=DP)
    found = specs(made(gradients="g"), THETA, THETA, mesh=DP)
    assert set(found.values()) == {P()}


def test_a_role_is_said_of_what_the_arguments_have():
    with pytest.raises(StrategyError, match="is given no array 'data/z'"):
        specs(ts.distribute("fsdp", batch="data/z")(loss_of), THETA, DATA)


SGD = optax.sgd(0.1)


@pytest.mark.parametrize("entry", [None, (), {}, "text"], ids=repr)
@pytest.mark.parametrize("strategy", ["fsdp", "zero_redundancy_optimizer"])
def test_what_a_role_is_declared_for_may_hold_no_arrays(strategy, entry):
    """The state of SGD, and entries of a batch that a model has no use for."""

    def update(theta, state, data):
        loss, slopes = jax.value_and_grad(loss_of)(theta, data)
        updates, state = SGD.update(slopes, state, theta)
        return loss, optax.apply_updates(theta, updates), state

    @ts.distribute(
        strategy,
        params="theta",
        optimizer_state="state",
        batch=["data/x", "data/y", "data/mask"],
    )
    def step(theta, state, data):
        loss = loss_of(theta, data)
        updates, state = SGD.update(ts.grad(loss, theta), state, theta)
        return loss, optax.apply_updates(theta, updates), state

    state, data = SGD.init(THETA), {**DATA, "mask": entry}
    with jax.numpy_dtype_promotion("standard"), FSDP if strategy == "fsdp" else DP:
        found = step(THETA, state, data)
        expected = update(THETA, state, DATA)
    assert found[2] == state
    assert len(found[1]["up"].sharding.device_set) == 8
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# --- training steps


def test_weights_of_a_training_step_are_not_split_like_a_batch():
    """Five of them are no batch for eight devices."""

    @graph.training_step(mesh=DP)
    def step(w, x):
        return ts.grad(jnp.mean((x @ w) ** 2), w)

    w, x = normal(5), normal(16, 5)
    assert specs(step, w, x, mesh=DP) == {"w": P(), "x": P("dp")}
    want = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    np.testing.assert_allclose(step(w, x), want, rtol=1e-5)


def test_a_training_step_may_say_which_arguments_are_batches():
    @graph.training_step(mesh=DP, batch=["data/x", "data/y"])
    def step(data, table):
        return (data["x"] @ table).sum() + data["y"].sum()

    found = specs(step, DATA, normal(16, 5), mesh=DP)
    assert found == {"data/x": P("dp"), "data/y": P("dp"), "table": P()}
    with pytest.raises(SpecFormError, match="no argument 'dta' to treat as a batch"):
        graph.training_step(batch="dta")(lambda data: data)
