# SPDX-License-Identifier: Apache-2.0
"""Gradients on several devices: in pipelines' stages and in manual regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph
from tessera.errors import (
    OutsideTraceError,
)
from tessera.shard import tensor
from tests.graph.passes.gradient_programs import (
    W,
    X,
    assert_same,
    loss_of,
)

# --- in the stages of a pipeline


def test_in_a_stage_of_a_pipeline():
    tables = [tensor((2, 2), init="ones", name=name) for name in "ab"]

    def stage_of(table):
        @graph.stage(table.name)
        def stage(x):
            hidden = jnp.tanh(x @ jnp.asarray(table))
            return hidden + 0.1 * ts.grad(jnp.sum(hidden**3), hidden)

        return stage

    first, second = map(stage_of, tables)

    def chain(x):
        return second(first(x))

    def trained(function, mesh):
        @graph.training_step(mesh=mesh)
        def step(x):
            loss = jnp.mean(function(x) ** 2)
            return loss, graph.backward(loss)

        return step(X)

    mesh = dist.Mesh(["pp"], devices=range(2))
    piped = graph.pipeline([first, second], mesh=mesh, microbatches=2)(chain)
    for a, b in zip(
        jax.tree.leaves(trained(piped, mesh)),
        jax.tree.leaves(trained(chain, None)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_stage_cannot_differentiate_by_what_another_one_computed():
    @graph.stage("one")
    def one(x):
        return jnp.tanh(x)

    @graph.stage("two")
    def two(hidden, x):
        return hidden + ts.grad(jnp.sum(hidden**2), x)

    mesh = dist.Mesh(["pp"], devices=range(2))
    piped = graph.pipeline([one, two], mesh=mesh, microbatches=2)(
        lambda x: two(one(x), x)
    )
    step = ts.function(mesh=mesh)(lambda x: ts.grad(jnp.mean(piped(x)), x))
    with pytest.raises(OutsideTraceError, match="past the end of a pipeline's stage"):
        step(X)


# --- in a manual region, every type checked


def in_region(body, mesh, *out_specs):
    return jax.shard_map(
        body, mesh=mesh.jax, in_specs=(P(), P("dp")), out_specs=out_specs or P()
    )


@pytest.mark.parametrize("summed", [True, False])
def test_inside_a_manual_region(summed, dp_mesh):
    def local_loss(w, x):
        loss = loss_of(w, x)
        return lax.psum(loss, "dp") if summed else loss

    def step(w, x):
        return in_region(lambda w, x: ts.grad(local_loss(w, x), w), dp_mesh)(w, x)

    def reference(w, x):
        return in_region(jax.grad(local_loss), dp_mesh)(w, x)

    assert_same(step, reference, W, X)


def test_inside_a_manual_region_by_what_differs_from_device_to_device(dp_mesh):
    def step(w, x):
        def body(w, x):
            hidden = x @ w
            loss = lax.psum(jnp.sum(jnp.tanh(hidden) ** 2), "dp")
            found = ts.grad(loss, {"w": w, "x": x, "hidden": hidden})
            return found["w"], found["x"], found["hidden"]

        return in_region(body, dp_mesh, P(), P("dp"), P("dp"))(w, x)

    def reference(w, x):
        by_w, by_x = jax.grad(loss_of, argnums=(0, 1))(w, x)
        hidden = jax.grad(lambda h: jnp.sum(jnp.tanh(h) ** 2))(x @ w)
        return by_w, by_x, hidden

    found = ts.function(step)(W, X)
    for a, b in zip(found, reference(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_inside_a_scan_inside_a_manual_region(dp_mesh):
    def step(w, x):
        def body(w, x):
            def descend(w, _):
                loss = lax.psum(loss_of(w, x), "dp")
                return w - 0.1 * ts.grad(loss, w), loss

            return lax.scan(descend, w, None, length=3)

        return in_region(body, dp_mesh)(w, x)

    def reference(w, x):
        def descend(w, _):
            loss, slope = jax.value_and_grad(loss_of)(w, x)
            return w - 0.1 * slope, loss

        return lax.scan(descend, w, None, length=3)

    assert_same(step, reference, W, X)


def test_through_a_manual_region(dp_mesh):
    def step(w, x):
        total = in_region(lambda w, x: lax.psum(loss_of(w, x), "dp"), dp_mesh)
        return ts.grad(total(w, x), w)

    found = ts.function(step)(W, X)
    np.testing.assert_allclose(found, jax.grad(loss_of)(W, X), rtol=1e-5, atol=1e-6)


def test_by_a_parameter_inside_a_manual_region(dp_mesh):
    table = tensor((2, 3), init="ones", name="table", mesh=dp_mesh)

    @graph.training_step(mesh=dp_mesh)
    def step(x):
        def body(x):
            return graph.backward(lax.psum(loss_of(jnp.asarray(table), x), "dp"))

        return jax.shard_map(body, mesh=dp_mesh.jax, in_specs=P("dp"), out_specs=P())(x)

    np.testing.assert_allclose(
        step(X)["table"], jax.grad(loss_of)(jnp.ones((2, 3)), X), rtol=1e-5, atol=1e-6
    )
