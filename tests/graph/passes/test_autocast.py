# SPDX-License-Identifier: Apache-2.0
"""Autocast: which matmuls are narrow, forward and backward, and what they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.graph.ir import Graph
from tessera.graph.passes.autocast import autocast
from tessera.jax_compat import jaxprs

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (4, 4))
X = jax.random.normal(jax.random.key(1), (8, 4))
MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@pytest.fixture
def accelerator(monkeypatch):
    """Passes that believe the program is for a GPU, where matmuls are narrow."""
    monkeypatch.setattr(Graph, "platform", property(lambda graph: "gpu"))


def matmuls(program):
    """Operand and result dtypes of every matmul, nested programs included."""
    found = []
    for equation in jaxprs.equations(program):
        if equation.primitive.name in MATMULS:
            atoms = [*equation.invars, *equation.outvars]
            found.append(tuple(atom.aval.dtype.name for atom in atoms))
        for _, inner in jaxprs.nested(equation):
            found += matmuls(inner)
    return found


def matmuls_of(function, *args):
    return matmuls(ts.function(function).trace(*args).graph.program)


def narrow(dtype="bfloat16", result="float32"):
    return (dtype, dtype, result)


ROUNDED = narrow(result="bfloat16")


WIDE = ("float32", "float32", "float32")


# --- which matmuls are narrow (on an accelerator)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_matmuls_inside_take_narrow_operands_and_give_f32(accelerator, name, dtype):
    def function(x, w):
        with ts.autocast(name):
            y = x @ w
        return y @ w

    assert matmuls_of(function, X, W) == [narrow(dtype), WIDE]


def test_backward_matmuls_are_cast_as_their_forward_ones(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            inside = x @ w
        loss = jnp.sum((inside @ w) ** 2)
        return ts.grad(loss, w)

    # Two forward; then the outer one by both operands; then the inner one by w.
    assert matmuls_of(function, X, W) == [narrow(), WIDE, WIDE, WIDE, narrow()]


def test_grouped_matmuls_are_cast_and_the_sizes_of_their_groups_are_not(accelerator):
    def function(x, w, sizes):
        with ts.autocast("bf16"):
            loss = jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)
        return ts.grad(loss, w)

    sizes = jnp.array([3, 5], jnp.int32)
    operands = ("bfloat16", "bfloat16", "int32")
    found = matmuls_of(function, X, jnp.stack([W, W]), sizes)
    assert found == [(*operands, "bfloat16"), (*operands, "float32")]


def test_taking_the_gradient_inside_does_not_cast_what_was_computed_outside(
    accelerator,
):
    def function(x, w):
        loss = jnp.sum((x @ w) ** 2)
        with ts.autocast("bf16"):
            return ts.grad(loss, w)

    assert matmuls_of(function, X, W) == [WIDE, WIDE]


def test_the_innermost_autocast_decides(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            a = x @ w
            with ts.autocast("f16"):
                b = x @ w
            with ts.autocast("bf16", enabled=False):
                c = x @ w
            with ts.autocast("f32"):
                d = x @ w
            e = x @ w
        return a + b + c + d + e

    assert matmuls_of(function, X, W) == [
        narrow(),
        narrow("float16"),
        WIDE,
        WIDE,
        narrow(),
    ]


def test_backward_of_a_disabled_part_is_wide_too(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            y = x @ w
            with ts.autocast("bf16", enabled=False):
                z = y @ w
            return ts.grad(jnp.sum(z**2), w)

    assert matmuls_of(function, X, W) == [narrow(), WIDE, WIDE, WIDE, narrow()]


NESTS = {
    "scan": lambda f: (
        lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0]
    ),
    "scan of remat": lambda f: NESTS["scan"](jax.checkpoint(f)),
    "jit": jax.jit,
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=ts.Mesh(["dp"], devices=range(2)).jax,
        in_specs=(P("dp"), P()),
        out_specs=P("dp"),
    ),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("where", ["around", "inside"])
def test_nested_matmuls_are_cast_forward_and_backward(accelerator, nest, where):
    def layer(x, w):
        if where == "inside":
            with ts.autocast("bf16"):
                return jnp.tanh(x @ w)
        return jnp.tanh(x @ w)

    def function(x, w):
        with ts.autocast("bf16", enabled=where == "around"):
            loss = jnp.sum(NESTS[nest](layer)(x, w) ** 2)
        return loss, ts.grad(loss, w)

    found = matmuls_of(function, X, W)
    assert len(found) >= 2
    assert set(found) <= {narrow(), ROUNDED}
    assert found[-1] == narrow()  # of the weight's gradient


def test_what_a_loop_carries_is_narrow_where_its_body_alone_reads_it_so(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            first = x @ w
            last, _ = lax.scan(lambda c, _: (c @ w, None), first, None, length=2)
        return jnp.sum(last)  # in f32

    (loop,) = (
        equation
        for equation in jaxprs.equations(
            ts.function(function).trace(X, W).graph.program
        )
        if equation.primitive.name == "scan"
    )
    assert [atom.aval.dtype.name for atom in loop.outvars] == ["bfloat16"]


def test_functions_with_rules_of_their_own_are_cast(accelerator):
    by_vjp = jax.custom_vjp(jnp.matmul)
    by_vjp.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
    )
    by_jvp = jax.custom_jvp(jnp.matmul)
    by_jvp.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))

    def function(x, w):
        with ts.autocast("bf16"):
            return by_vjp(x, w) + by_jvp(x, w)

    def slope(x, w):
        return ts.grad(jnp.sum(function(x, w)), w)

    assert matmuls_of(function, X, W) == [narrow(), narrow()]
    assert set(matmuls_of(slope, X, W)) == {narrow()}


def test_a_solver_that_takes_functions_is_cast_inside(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            return jax.scipy.sparse.linalg.cg(lambda v: w @ v, x[0], maxiter=2)[0]

    assert set(matmuls_of(function, X, jnp.eye(4))) >= {narrow()}


def test_a_pallas_kernel_is_left_as_it_is_written():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    @ts.function
    def function(x, w):
        with ts.autocast("bf16"):
            return pallas.pallas_call(
                kernel, jax.ShapeDtypeStruct((8, 4), jnp.float32), interpret=True
            )(x, w)

    np.testing.assert_allclose(function(X, W), X @ W, rtol=1e-5, atol=1e-6)


def test_an_autocast_around_a_call_reaches_inside(accelerator):
    function = ts.function(lambda x, w: x @ w)
    with ts.autocast("bf16"):
        assert matmuls(function.trace(X, W).graph.program) == [narrow()]
    assert matmuls(function.trace(X, W).graph.program) == [WIDE]


def test_an_autocast_around_a_call_is_part_of_what_is_compiled():
    function = ts.function(lambda x, w: x @ w)
    wide = function(X, W)
    with ts.autocast("bf16"):
        assert not jnp.array_equal(function(X, W), wide)
    assert jnp.array_equal(function(X, W), wide)
    assert function.num_programs() == 2


def test_convolutions_are_cast(accelerator):
    image, kernel = jnp.ones((1, 2, 8)), jnp.ones((3, 2, 3))

    def function(image, kernel):
        with ts.autocast("bf16"):
            return lax.conv_general_dilated(image, kernel, (1,), "SAME")

    assert matmuls_of(function, image, kernel) == [narrow()]


def test_flax_modules_are_cast(accelerator):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def function(model, x):
        with ts.autocast("bf16"):
            return model(x)

    assert matmuls_of(function, model, X) == [narrow()]


def test_what_is_not_f32_is_left_alone(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            return x @ w

    half = X.astype(jnp.float16), W.astype(jnp.float16)
    assert matmuls_of(function, *half) == [("float16", "float16", "float16")]


def test_sums_norms_softmax_and_losses_stay_in_f32(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            y = x @ w
            y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True))
            return jnp.sum(jax.nn.softmax(y)) + ts.op.cross_entropy(
                y, jnp.zeros(8, int)
            )

    program = ts.function(function).trace(X, W).graph.program
    dtypes = {
        atom.aval.dtype
        for equation in jaxprs.equations(program)
        if equation.primitive.name not in (*MATMULS, "convert_element_type")
        for atom in (*equation.invars, *equation.outvars)
    }
    assert jnp.bfloat16 not in dtypes


def test_the_weights_and_their_gradients_stay_in_f32(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            return ts.grad(jnp.sum((x @ w) ** 2), w)

    (output,) = ts.function(function).trace(X, W).graph.outputs
    assert output.aval.dtype == jnp.float32


def test_scopes_of_the_users_own_are_no_autocast(accelerator):
    def function(x, w):
        with jax.named_scope("autocast_mine"), jax.named_scope("my_autocast_off"):
            return x @ w

    assert matmuls_of(function, X, W) == [WIDE]


def test_the_cast_is_found_at_the_users_line(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            return x @ w

    casts = [
        equation
        for equation in jaxprs.equations(
            ts.function(function).trace(X, W).graph.program
        )
        if equation.primitive.name == "convert_element_type"
    ]
    line = function.__code__.co_firstlineno + 2
    assert {jaxprs.source_line(cast) for cast in casts} == {f"{__file__}:{line}"}
    assert len(casts) == 2


def test_casting_twice_is_casting_once(accelerator):
    def function(x, w):
        with ts.autocast("bf16"):
            return x @ w

    graph = ts.function(function).trace(X, W).graph
    assert autocast(graph).program is graph.program


# --- what comes out (on the CPU)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", jnp.bfloat16), ("f16", "f2")])
def test_the_numbers_are_those_of_narrow_operands_and_wide_sums(name, dtype):
    @ts.function
    def function(x, w):
        with ts.autocast(name):
            loss = jnp.sum((x @ w) ** 2)
        return loss, ts.grad(loss, w)

    def rounded(a):
        return a.astype(dtype).astype(jnp.float32)

    y = rounded(rounded(X) @ rounded(W))  # the backward pass keeps it narrow
    loss, slope = function(X, W)
    np.testing.assert_allclose(loss, jnp.sum(y**2), rtol=1e-6)
    np.testing.assert_allclose(slope, rounded(X).T @ rounded(2 * y), rtol=1e-5)
    assert loss.dtype == slope.dtype == jnp.float32


def test_the_numbers_differ_from_f32_by_the_precision_of_bf16():
    @ts.function
    def function(x, w):
        with ts.autocast("bf16"):
            return x @ w

    error = jnp.abs(function(X, W) - X @ W).max()
    assert 1e-4 < error < 0.1


def test_f16_overflows_as_f16_does():
    @ts.function
    def function(x, w):
        with ts.autocast("f16"):
            return x @ w

    assert jnp.isinf(function(jnp.full((1, 1), 1e5), jnp.ones((1, 1)))).all()


def test_a_disabled_autocast_changes_nothing():
    @ts.function
    def function(x, w):
        with ts.autocast("bf16", enabled=False):
            return x @ w

    np.testing.assert_array_equal(function(X, W), jax.jit(jnp.matmul)(X, W))
