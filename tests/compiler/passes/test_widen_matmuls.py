# SPDX-License-Identifier: Apache-2.0
"""Gradients of cast parameters keep their f32 sums; on CPU matmuls are wide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import _jax
from tessera.casts import cast_parameter
from tessera.compiler.ir import Graph

X = jax.random.normal(jax.random.key(0), (512, 4)).astype(jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (4, 4))


@pytest.fixture
def accelerator(monkeypatch):
    """Passes that believe the program is for a GPU."""
    monkeypatch.setattr(Graph, "platform", property(lambda graph: "gpu"))


def equations(program, name):
    """The equations of one primitive, those of nested programs included."""
    for equation in _jax.equations(program):
        if equation.primitive.name == name:
            yield equation
        for _, inner in _jax.nested(equation):
            yield from equations(inner, name)


def matmuls(function, *args):
    """Operand and result dtypes of every matmul."""
    program = ts.function(function).trace(*args).graph.program
    return [
        tuple(atom.aval.dtype.name for atom in (*each.invars, *each.outvars))
        for each in equations(program, "dot_general")
    ]


def layer(x, w):
    return jnp.sum(jnp.tanh(x @ cast_parameter(w, x.dtype)).astype(jnp.float32))


NARROW = ("bfloat16",) * 3
WIDE_RESULT = ("bfloat16", "bfloat16", "float32")


def test_the_gradient_of_a_cast_parameter_is_not_rounded(accelerator):
    def step(x, w):
        return ts.grad(layer(x, w), w)

    assert matmuls(step, X, W) == [NARROW, WIDE_RESULT]


def test_the_gradient_of_an_activation_is(accelerator):
    def step(x, w):
        return ts.grad(layer(x * 2, w), x)

    assert matmuls(step, X, W) == [NARROW, NARROW]


def test_a_cast_that_is_no_parameters_is_left_alone(accelerator):
    def step(x, w):
        return ts.grad(jnp.sum((x @ w.astype(x.dtype)).astype(jnp.float32)), w)

    assert matmuls(step, X, W) == [NARROW, NARROW]


def test_inside_a_scan_over_layers_and_where_it_is_transposed(accelerator):
    def step(x, w):
        def body(x, w):
            return jnp.einsum("nd,ed->ne", x, cast_parameter(w, x.dtype)), None

        out, _ = jax.lax.scan(jax.checkpoint(body), x, w)
        return ts.grad(jnp.sum(out.astype(jnp.float32)), w)

    assert matmuls(step, X, jnp.stack([W, W])).count(WIDE_RESULT) == 1


def test_a_result_that_something_else_reads_is_rounded_for_both(accelerator):
    @jax.custom_vjp
    def shared(x, w):
        return x @ cast_parameter(w, x.dtype)

    def forward(x, w):
        return shared(x, w), x

    def backward(x, dy):
        gradient = x.T @ dy
        return x, cast_parameter(gradient, jnp.float32) + gradient.sum().astype("f4")

    shared.defvjp(forward, backward)

    def step(x, w):
        return ts.grad(jnp.sum(shared(x, w).astype(jnp.float32)), w)

    assert WIDE_RESULT not in matmuls(step, X, W)


def test_the_numbers_are_those_of_an_f32_matmul_of_the_rounded_operands():
    """A sum over 512 rows, of which bf16 would keep 8 bits."""
    slope = jax.random.normal(jax.random.key(2), (512, 4)).astype(jnp.bfloat16)

    @ts.function
    def step(x, w):
        y = (x @ cast_parameter(w, x.dtype)) * slope
        return ts.grad(jnp.sum(y.astype(jnp.float32)), w)

    x, dy = (np.asarray(each, np.float32) for each in (X, slope))
    np.testing.assert_allclose(step(X, W), x.T @ dy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_on_cpu_narrow_operands_are_multiplied_in_f32(result):
    def product(x, w):
        w = w.astype(x.dtype)
        return jax.lax.dot(x, w, preferred_element_type=jnp.dtype(result))

    assert matmuls(product, X, W) == [("float32",) * 3]
    assert ts.function(product)(X, W).dtype == result
