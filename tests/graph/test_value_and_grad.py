# SPDX-License-Identifier: Apache-2.0
"""ts.value_and_grad: what jax.value_and_grad gives, in steps and outside of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph
from tessera.errors import ArgumentError, LossFormError, UnconnectedGradientError

W = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
X = jnp.linspace(-1.0, 2.0, 16, dtype=jnp.float32).reshape(8, 2)
TWO = jnp.stack([X, 2.0 * X])


def loss_of(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def assert_alike(found, expected, rtol=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5),
        found,
        expected,
    )


def both(step, *args, **tolerance):
    """A step with ts.value_and_grad, in a ts.function, against the same in JAX."""
    found = ts.function(lambda *args: step(ts.value_and_grad, *args))(*args)
    assert_alike(found, step(jax.value_and_grad, *args), **tolerance)


# --- what it gives


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1,), [1, 0]])
def test_arguments_by_position(argnums):
    expected = jax.value_and_grad(loss_of, argnums)(W, X)
    assert_alike(ts.value_and_grad(loss_of, argnums)(W, X), expected)
    both(lambda transform, w, x: transform(loss_of, argnums)(w, x), W, X)


def test_arguments_by_name():
    expected = jax.value_and_grad(loss_of, (1, 0))(W, X)
    slopes = ts.value_and_grad(loss_of, ("x", "w"))
    assert_alike(slopes(W, X), expected)
    assert_alike(slopes(W, x=X), expected)
    assert_alike(ts.value_and_grad(loss_of, (1, 0))(x=X, w=W), expected)


def test_a_tree_with_numbers():
    def loss(tree, power):
        return jnp.sum((tree["a"][0] * tree["b"]) ** power)

    found = ts.value_and_grad(loss)({"a": (X, None), "b": 2.0}, 2)
    assert_alike(found, jax.value_and_grad(loss)({"a": (X, None), "b": 2.0}, 2))


def test_what_else_the_function_returns():
    def loss(w, x):
        hidden = x @ w
        return jnp.sum(hidden**2), {"hidden": hidden, "name": "tanh", "none": None}

    for function in (loss, ts.function(loss)):
        (value, aux), slope = ts.value_and_grad(function, has_aux=True)(W, X)
        assert aux["name"] == "tanh"
        assert aux["none"] is None
        np.testing.assert_allclose(aux["hidden"], X @ W, rtol=1e-6)
        np.testing.assert_allclose(value, jnp.sum((X @ W) ** 2), rtol=1e-6)
        np.testing.assert_allclose(slope, 2 * X.T @ (X @ W), rtol=1e-5)


def test_what_is_closed_over_is_held_constant():
    def step(transform, w, x):
        target = jnp.tanh(x @ w)  # from the same weights, and no part of the loss
        return transform(lambda w: jnp.sum((x @ w - target) ** 2))(w)

    both(step, W, X)


def test_a_step_has_the_matmuls_of_plain_jax():
    def step(transform, w, x):
        return transform(loss_of)(w, x)

    def matmuls(function):
        text = jax.jit(function).lower(W, X).as_text()
        return text.count("dot_general")

    own = ts.function(lambda w, x: step(ts.value_and_grad, w, x))
    plain = matmuls(lambda w, x: step(jax.value_and_grad, w, x))
    assert own.lower(W, X).as_text().count("dot_general") == plain


def test_a_gradient_has_the_layout_of_its_weight(dp_mesh):
    weight = jax.device_put(jnp.ones(8), NamedSharding(dp_mesh.jax, P("dp")))
    slope = ts.value_and_grad(lambda w: jnp.sum(w**3))
    assert slope(weight)[1].sharding.spec == P("dp")
    step = ts.function(lambda w: slope(w)[1])
    assert step(weight).sharding.spec == P("dp")


# --- where it may stand


def test_inside_itself_and_jax_grad():
    def step(transform, w, x):
        def steepness(w):
            return jnp.sum(transform(loss_of)(w, x)[1] ** 2)

        return transform(steepness)(w), jax.grad(steepness)(w)

    both(step, W, X, rtol=1e-4)


def test_for_each_example():
    both(
        lambda transform, w, xs: jax.vmap(lambda x: transform(loss_of)(w, x))(xs),
        W,
        TWO,
    )


def test_in_loops_and_branches_for_each_example():
    def step(transform, w, xs):
        def descend(x):
            def body(w, _):
                return w - 0.1 * transform(loss_of)(w, x)[1], None

            w_new, _ = lax.scan(body, w, None, length=2)
            return lax.cond(x[0, 0] < -1.5, lambda: w_new, lambda: w)

        return jax.vmap(descend)(xs)

    both(step, W, TWO)


def test_outside_of_a_step_inside_a_transformation():
    slopes = jax.vmap(lambda x: ts.value_and_grad(loss_of)(W, x)[1])(TWO)
    expected = jax.vmap(lambda x: jax.grad(loss_of)(W, x))(TWO)
    np.testing.assert_allclose(slopes, expected, rtol=1e-5)


@pytest.mark.full
def test_in_a_manual_region(dp_mesh):
    def step(transform, w, x):
        return jax.shard_map(
            transform(lambda w, x: lax.psum(loss_of(w, x), "dp")),
            mesh=dp_mesh.jax,
            in_specs=(P(), P("dp")),
            out_specs=P(),
        )(w, x)

    both(step, W, X)


def test_of_parameters_that_operations_declare():
    table = dist.tensor((2, 3), init="ones", name="table")

    @graph.training_step
    def step(x):
        scale = jnp.ones(())
        loss, slope = ts.value_and_grad(lambda s: s * loss_of(jnp.asarray(table), x))(
            scale
        )
        return loss, slope

    loss, slope = step(X)
    np.testing.assert_allclose([loss, slope], [loss_of(jnp.ones((2, 3)), X)] * 2)


def test_of_a_pipeline():
    mesh = dist.Mesh(["pp"], devices=range(2))
    one = graph.stage("one")(lambda x: jnp.tanh(x))
    two = graph.stage("two")(lambda x: x * 2.0)

    def chain(x):
        return two(one(x))

    piped = graph.pipeline([one, two], mesh=mesh, microbatches=2)(chain)

    def step(function):
        # Eight rows of weights, as many as the batch has, are no rows of it.
        return ts.function(mesh=mesh)(
            lambda w, x: ts.value_and_grad(
                lambda w: jnp.mean(function(x) ** 2) * jnp.sum(w**2)
            )(w)
        )

    assert_alike(step(piped)(X + 1.0, X), step(chain)(X + 1.0, X))


# --- mistakes


def message_of(kind, function, *args):
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


def test_a_loss_that_ignores_a_weight_names_it():
    def loss(weights, x):
        return jnp.sum(weights["up"] * x)

    weights = {"up": X, "down": X}
    text = message_of(UnconnectedGradientError, ts.value_and_grad(loss), weights, X)
    assert "the loss does not depend on 'down'" in text
    found = ts.value_and_grad(loss, allow_unused=True)(weights, X)
    np.testing.assert_array_equal(found[1]["down"], jnp.zeros_like(X))


def test_there_has_to_be_such_an_argument():
    assert message_of(ArgumentError, ts.value_and_grad(loss_of, "weights"), W, X) == (
        "[T301] 'loss_of' is not called with what ts.value_and_grad differentiates by\n"
        "  got: argnums='weights', arguments w, x\n"
        "  fix: Known: 'w', 'x'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T301.html"
    )
    text = message_of(ArgumentError, ts.value_and_grad(loss_of, 2), W, X)
    assert "got: argnums=2, arguments w, x" in text


def test_integers_and_vectors_are_refused():
    text = message_of(LossFormError, ts.value_and_grad(lambda x: 2.0 * x), X)
    assert "a loss must be one floating-point number" in text
    text = message_of(
        LossFormError, ts.value_and_grad(lambda n: jnp.float32(1)), jnp.arange(3)
    )
    assert "cannot be differentiated by" in text


# --- ts.grad of a function


ARGUMENTS = (jnp.linspace(0.5, 1.0, 4), jnp.linspace(-1.0, 1.0, 4))


def product(weights, x):
    return jnp.sum((weights * x) ** 2)


def with_rest(weights, x):
    return product(weights, x), {"x": x}


@pytest.mark.parametrize(
    "options", [{}, {"argnums": 1}, {"argnums": (0, 1)}, {"argnums": (1,)}], ids=str
)
@pytest.mark.parametrize("function", [product, with_rest])
def test_the_gradient_of_a_function_is_that_of_jax_grad(function, options):
    options = options | {"has_aux": function is with_rest}
    wanted = jax.grad(function, **options)(*ARGUMENTS)
    positional = {"has_aux": options["has_aux"]}
    for gradient in (
        ts.grad(function, **options),
        ts.grad(function, options.get("argnums", 0), **positional),
        ts.jit(ts.grad(function, **options)),
        jax.jit(ts.grad(ts.function(function), **options)),
        ts.function(lambda *args: ts.grad(function, **options)(*args)),
    ):
        found = gradient(*ARGUMENTS)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_gradient_of_a_function_is_transformed_and_named():
    @ts.grad
    def cube(x):
        return x**3

    assert cube.__name__ == "cube"
    np.testing.assert_allclose(ts.grad(cube)(2.0), 12.0)
    rows = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(jax.vmap(cube)(rows), 3 * rows**2)
    by_name = ts.grad(product, argnums="x")(ARGUMENTS[0], x=ARGUMENTS[1])
    np.testing.assert_allclose(by_name, jax.grad(product, 1)(*ARGUMENTS), rtol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: ts.grad(product, w),
        lambda w: ts.grad(product, {"w": w}),
        lambda w: ts.grad(product, argnums=w),
        lambda w: ts.value_and_grad(product, w),
        lambda w: ts.value_and_grad(product(w, w), w),
        lambda w: ts.grad(product(w, w)),
        lambda w: ts.grad(product(w, w), w, argnums=1),
        lambda w: ts.grad(product(w, w), w, has_aux=True),
    ],
)
@pytest.mark.parametrize("where", [lambda call: call, ts.function], ids=["out", "in"])
def test_weights_of_a_value_and_arguments_of_a_function_are_not_mixed_up(call, where):
    with pytest.raises(ArgumentError, match=r"ts\.grad\(loss, weights\)"):
        where(call)(ARGUMENTS[0])


@pytest.mark.parametrize("option", ["holomorphic", "allow_int"])
def test_what_jax_grad_has_and_this_one_has_not(option):
    for take in (ts.grad, ts.value_and_grad):
        with pytest.raises(ArgumentError, match=r"use jax\.grad"):
            take(product, **{option: True})
        take(product, **{option: False})
    with pytest.raises(ArgumentError, match="did you mean 'argnums'"):
        ts.grad(product, argnum=1)
