# SPDX-License-Identifier: Apache-2.0
"""Strategies for a user's own step: its layouts, its numbers, its mistakes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist
from tessera.errors import (
    LayoutMismatchError,
    ShardDivisibilityError,
    SpecFormError,
    StrategyError,
    UndecidedRoleError,
    UnknownAxisError,
)
from tessera.mesh import Mesh
from tessera.tracing import scope

DP = Mesh(["dp"], devices=range(8))
FSDP = Mesh(["fsdp"], devices=range(8))
GRID = Mesh(["dp", "tp"], devices=range(8), shape=(4, 2))

DRAW = np.random.default_rng(0)
WEIGHTS = {
    "bias": DRAW.normal(size=(3,)).astype(np.float32),
    "down": DRAW.normal(size=(32, 3)).astype(np.float32),
    "up": DRAW.normal(size=(16, 32)).astype(np.float32),
}
BATCH = {
    "x": DRAW.normal(size=(16, 16)).astype(np.float32),
    "y": DRAW.normal(size=(16, 3)).astype(np.float32),
}


def zeros() -> dict[str, Any]:
    return {
        "m": jax.tree.map(np.zeros_like, WEIGHTS),
        "v": jax.tree.map(np.zeros_like, WEIGHTS),
        "count": np.zeros((), np.float32),
    }


def loss_of(weights: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ weights["up"])
    return jnp.mean((hidden @ weights["down"] + weights["bias"] - batch["y"]) ** 2)


def adam(weights: Any, gradients: Any, state: Any) -> Any:
    count = state["count"] + 1.0
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradients)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], gradients)
    new = jax.tree.map(
        lambda w, m, v: w - 0.1 * m / (jnp.sqrt(v) + 1e-2), weights, m, v
    )
    return new, {"m": m, "v": v, "count": count}


def step(weights: Any, optimizer_state: Any, batch: Any) -> Any:
    loss = loss_of(weights, batch)
    gradients = ts.grad(loss, weights)
    return loss, *adam(weights, gradients, optimizer_state)


def expected(steps: int = 3) -> tuple[float, Any]:
    weights, state, loss = WEIGHTS, zeros(), None
    for _ in range(steps):
        loss, gradients = jax.value_and_grad(loss_of)(weights, BATCH)
        weights, state = adam(weights, gradients, state)
    return float(loss), weights


def run(mesh: Mesh | None, strategy: str, steps: int = 3, **options: Any) -> Any:
    function = ts.function(mesh=mesh)(ts.distribute(strategy, **options)(step))
    weights, state, loss = WEIGHTS, zeros(), None
    for _ in range(steps):
        loss, weights, state = function(weights, state, BATCH)
    return function, float(loss), weights, state


CASES = [
    (DP, "data_parallel", {}),
    (FSDP, "fsdp", {}),
    (DP, "zero_redundancy_optimizer", {"stage": 2}),
    *(
        pytest.param(DP, strategy, options, marks=pytest.mark.full)
        for strategy, options in (
            ("fsdp", {"mesh_axes": ["dp"]}),
            ("zero_redundancy_optimizer", {"stage": 1}),
            ("zero_redundancy_optimizer", {"stage": 3}),
        )
    ),
]


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize(("mesh", "strategy", "options"), CASES)
def test_a_step_gives_the_numbers_of_one_device(mesh, strategy, options):
    _, loss, weights, _ = run(mesh, strategy, **options)
    want, params = expected()
    np.testing.assert_allclose(loss, want, rtol=2e-6)
    for name, value in params.items():
        np.testing.assert_allclose(weights[name], value, rtol=2e-5, atol=1e-6)


# --- layouts

WHOLE = {"bias": P(), "down": P(), "up": P()}


def split(axis: str) -> dict[str, P]:
    """Over eight devices; three numbers cannot be."""
    return {"bias": P(), "down": P(axis), "up": P(None, axis)}


@pytest.mark.parametrize(
    ("mesh", "strategy", "options", "weights", "moments"),
    [
        (DP, "data_parallel", {}, WHOLE, WHOLE),
        (FSDP, "fsdp", {}, split("fsdp"), split("fsdp")),
        (DP, "zero_redundancy_optimizer", {"stage": 1}, WHOLE, split("dp")),
        (DP, "zero_redundancy_optimizer", {}, WHOLE, split("dp")),
        (DP, "zero_redundancy_optimizer", {"stage": 3}, split("dp"), split("dp")),
    ],
)
def test_each_stage_splits_what_it_says(mesh, strategy, options, weights, moments):
    function, _, params, state = run(mesh, strategy, steps=2, **options)
    specs = {name: array.sharding.spec for name, array in params.items()}
    assert specs == weights
    assert {name: m.sharding.spec for name, m in state["m"].items()} == moments
    assert {name: v.sharding.spec for name, v in state["v"].items()} == moments
    # The results are laid out like the arguments that the next call takes.
    assert function.num_programs() == 1
    inputs = {v.name: v.spec for v in function.last.traced.graph.inputs}
    axis = mesh.axes[0]
    assert inputs["batch/x"] == P(axis)
    assert inputs["weights/up"] == weights["up"]
    assert dist.inspect(state["v"]).local_nbytes == sum(
        array.nbytes // (8 if moments[name] != P() else 1)
        for name, array in WEIGHTS.items()
    )


@pytest.mark.parametrize(("stage", "expected"), [(1, P()), (2, P(None, "dp"))])
def test_gradients_are_split_from_the_second_stage_on(stage, expected):
    seen = []

    @ts.distribute("zero_redundancy_optimizer", stage=stage)
    def step(weights, batch):
        gradients = ts.grad(loss_of(weights, batch), weights)
        seen.append(scope.layout_of(gradients["up"])[1])
        return gradients

    with DP:
        step.trace(WEIGHTS, BATCH)
    assert seen[-1] == expected


def test_what_another_axis_splits_stays_split():
    place = NamedSharding(GRID.jax, P(None, "tp"))
    weights = {
        **jax.device_put(WEIGHTS, NamedSharding(GRID.jax, P())),
        "up": jax.device_put(WEIGHTS["up"], place),
    }
    function = ts.distribute("zero_redundancy_optimizer", stage=1)(step)
    _, new, state = function(weights, zeros(), BATCH)
    assert new["up"].sharding.spec == P(None, "tp")
    np.testing.assert_allclose(new["up"], expected(1)[1]["up"], rtol=2e-5, atol=1e-6)
    inputs = {v.name: v.spec for v in function.last.traced.graph.inputs}
    assert inputs["batch/x"] == P("dp")
    assert state["m"]["up"].sharding.spec == P(None, "dp")


def test_an_update_by_itself_takes_gradients_as_an_argument():
    @ts.function(mesh=DP)
    @ts.distribute("zero_redundancy_optimizer", stage=2)
    def update(weights, gradients, optimizer_state):
        return adam(weights, gradients, optimizer_state)

    traced = update.trace(WEIGHTS, WEIGHTS, zeros())
    layouts = {value.name: value.spec for value in traced.graph.inputs}
    assert layouts["weights/up"] == P()
    assert layouts["gradients/up"] == P(None, "dp")
    assert layouts["optimizer_state/v/up"] == P(None, "dp")
    outputs = {value.name: value.spec for value in traced.graph.outputs}
    assert outputs["result/0/up"] == P()
    assert outputs["result/1/m/up"] == P(None, "dp")


def specs_of_results(update: Any, **more: Any) -> list[Any]:
    """Where the results of an update of weights and momentum lie, in stage 1."""
    options = {"stage": 1, "params": "weights", "optimizer_state": "momentum"}
    strategy = ts.distribute("zero_redundancy_optimizer", **options)
    with DP:
        graph = ts.function(**more)(strategy(update)).trace(WEIGHTS, WEIGHTS).graph
    return [v.spec for v in graph.outputs if v.name.endswith("up")]


def test_a_result_is_laid_out_like_the_argument_that_it_is_a_new_value_of():
    def update(weights, momentum):
        momentum = jax.tree.map(lambda m: 0.9 * m, momentum)
        return momentum, jax.tree.map(lambda w, m: w - m, weights, momentum)

    assert specs_of_results(update) == [P(None, "dp"), P()]


def test_results_have_to_be_named_where_nothing_shows_what_they_replace():
    def update(weights, momentum):
        return jax.tree.map(jnp.sin, (momentum, weights))

    text = message(UndecidedRoleError, lambda: specs_of_results(update))
    assert text == (
        "[T324] it is not decided which part of the arguments 'result/0/bias' and what "
        "is beside it replace\n"
        "  got: weights/bias, momentum/bias and what is beside them are like it, and "
        "lie differently\n"
        "  fix: declare the layouts of all results: ts.function(out_specs=...)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T324.html"
    )
    layouts = ({"up": P(None, "dp"), "bias": P(), "down": P("dp")}, P())
    assert specs_of_results(update, out_specs=layouts) == [P(None, "dp"), P()]


def test_without_a_mesh_it_takes_every_device():
    function = ts.distribute(strategy="data_parallel")(step)
    _, weights, _ = ts.jit(function)(WEIGHTS, zeros(), BATCH)
    assert weights["up"].sharding.mesh.shape == {"dp": jax.device_count()}


def test_the_options_of_a_function_inside_are_kept():
    inner = ts.function(donate=("optimizer_state",))(step)
    function = ts.distribute("data_parallel")(inner)
    assert function.options.donate == {"optimizer_state"}
    assert ts.jit(function).options.strategy == function.options.strategy


def test_a_result_that_is_the_parameters_is_laid_out_like_them():
    @ts.distribute("zero_redundancy_optimizer")
    def update(weights, gradients, optimizer_state):
        return jax.tree.map(
            lambda w, g, s: w - g * s, weights, gradients, optimizer_state
        )

    with DP:
        new = update(WEIGHTS, WEIGHTS, WEIGHTS)
        again = update(new, WEIGHTS, WEIGHTS)
    assert {array.sharding.spec for array in jax.tree.leaves((new, again))} == {P()}


# --- experts

EP = Mesh(["ep"], devices=range(4))
MIXTURE = {
    "router": DRAW.normal(size=(16, 8)).astype(np.float32),
    "experts": {
        "up": DRAW.normal(size=(8, 16, 4)).astype(np.float32),
        "down": DRAW.normal(size=(8, 4, 3)).astype(np.float32),
    },
}


EXPERTS = "weights/experts"


def mixture_step(weights: Any, batch: Any) -> Any:
    gates = jax.nn.softmax(batch["x"] @ weights["router"])
    hidden = jnp.tanh(jnp.einsum("bd,edf->bef", batch["x"], weights["experts"]["up"]))
    out = jnp.einsum("bef,efd,be->bd", hidden, weights["experts"]["down"], gates)
    loss = jnp.mean((out - batch["y"]) ** 2)
    gradients = ts.grad(loss, weights)
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def test_experts_are_split_and_give_the_numbers_of_one_device():
    function = ts.distribute("expert_parallel", experts=EXPERTS)(mixture_step)
    with EP:
        loss, weights = function(MIXTURE, BATCH)
        function(weights, BATCH)
    alone = ts.function(mixture_step)(MIXTURE, BATCH)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        (loss, weights),
        alone,
    )
    inputs = {v.name: v.spec for v in function.last.traced.graph.inputs}
    assert inputs == {
        "weights/experts/down": P("ep"),
        "weights/experts/up": P("ep"),
        "weights/router": P(),
        "batch/x": P("ep"),
        "batch/y": P("ep"),
    }
    assert weights["experts"]["up"].sharding.spec == P("ep")
    assert weights["router"].sharding.spec == P()


def test_experts_may_be_split_over_two_axes():
    mesh = Mesh(["ep_outer", "ep"], devices=range(8), shape=(2, 4))
    with mesh:
        axes = ["ep_outer", "ep"]
        strategy = ts.distribute("expert_parallel", experts=EXPERTS, mesh_axes=axes)
        inputs = strategy(mixture_step).trace(MIXTURE, BATCH).graph.inputs
    specs = {v.name: v.spec for v in inputs}
    assert specs["weights/experts/up"] == P(("ep_outer", "ep"))
    assert specs["batch/x"] == P(("ep_outer", "ep"))


# --- mistakes


def test_moments_of_experts_are_split_like_the_experts():
    def step(weights, moments, batch):
        gradients = jax.tree.map(
            jnp.zeros_like, mixture_step(weights, batch)[1]["experts"]
        )
        return jax.tree.map(lambda m, g: 0.9 * m + g, moments["experts"], gradients)

    with EP:
        function = ts.distribute("expert_parallel", experts=EXPERTS)(step)
        inputs = function.trace(MIXTURE, MIXTURE, BATCH).graph.inputs
    specs = {v.name: v.spec for v in inputs}
    assert specs["moments/experts/up"] == P("ep")
    assert specs["moments/router"] == P()


def test_experts_have_to_be_named():
    text = message(StrategyError, lambda: ts.distribute("expert_parallel"))
    assert text == (
        "[T313] strategy 'expert_parallel' has to know which parameters are experts\n"
        "  got: experts=None\n"
        "  fix: say experts='weights/experts', whose arrays are [experts, in, out]\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
    )
    text = message(StrategyError, lambda: ts.distribute("fsdp", experts="experts"))
    assert "strategy 'fsdp' splits no experts" in text
    with EP:
        function = ts.distribute("expert_parallel", experts=EXPERTS)(step)
        text = message(StrategyError, lambda: function(WEIGHTS, zeros(), BATCH))
    assert "strategy 'expert_parallel' finds no experts 'weights/experts'" in text
    six = {name: array[:6] for name, array in MIXTURE["experts"].items()}
    odd = {"router": MIXTURE["router"][:, :6], "experts": six}
    with EP:
        function = ts.distribute("expert_parallel", experts=EXPERTS)(mixture_step)
        text = message(ShardDivisibilityError, lambda: function(odd, BATCH))
    assert "'weights/experts/down' cannot be split evenly over mesh axes" in text


def message(kind: type[Exception], action: Any) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def test_an_argument_that_is_named_has_to_exist():
    strategy = ts.distribute("fsdp", params="wieghts")
    assert message(StrategyError, lambda: strategy(step)) == (
        "[T313] 'step' has no argument 'wieghts'\n"
        "  got: params='wieghts'\n"
        "  fix: did you mean 'weights'? Known: 'weights', 'optimizer_state', 'batch'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T313.html"
    )


def test_a_mesh_without_the_axis_is_refused():
    with DP:
        function = ts.distribute("fsdp")(step)
        text = message(UnknownAxisError, lambda: function(WEIGHTS, zeros(), BATCH))
    assert text == (
        "[T103] strategy 'fsdp' is for an axis 'fsdp', which the mesh lacks\n"
        "  got: dp mesh, 8\n"
        "  fix: name one of the mesh's: mesh_axes=['dp']\n"
        "  fix: did you mean 'dp'? Known: 'dp'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T103.html"
    )


def test_a_batch_that_the_axis_does_not_divide_is_refused():
    odd = {name: array[:10] for name, array in BATCH.items()}
    with DP:
        function = ts.distribute("data_parallel")(step)
        text = message(ShardDivisibilityError, lambda: function(WEIGHTS, zeros(), odd))
    assert "'batch/x' cannot be split evenly over mesh axes ('dp',)" in text


def test_arrays_that_live_elsewhere_are_not_moved_silently():
    place = NamedSharding(DP.jax, P())
    state = jax.device_put(zeros(), place)
    with DP:
        function = ts.distribute("zero_redundancy_optimizer", stage=1)(step)
        text = message(LayoutMismatchError, lambda: function(WEIGHTS, state, BATCH))
    assert "optimizer_state/m/up: declared P(None, 'dp'), given P()" in text


def test_a_step_with_parameters_of_its_own_is_refused():
    @ts.graph.training_step
    def own(batch):
        return batch

    assert "whose operations declare them" in message(
        StrategyError, lambda: ts.distribute("data_parallel")(own)
    )


def test_in_specs_hold_against_a_strategy():
    function = ts.function(in_specs={"batch": P()}, mesh=DP)(
        ts.distribute("data_parallel")(step)
    )
    inputs = function.trace(WEIGHTS, zeros(), BATCH).graph.inputs
    assert {v.spec for v in inputs if v.name.startswith("batch")} == {P()}
    with pytest.raises(SpecFormError):
        ts.function(in_specs={"bach": P()})(function)
