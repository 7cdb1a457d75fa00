# SPDX-License-Identifier: Apache-2.0
"""The array functions at top level: what steps written for PyTorch use."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import arrays
from tessera.errors import OperandError, TensorFormError
from tessera.jax_compat import jaxprs

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("f4")
MATRIX = X[0]

# Each call, and the same in NumPy.
CALLS = {
    "matmul": (lambda: ts.matmul(X, MATRIX.T), X @ MATRIX.T),
    "minimum": (lambda: ts.minimum(X, 0.5), np.minimum(X, 0.5)),
    "isfinite": (lambda: ts.isfinite(X / 0), np.isfinite(X) & False),
}


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_it_is_what_numpy_gives(call, expected):
    found = call()
    assert isinstance(found, jax.Array)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_every_name_is_at_top_level():
    for name in arrays.__all__:
        assert getattr(ts, name) is getattr(arrays, name)
        assert inspect.getdoc(getattr(ts, name)), name


# --- split


def test_split_cuts_into_sections_along_a_dim():
    q, k, v = ts.split(np.concatenate([X, X + 1, X + 2], -1), sections=3, dim=-1)
    for found, expected in ((q, X), (k, X + 1), (v, X + 2)):
        np.testing.assert_array_equal(found, expected)


def test_split_follows_jax_in_what_its_arguments_mean():
    assert [part.shape for part in ts.split(X, [2], dim=2)] == [(2, 3, 2)] * 2
    assert len(ts.split(X, 2)) == 2, "along dim 0"


@pytest.mark.parametrize("sections", [3, 0, 8])
def test_sections_that_are_not_equal_are_an_error(sections):
    with pytest.raises(OperandError, match=rf"cannot divide 4 into {sections}"):
        ts.split(X, sections, dim=-1)


def test_the_error_of_split_has_the_arithmetic():
    with pytest.raises(OperandError) as caught:
        ts.split(np.ones((2, 10)), sections=3, dim=-1)
    assert str(caught.value) == (
        "[T401] split cannot divide 10 into 3 equal parts\n"
        "  got: shape (2, 10), dim 1, sections 3, remainder 1\n"
        "  fix: use 2 or 5 sections, or a list of the indices at which to split\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


# --- arrays from nothing


def test_a_number_becomes_an_array_that_keeps_its_dtype():
    largest = ts.tensor(65536.0)
    assert (largest.dtype, largest.weak_type) == (jnp.float32, False)
    assert ts.tensor(3).dtype == jnp.int32
    assert ts.tensor(True).dtype == jnp.bool_
    assert ts.tensor([[1.0, 2.0]]).shape == (1, 2)
    assert ts.tensor(1.5, dtype="bf16").dtype == jnp.bfloat16
    assert ts.tensor(1.5, jnp.float16).dtype == jnp.float16
    assert ts.minimum(jnp.float32(70000.0), largest) == 65536.0


def test_a_tensor_is_a_copy():
    source = np.zeros(3, np.float32)
    made = ts.tensor(source)
    source[0] = 7
    assert not made.any()


def test_a_dtype_that_does_not_exist_is_an_error():
    with pytest.raises(TensorFormError, match="did you mean 'bf16'"):
        ts.tensor(2, dtype="bf61")


def test_other_functions_are_those_of_jax_numpy():
    with pytest.raises(AttributeError, match="no attribute 'exp'"):
        ts.exp  # noqa: B018


# --- in programs


def test_they_are_traced_like_any_function_of_jax():
    @ts.function
    def step(x):
        first, second = ts.split(x, sections=2, dim=-1)
        loss = ts.minimum(first, second).sum()
        return loss, ts.grad(loss, x)

    loss, gradient = step(jnp.asarray(X))
    first, second = X[..., :2], X[..., 2:]
    assert float(loss) == pytest.approx(np.minimum(first, second).sum(), rel=1e-5)
    expected = np.concatenate([first < second, second < first], -1)
    np.testing.assert_array_equal(gradient, expected)


def test_declared_tensors_are_operands():
    x = ts.dist.tensor((2, 6), init="ones")
    assert float(ts.minimum(x, 0.5).sum()) == 6
    assert [part.shape for part in ts.split(x, 3, dim=1)] == [(2, 2)] * 3


def test_operations_come_from_the_users_line():
    """The ledger, the graph and tracebacks speak of lines, of whoever calls these."""

    @ts.function
    def step(x):
        return ts.minimum(x, 2.0), *ts.split(x, 2), ts.matmul(x, x.T)

    program = step.trace(MATRIX[:2]).graph.program
    lines = {jaxprs.source_line(equation) for equation in jaxprs.equations(program)}
    assert {line.rpartition(":")[0] for line in lines} == {__file__}
