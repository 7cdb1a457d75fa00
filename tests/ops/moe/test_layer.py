# SPDX-License-Identifier: Apache-2.0
"""A layer of experts on meshes, against the reference, gradients included."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tessera.analysis.ledger import collectives
from tessera.mesh import Mesh
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RoutingOptions
from tessera.tracing import scope
from tests.ops.moe.reference import reference

B, S, D, E, F = 8, 6, 8, 8, 12
TOP2 = RoutingOptions(top_k=2)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


X = random(B, S, D)
WEIGHTS = Weights(
    random(D, E, seed=1),
    random(E, D, F, seed=2) * 0.5,
    random(E, D, F, seed=3) * 0.5,
    random(E, F, D, seed=4) * 0.5,
)


def objective(out, statistics):
    """A number to which every output and every loss matters."""
    losses = 0.3 * statistics.load_balancing_loss + 0.2 * statistics.z_loss
    return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype="f4"))) + losses


def results(options, layout, x=X, weights=WEIGHTS):
    """Output, statistics, and the gradients of everything."""

    def loss(x, weights):
        out, statistics = expert_layer(x, weights, options, layout)
        return objective(out, statistics), (out, statistics)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, aux), gradients = jax.jit(grad)(x, weights)
    return aux, gradients


def close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def layout_of(axes, sizes, **dims):
    mesh = Mesh(axes, devices=range(int(np.prod(sizes))), shape=sizes)
    return ExpertLayout(mesh=mesh.jax, **dims)


LAYOUTS = {
    "ep": layout_of(["ep"], [4], batch=("ep",), experts=("ep",)),
    "all ep": layout_of(["ep"], [8], batch=("ep",), experts=("ep",)),
    "two levels": layout_of(
        ["outer", "inner"],
        [2, 4],
        batch=("outer", "inner"),
        experts=("outer", "inner"),
    ),
    "everything": layout_of(
        ["fsdp", "ep", "tp"],
        [2, 2, 2],
        batch=("fsdp", "ep"),
        experts=("ep",),
        hidden=("tp",),
        embed=("fsdp",),
    ),
    "split sequences": layout_of(
        ["ep", "cp"], [4, 2], batch=("ep",), sequence=("cp",), experts=("ep",)
    ),
    "no ep": layout_of(["dp", "tp"], [4, 2], batch=("dp",), hidden=("tp",)),
}


@pytest.fixture(scope="module")
def alone():
    """One device, with all experts on it."""
    return results(TOP2, ExpertLayout())


@pytest.mark.full
def test_the_layer_computes_what_the_reference_computes(alone):
    def loss(x, weights):
        out = reference(x, weights, TOP2)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype="f4"))), out

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, out), gradients = jax.jit(grad)(X, WEIGHTS)
    plain = jax.jit(jax.grad(lambda *a: loss_without_router(*a), argnums=(0, 1)))
    close(alone[0][0], out)
    close(plain(X, WEIGHTS), gradients)


def loss_without_router(x, weights):
    out, _ = expert_layer(x, weights, TOP2, ExpertLayout())
    return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype="f4")))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout, id=name, marks=() if name == "everything" else pytest.mark.full
        )
        for name, layout in LAYOUTS.items()
        if name != "ep"  # as "all ep", but for the devices
    ],
)
def test_on_a_mesh_it_computes_the_same_and_the_same_gradients(layout, alone):
    close(results(TOP2, layout), alone)


@pytest.mark.slow(reason="compiles both passes over three axes")
@pytest.mark.parametrize("name", ["one device", "everything"])
def test_on_gpus_it_computes_the_same_without_ragged_matmuls(name, alone, monkeypatch):
    layout = LAYOUTS.get(name, ExpertLayout())
    monkeypatch.setattr(scope, "device", lambda: SimpleNamespace(platform="gpu"))
    program = jax.make_jaxpr(lambda x, w: forward(x, w, layout))(X, WEIGHTS)
    assert "ragged_dot" not in str(program)
    close(results(TOP2, layout), alone)


@pytest.mark.full
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_many_rounds_lose_nothing(platform, alone, monkeypatch):
    monkeypatch.setattr(scope, "device", lambda: SimpleNamespace(platform=platform))
    options = replace(TOP2, buffer_factor=0.3)
    close(results(options, LAYOUTS["all ep"]), alone)


@pytest.mark.full
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_when_all_tokens_choose_the_same_experts_none_is_lost(platform, monkeypatch):
    monkeypatch.setattr(scope, "device", lambda: SimpleNamespace(platform=platform))
    router = np.zeros((D, E), "f4")
    router[:, 5], router[:, 2] = 1.0, 0.5
    weights = WEIGHTS._replace(router=router)
    x = np.abs(X) + 0.1
    got = results(TOP2, LAYOUTS["all ep"], x, weights)
    assert np.asarray(got[0][1].tokens_per_expert).tolist() == [
        B * S * (expert in (2, 5)) for expert in range(E)
    ]
    close(got, results(TOP2, ExpertLayout(), x, weights))
    close(got[0][0], reference(x, weights, TOP2))


BIASED = WEIGHTS._replace(
    router_bias=random(E, seed=5),
    gate_bias=random(E, F, seed=6),
    up_bias=random(E, F, seed=7),
    down_bias=random(E, D, seed=8),
)


@pytest.mark.slow(reason="compiles both passes over three axes")
@pytest.mark.parametrize(
    ("name", "platform", "factor"),
    [
        ("everything", "cpu", 2.0),
        pytest.param("everything", "gpu", 2.0, marks=pytest.mark.full),
        pytest.param("all ep", "cpu", 0.3, marks=pytest.mark.full),
        pytest.param("all ep", "gpu", 0.3, marks=pytest.mark.full),
        pytest.param("no ep", "cpu", 2.0, marks=pytest.mark.full),
    ],
)
def test_a_bias_is_added_once_to_each_row(name, platform, factor, monkeypatch):
    monkeypatch.setattr(scope, "device", lambda: SimpleNamespace(platform=platform))
    options = replace(TOP2, buffer_factor=factor, activation="clamped_swiglu")

    def loss(x, weights, layer):
        out = layer(x, weights, options)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size, dtype="f4"))), out

    def on_mesh(x, weights, options):
        return expert_layer(x, weights, options, LAYOUTS[name])[0]

    def both(layer):
        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return jax.jit(lambda x, weights: grad(x, weights, layer))(X, BIASED)

    (_, out), gradients = both(on_mesh)
    (_, wanted), wanted_gradients = both(reference)
    close(out, wanted)
    close(gradients, wanted_gradients)


@pytest.mark.full
def test_it_runs_inside_a_region_that_is_manual_over_another_axis():
    mesh = Mesh(["pp", "fsdp", "ep"], devices=range(8), shape=(2, 2, 2))
    layout = ExpertLayout(
        mesh=mesh.jax,
        batch=("fsdp", "ep"),
        experts=("ep",),
        embed=("fsdp",),
    )

    def stage(x, weights):
        out, statistics = expert_layer(x[0], weights, TOP2, layout)
        return out[None], jax.tree.map(lambda a: a[None], statistics)

    region = jax.shard_map(
        stage,
        mesh=mesh.jax,
        axis_names={"pp"},
        in_specs=(P("pp"), P()),
        out_specs=P("pp"),
        check_vma=False,
    )

    def loss(x, weights):
        out, statistics = region(x, weights)
        return sum(
            objective(out[i], jax.tree.map(lambda a, i=i: a[i], statistics))
            for i in range(2)
        )

    halves = np.stack([X, X[::-1] * 0.5])
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(halves, WEIGHTS)
    _, first = results(TOP2, ExpertLayout(), halves[0])
    _, second = results(TOP2, ExpertLayout(), halves[1])
    close(got[0], [np.stack([first[0], second[0]])])
    close(got[1], jax.tree.map(jnp.add, first[1], second[1]))


def exchanges(name, function):
    """How often each axis carries an all-to-all of activations, and may carry one."""
    layout = LAYOUTS[name]
    program = jax.jit(lambda x, w: function(x, w, layout)).lower(X, WEIGHTS).compile()
    rows = [
        row
        for row in collectives(program, Mesh.of(layout.mesh)).rows
        if row.kind == "all-to-all" and row.arrays[0].dtype == "f32"
    ]
    always = Counter(row.axes for row in rows if not row.conditional)
    return always, Counter(row.axes for row in rows if row.conditional)


def forward(x, weights, layout):
    return expert_layer(x, weights, TOP2, layout)[0]


def backward(x, weights, layout):
    loss = lambda x, w: forward(x, w, layout).sum()  # noqa: E731
    return jax.grad(loss, argnums=(0, 1))(x, weights)


def test_the_ledger_shows_rows_going_to_their_experts_and_back():
    always, further = exchanges("ep", forward)
    assert always == {("ep",): 2}
    assert further == {("ep",): 2}


@pytest.mark.full
def test_on_two_levels_each_exchange_is_one_hop_inside_and_one_across():
    always, _ = exchanges("two levels", forward)
    assert always == {("inner",): 2, ("outer",): 2}


@pytest.mark.full
def test_the_backward_pass_sends_cotangents_the_same_ways():
    always, _ = exchanges("ep", backward)
    assert always == {("ep",): 4}
