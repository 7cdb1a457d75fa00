# SPDX-License-Identifier: Apache-2.0
"""ts.grad and graph.backward while a function is traced: what they take and give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import graph
from tessera.errors import (
    LossFormError,
    OutsideTraceError,
    TesseraError,
    UnconnectedGradientError,
)
from tessera.jax_compat import jaxprs
from tessera.shard import ShardSpec, tensor
from tessera.tracing import scope

X = jnp.linspace(-1.0, 1.0, 8, dtype=jnp.float32)


def message_of(function, *args):
    with pytest.raises(TesseraError) as caught:
        function(*args)
    return str(caught.value)


# --- ts.grad: the form of what it takes and gives


def test_the_gradient_of_a_tree_is_such_a_tree():
    @ts.function
    def slope(tree):
        return ts.grad(jnp.sum(tree["a"] * tree["b"][0]), tree)

    found = slope({"a": X, "b": (X + 1, None)})
    np.testing.assert_array_equal(found["a"], X + 1)
    np.testing.assert_array_equal(found["b"][0], X)
    assert found["b"][1] is None


def test_a_trace_shows_the_gradient_as_one_equation():
    traced = ts.function(lambda x: ts.grad(jnp.sum(x**2), x)).trace(X)
    equations = jaxprs.equations(traced.origin.graph.program)
    assert [e.primitive.name for e in equations] == [
        "integer_pow",
        "reduce_sum",
        "gradient",
    ]
    assert __file__ in jaxprs.source_line(equations[-1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_gradient_has_the_dtype_of_its_weight(dtype):
    @ts.function
    def slope(x):
        return ts.grad(jnp.sum(x.astype(jnp.float32) ** 2), x)

    assert slope(X.astype(dtype)).dtype == dtype


def test_a_gradient_of_a_weak_value_is_strong():
    slope = ts.function(lambda x: ts.grad(x**2, x))
    assert slope(jnp.asarray(3.0)) == 6.0
    assert not slope(jnp.asarray(3.0)).weak_type


def test_a_gradient_has_the_layout_of_its_weight(dp_mesh):
    w = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    slope = ts.function(lambda w, x: ts.grad(jnp.sum(w * x), w))
    assert slope(w, X).sharding.spec == P("dp")
    (output,) = slope.last.traced.graph.outputs
    assert output.spec == P("dp")


def test_a_gradient_by_a_captured_array_has_its_layout(dp_mesh):
    w = jax.device_put(X, NamedSharding(dp_mesh.jax, P("dp")))
    slope = ts.function(lambda x: ts.grad(jnp.sum(w * x), w))
    assert slope(X).sharding.spec == P("dp")


def test_a_gradient_by_a_captured_tensor_has_its_layout(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, init="ones", name="t")
    slope = ts.function(lambda x: ts.grad(jnp.sum(table * x), table))
    np.testing.assert_array_equal(slope(X), X)
    assert slope(X).sharding.spec == P("dp")


# --- ts.grad: what it refuses


def test_a_gradient_needs_a_function_that_is_traced():
    assert message_of(ts.grad, jnp.sum(X), X) == (
        "[T302] ts.grad needs the computation of the loss, which was not recorded\n"
        "  got: a loss of type ArrayImpl\n"
        "  fix: call it in a function decorated with @ts.function, where the loss is "
        "computed\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


def test_a_gradient_in_plain_jax_is_refused():
    with pytest.raises(OutsideTraceError, match="that JAX traces by itself"):
        jax.jit(lambda x: ts.grad(jnp.sum(x), x))(X)


def test_a_loss_that_was_computed_before_the_trace_is_refused():
    loss = jnp.sum(X)
    text = message_of(ts.function(lambda x: ts.grad(loss, x)), X)
    assert "got: a loss of type ArrayImpl that does not depend on traced" in text


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda x: x, "shape (8,), dtype float32"),
        (lambda x: jnp.sum(x)[None], "shape (1,), dtype float32"),
        (lambda x: jnp.sum(x > 0), "shape (), dtype int32"),
        (lambda x: jnp.sum(x + 1j), "shape (), dtype complex64"),
    ],
)
def test_a_loss_is_one_floating_point_number(loss, got):
    @ts.function
    def slope(x):
        with jax.numpy_dtype_promotion("standard"):
            return ts.grad(loss(x), x)

    assert message_of(slope, X) == (
        "[T304] a loss must be one floating-point number\n"
        f"  got: {got}\n"
        "  fix: reduce it first, e.g. with .mean()\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T304.html"
    )


def test_weights_are_floating_point_arrays():
    @ts.function
    def slope(tree):
        return ts.grad(jnp.sum(tree["w"]), tree)

    assert message_of(slope, {"w": X, "opt": {"count": jnp.int32(1)}}) == (
        "[T304] weight 'opt/count' cannot be differentiated by\n"
        "  got: dtype int32, shape ()\n"
        "  fix: give ts.grad floating-point weights only\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T304.html"
    )


def test_jax_cannot_differentiate_a_gradient():
    def total(x):
        return jnp.sum(ts.grad(jnp.sum(x**3), x))

    assert message_of(ts.function(lambda x: jax.grad(total)(x)), X) == (
        "[T302] jax.grad cannot look inside ts.grad and graph.backward\n"
        "  got: a gradient taken in the function that jax.grad is applied to\n"
        "  fix: use ts.value_and_grad(function) in it, which any transformation takes\n"
        "  fix: or take the gradient outside jax.grad, by ts.grad\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


def test_examples_may_have_weights_of_their_own():
    def slope(w, x):
        return ts.grad(jnp.sum(jnp.sin(w * x)), w)

    rows, factors = X.reshape(2, 4), jnp.array([[1.0, 2.0], [3.0, 4.0]])
    found = ts.function(jax.vmap(slope, in_axes=(0, None)))(rows, X[:4])
    np.testing.assert_allclose(found, jnp.cos(rows * X[:4]) * X[:4], rtol=1e-5)
    found = ts.function(jax.vmap(jax.vmap(slope)))(factors, factors)
    expected = jnp.cos(factors**2) * factors
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_examples_that_share_a_weight_are_not_told_apart():
    step = ts.function(
        lambda w, xs: jax.vmap(lambda x: ts.grad(jnp.sum(w * x), {"w": w}))(xs)
    )
    assert message_of(step, X, X[:, None]) == (
        "[T302] jax.vmap cannot tell gradients by what all examples share apart\n"
        "  got: a loss for each example, differentiated by 'w'\n"
        "  fix: use ts.value_and_grad(function) in the function that is mapped\n"
        "  fix: or take ts.grad of the sum of the losses, outside jax.vmap\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


# --- graph.backward


def test_backward_gives_a_gradient_for_each_trainable_parameter():
    frozen = tensor((8,), init="ones", name="frozen", trainable=False)
    table = tensor((8,), init="ones", name="tables/table")
    counts = tensor((8,), dtype="i32", init="ones", name="counts")

    @graph.training_step
    def step(x):
        scale = scope.parameter("scale", (8,), init="ones")
        loss = jnp.sum(x * frozen * table * scale * counts.astype(jnp.float32))
        return graph.backward(loss)

    found = step(X)
    assert jax.tree.structure(found) == jax.tree.structure(
        {"scale": 0, "tables": {"table": 0}}
    )
    np.testing.assert_array_equal(found["tables"]["table"], X)


def test_backward_gives_gradients_in_the_parameters_layout(dp_mesh):
    table = tensor((8,), ShardSpec((0,), ("dp",)), dp_mesh, init="ones", name="table")
    step = graph.training_step(mesh=dp_mesh)(
        lambda x: graph.backward(jnp.sum(x * table))
    )
    assert step(X)["table"].sharding.spec == P("dp")


def test_backward_needs_a_step():
    assert message_of(graph.backward, jnp.sum(X)) == (
        "[T302] graph.backward differentiates by parameters, and no step is traced\n"
        "  fix: call it in a function decorated with @graph.training_step\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T302.html"
    )


def test_backward_needs_a_parameter():
    frozen = tensor((8,), init="ones", name="frozen", trainable=False)
    step = graph.training_step(lambda x: graph.backward(jnp.sum(x * frozen)))
    with pytest.raises(UnconnectedGradientError) as caught:
        step(X)
    assert str(caught.value) == (
        "[T303] graph.backward has no parameter to differentiate by\n"
        "  got: 1 parameters, none of them trainable\n"
        "  fix: compute the loss with an operation that owns parameters or with a "
        "trainable dist.tensor, or use ts.grad(loss, weights)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T303.html"
    )


def test_backward_takes_one_floating_point_number():
    step = graph.training_step(lambda x: graph.backward(x))
    with pytest.raises(LossFormError, match="T304"):
        step(X)
