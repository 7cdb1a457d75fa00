# SPDX-License-Identifier: Apache-2.0
"""The array functions at top level: those of NumPy, in PyTorch's spelling as well."""

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
    "sum dim": (lambda: ts.sum(X, dim=1), X.sum(1)),
    "sum dims": (lambda: ts.sum(X, dim=[0, 2]), X.sum((0, 2))),
    "sum kept": (lambda: ts.sum(X, dim=-1, keepdim=True), X.sum(-1, keepdims=True)),
    "sum axis": (lambda: ts.sum(X, axis=1, keepdims=True), X.sum(1, keepdims=True)),
    "sum positional": (lambda: ts.sum(X, 1), X.sum(1)),
    "sum of all": (lambda: ts.sum(X), X.sum()),
    "mean": (lambda: ts.mean(X, dim=0, keepdim=True), X.mean(0, keepdims=True)),
    "prod": (lambda: ts.prod(X, dim=2), X.prod(2)),
    "max": (lambda: ts.max(X, dim=2), X.max(2)),
    "min": (lambda: ts.min(X, dim=2, keepdim=True), X.min(2, keepdims=True)),
    "any": (lambda: ts.any(X > 1, dim=1), (X > 1).any(1)),
    "all": (lambda: ts.all(X > -1, dim=1), (X > -1).all(1)),
    "argmax": (lambda: ts.argmax(X, dim=1, keepdim=True), X.argmax(1)[:, None]),
    "argmin": (lambda: ts.argmin(X, dim=-1), X.argmin(-1)),
    "cumsum": (lambda: ts.cumsum(X, dim=1), X.cumsum(1)),
    "logsumexp": (lambda: ts.logsumexp(X, dim=1), np.log(np.exp(X).sum(1))),
    "cat": (lambda: ts.cat([X, X], dim=-1), np.concatenate([X, X], -1)),
    "concatenate": (lambda: ts.concatenate([X, X], axis=1), np.concatenate([X, X], 1)),
    "stack": (lambda: ts.stack([X, X], dim=1), np.stack([X, X], 1)),
    "squeeze": (lambda: ts.squeeze(X[:1], dim=0), X[0]),
    "unsqueeze": (lambda: ts.unsqueeze(X, dim=1), X[:, None]),
    "unsqueeze positional": (lambda: ts.unsqueeze(X, -1), X[..., None]),
    "expand_dims": (lambda: ts.expand_dims(X, axis=0), X[None]),
    "sort": (lambda: ts.sort(X, dim=1), np.sort(X, 1)),
    "sort down": (lambda: ts.sort(X, descending=True), -np.sort(-X, -1)),
    "argsort": (lambda: ts.argsort(X, dim=0), np.argsort(X, 0)),
    "reshape": (lambda: ts.reshape(X, (6, -1)), X.reshape(6, 4)),
    "transpose": (lambda: ts.transpose(X), X.T),
    "transpose two": (lambda: ts.transpose(X, 1, 2), X.swapaxes(1, 2)),
    "transpose a matrix": (lambda: ts.transpose(MATRIX, 0, 1), MATRIX.T),
    "transpose by order": (lambda: ts.transpose(X, (2, 0, 1)), X.transpose(2, 0, 1)),
    "transpose axes": (lambda: ts.transpose(X, axes=(2, 0, 1)), X.transpose(2, 0, 1)),
    "permute": (lambda: ts.permute(X, (2, 0, 1)), X.transpose(2, 0, 1)),
    "permute numbers": (lambda: ts.permute(X, 2, 0, 1), X.transpose(2, 0, 1)),
    "matmul": (lambda: ts.matmul(X, MATRIX.T), X @ MATRIX.T),
    "einsum": (lambda: ts.einsum("bij,kj->bik", X, MATRIX), X @ MATRIX.T),
    "where": (lambda: ts.where(X > 0, X, 0.0), np.where(X > 0, X, 0)),
    "clip": (lambda: ts.clip(X, -1.0, 1.0), X.clip(-1, 1)),
    "clamp": (lambda: ts.clamp(X, min=-1.0, max=1.0), X.clip(-1, 1)),
    "minimum": (lambda: ts.minimum(X, 0.5), np.minimum(X, 0.5)),
    "maximum": (lambda: ts.maximum(X, 0.5), np.maximum(X, 0.5)),
    "isfinite": (lambda: ts.isfinite(X / 0), np.isfinite(X) & False),
    "abs exp log sqrt": (lambda: ts.sqrt(ts.log(ts.exp(ts.abs(X)))), abs(X) ** 0.5),
    "zeros": (lambda: ts.zeros(2, 3), np.zeros((2, 3))),
    "zeros tuple": (lambda: ts.zeros((2, 3)), np.zeros((2, 3))),
    "ones": (lambda: ts.ones(2), np.ones(2)),
    "full": (lambda: ts.full((2, 3), 7.0), np.full((2, 3), 7.0)),
    "arange": (lambda: ts.arange(1, 9, 3), np.arange(1, 9, 3)),
    "eye": (lambda: ts.eye(2, 3), np.eye(2, 3)),
    "zeros_like": (lambda: ts.zeros_like(X), np.zeros_like(X)),
    "ones_like": (lambda: ts.ones_like(X), np.ones_like(X)),
    "full_like": (lambda: ts.full_like(X, 2), np.full_like(X, 2)),
    "tril": (lambda: ts.tril(MATRIX), np.tril(MATRIX)),
    "broadcast_to": (
        lambda: ts.broadcast_to(X[0, 0], (5, 4)),
        X[0, 0] + np.zeros((5, 4)),
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_it_is_what_numpy_gives(call, expected):
    found = call()
    assert isinstance(found, jax.Array)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_the_calls_cover_every_dim_and_keepdim_that_there_is():
    spelled = {
        name
        for name in arrays.__all__
        if "dim=" in (inspect.getdoc(getattr(ts, name)) or "").replace("``", "")
    }
    assert spelled <= {call.split()[0] for call in CALLS} | {"split", "topk", "layer"}


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
    for found in (
        ts.split(X, 2, axis=2),
        ts.split(X, indices_or_sections=2, axis=2),
        ts.split(X, [2], dim=2),
    ):
        assert [part.shape for part in found] == [(2, 3, 2)] * 2
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


# --- topk


def test_topk_gives_values_in_order_and_their_places():
    values, places = ts.topk(X, 2, dim=1)
    order = np.argsort(-X, 1)[:, :2]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(X, order, 1))
    values, places = ts.topk(X, 2, largest=False)
    np.testing.assert_array_equal(values, np.sort(X, -1)[..., :2])
    np.testing.assert_array_equal(places, np.argsort(X, -1)[..., :2])
    with pytest.raises(OperandError, match="cannot take 5 of 4"):
        ts.topk(X, 5)


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


def test_dtypes_go_by_their_short_names():
    for made in (
        ts.zeros(2, 3, dtype="bf16"),
        ts.ones((2,), "bf16"),
        ts.full((2,), 1, "bf16"),
        ts.arange(3, dtype="bf16"),
        ts.eye(2, dtype="bf16"),
        ts.zeros_like(X, "bf16"),
        ts.ones_like(X, dtype="bf16"),
    ):
        assert made.dtype == jnp.bfloat16
    assert ts.zeros((2,), jnp.int32).dtype == jnp.int32
    assert ts.zeros().shape == ()
    with pytest.raises(TensorFormError, match="did you mean 'bf16'"):
        ts.zeros(2, dtype="bf61")


# --- both spellings at once


@pytest.mark.parametrize(
    "call",
    [
        lambda: ts.sum(X, axis=1, dim=1),
        lambda: ts.sum(X, 1, dim=1),
        lambda: ts.mean(X, keepdim=True, keepdims=True),
        lambda: ts.cat([X, X], 0, dim=0),
        lambda: ts.split(X, 2, dim=0, axis=0),
        lambda: ts.split(X, 2, indices_or_sections=2),
        lambda: ts.topk(X, 2, dim=0, axis=0),
    ],
)
def test_one_argument_by_two_names_is_an_error(call):
    with pytest.raises(OperandError, match="which are one argument"):
        call()


def test_the_error_names_the_function_and_both_names():
    with pytest.raises(OperandError) as caught:
        ts.max(X, axis=0, dim=1)
    assert str(caught.value) == (
        "[T401] max is given axis and dim, which are one argument\n"
        "  got: dim=1\n"
        "  fix: leave dim= out\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html"
    )


def test_transpose_with_three_numbers_is_an_error():
    with pytest.raises(OperandError, match=r"write transpose\(x, \(0, 2, 1\)\)"):
        ts.transpose(X, 0, 2, 1)


# --- in programs


def test_they_are_traced_like_any_function_of_jax():
    @ts.function
    def step(x):
        first, second = ts.split(x, sections=2, dim=-1)
        loss = ts.sum(ts.maximum(first, second), dim=[0, 1]).sum()
        return loss, ts.grad(loss, x)

    loss, gradient = step(jnp.asarray(X))
    first, second = X[..., :2], X[..., 2:]
    assert float(loss) == pytest.approx(np.maximum(first, second).sum(), rel=1e-5)
    expected = np.concatenate([first > second, second > first], -1)
    np.testing.assert_array_equal(gradient, expected)


def test_declared_tensors_are_operands():
    x = ts.dist.tensor((2, 6), init="ones")
    assert float(ts.sum(x)) == 12
    assert ts.cat([x, x], dim=1).shape == (2, 12)
    assert ts.exp(x).shape == ts.transpose(x, 0, 1).T.shape


def test_operations_come_from_the_users_line():
    """The ledger, the graph and tracebacks speak of lines, of whoever calls these."""

    @ts.function
    def step(x):
        return ts.sum(x, dim=0), *ts.split(x, 2), ts.transpose(x, 0, 1), ts.zeros(2)

    program = step.trace(MATRIX[:2]).graph.program
    lines = {jaxprs.source_line(equation) for equation in jaxprs.equations(program)}
    assert {line.rpartition(":")[0] for line in lines} == {__file__}
