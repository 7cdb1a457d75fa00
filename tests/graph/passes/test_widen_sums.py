# SPDX-License-Identifier: Apache-2.0
"""Gradients of cast parameters keep f32 sums; matmuls on CPU are of f32 operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.graph.ir import Graph
from tessera.jax_compat import jaxprs
from tessera.tracing.casts import cast_parameter

X = jax.random.normal(jax.random.key(0), (512, 4)).astype(jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (4, 4))


@pytest.fixture
def accelerator(monkeypatch):
    """Passes that believe the program is for a GPU."""
    monkeypatch.setattr(Graph, "platform", property(lambda graph: "gpu"))


def equations(program, name):
    """The equations of one primitive, those of nested programs included."""
    for equation in jaxprs.equations(program):
        if equation.primitive.name == name:
            yield equation
        for _, inner in jaxprs.nested(equation):
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


PRECISION = "reduce_precision"
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


def test_what_else_reads_a_sum_gets_it_as_rounded_as_before():
    """257 is no bf16 number; 256 is."""

    @jax.custom_vjp
    def shared(x, w):
        return x @ cast_parameter(w, x.dtype)

    def forward(x, w):
        return shared(x, w), x

    def backward(x, dy):
        gradient = x.T @ dy
        return x, cast_parameter(gradient, jnp.float32) + gradient.astype("f4")

    shared.defvjp(forward, backward)

    @ts.function
    def step(x, w):
        return ts.grad(jnp.sum(shared(x, w).astype(jnp.float32)), w)

    x = jnp.ones((257, 1), jnp.bfloat16)
    assert float(step(x, jnp.ones((1, 1)))[0, 0]) == 257 + 256


def test_the_numbers_are_those_of_an_f32_matmul_of_the_rounded_operands():
    """A sum over 512 rows, of which bf16 would keep 8 bits."""
    slope = jax.random.normal(jax.random.key(2), (512, 4)).astype(jnp.bfloat16)

    @ts.function
    def step(x, w):
        y = (x @ cast_parameter(w, x.dtype)) * slope
        return ts.grad(jnp.sum(y.astype(jnp.float32)), w)

    x, dy = (np.asarray(each, np.float32) for each in (X, slope))
    np.testing.assert_allclose(step(X, W), x.T @ dy, rtol=1e-5, atol=1e-5)


ROWS = np.zeros(1000, np.int32)
ROWS[-1] = 1


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, rows: table[rows],
        lambda table, rows: jnp.take(table, rows, axis=0),
        lambda table, rows: jax.jit(lambda t: jax.nn.relu(t)[rows])(table),
    ],
    ids=["index", "take", "jit"],
)
def test_a_thousand_rows_of_a_table_are_added_up(look_up):
    """In bf16, adding 1 to 256 gives 256."""

    @ts.function
    def step(table):
        rows = look_up(cast_parameter(table, jnp.bfloat16), ROWS)
        return ts.grad(jnp.sum(rows.astype(jnp.float32)), table)

    np.testing.assert_array_equal(step(jnp.ones((3, 2)))[:, 0], [999, 1, 0])


def test_a_table_that_is_looked_up_and_multiplied_is_added_up():
    x = jnp.ones((1, 2), jnp.bfloat16)

    @ts.function
    def step(table):
        narrow = cast_parameter(table, jnp.bfloat16)
        loss = jnp.sum(narrow[ROWS].astype(jnp.float32))
        return ts.grad(loss + jnp.sum((x @ narrow.T).astype(jnp.float32)), table)

    np.testing.assert_array_equal(step(jnp.ones((3, 2)))[:, 0], [1000, 2, 1])


def test_two_tables_of_one_shape_share_a_jitted_lookup():
    """Only one of the tables has been cast; the other has a gradient in bf16."""

    @ts.function
    def step(table, narrow):
        loss = jnp.sum(jnp.take(cast_parameter(table, "bfloat16"), ROWS, axis=0))
        loss = loss.astype(jnp.float32)
        loss += jnp.sum(jnp.take(narrow, ROWS, axis=0)).astype(jnp.float32)
        return ts.grad(loss, (table, narrow))

    table = jnp.ones((3, 2))
    found, other = step(table, table.astype(jnp.bfloat16))
    assert (found.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(found[:, 0], [999, 1, 0])


def test_the_gradient_of_a_bias_is_a_sum_of_f32():
    @ts.function
    def step(bias):
        y = X[:, :1] * 0 + cast_parameter(bias, X.dtype)
        return ts.grad(jnp.sum(y.astype(jnp.float32)), bias)

    assert float(step(jnp.float32(0.5))) == 512.0


def test_a_sum_in_two_steps_of_which_one_is_jitted():
    """The transpose of a roll is a jitted function of the sum."""

    @ts.function
    def step(table):
        rolled = jnp.roll(cast_parameter(table, jnp.bfloat16), 1, axis=0)
        return ts.grad(jnp.sum(rolled[ROWS][None].astype(jnp.float32)), table)

    np.testing.assert_array_equal(step(jnp.ones((3, 2)))[:, 0], [1, 0, 999])


def test_a_weight_of_which_parts_are_used_is_not_rounded(accelerator):
    def step(x, w):
        left, right = jnp.split(cast_parameter(w, x.dtype), 2, axis=1)
        y = (x @ left).sum(dtype=jnp.float32) + (x @ right).sum(dtype=jnp.float32)
        return ts.grad(y, w)

    assert matmuls(step, X, W)[-2:] == [WIDE_RESULT] * 2


def test_matmuls_that_a_module_computes_in_f32_are_not_rounded_after(accelerator):
    """Flax promotes a narrow weight where its input is f32."""

    def step(x, w):
        with ts.autocast("bf16"):
            y = x @ cast_parameter(w, "bfloat16").astype(jnp.float32)
        return ts.grad(jnp.sum(y), w)

    x = X.astype(jnp.float32)
    assert matmuls(step, x, W)[-1] == WIDE_RESULT
    program = ts.function(step).trace(x, W).graph.program
    casts = list(equations(program, "convert_element_type"))
    assert [each.outvars[0].aval.dtype for each in casts][-1] != jnp.float32


@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_on_cpu_narrow_operands_are_multiplied_in_f32(result):
    def product(x, w):
        w = w.astype(x.dtype)
        return jax.lax.dot(x, w, preferred_element_type=jnp.dtype(result))

    assert matmuls(product, X, W) == [("float32",) * 3]
    assert ts.function(product)(X, W).dtype == result


def test_on_cpu_operands_are_rounded_although_xla_may_skip_casts():
    """A cast to bf16 and back is an excess of precision that XLA may keep."""

    def product(x, w):
        return jnp.float32(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))

    x, w = np.float32([[1 + 2**-12]]), np.float32([[1.0]])
    assert float(ts.function(product)(x, w)[0, 0]) == 1.0
    rounded = equations(ts.function(product).trace(x, w).graph.program, PRECISION)
    assert len(list(rounded)) == 2
