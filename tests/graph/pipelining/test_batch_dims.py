# SPDX-License-Identifier: Apache-2.0
"""Which functions of a batch keep its rows apart: what is found, and what is so."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tessera.graph.pipelining.batch_dims import BatchDims, have_same_numbers
from tessera.graph.rewriting import inline_jits
from tessera.jax_compat import jaxprs

ROWS, MICRO, OTHER = 8, 2, 3
Function = Callable[..., Any]


def keeps_apart(function: Function, *arrays: jax.Array) -> bool:
    """Whether every equation of a function of rows is found to keep them apart."""

    def traced(rows: int) -> Any:
        structs = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in arrays]
        return inline_jits(jax.make_jaxpr(function)(*structs))

    whole, micro = traced(ROWS), traced(MICRO)
    rows = BatchDims(ROWS // MICRO)
    rows.pair(jaxprs.inputs(whole), jaxprs.inputs(micro))
    rows.pair(jaxprs.constant_inputs(whole), jaxprs.constant_inputs(micro))
    pairs = zip(jaxprs.equations(whole), jaxprs.equations(micro), strict=True)
    for equation, twin in pairs:
        rows.pair(equation.outvars, twin.outvars)
        if not rows.of((*equation.invars, *equation.outvars)):
            continue
        same = have_same_numbers(equation, twin)
        if not same or not rows.is_row_wise(equation, twin):
            return False
    return True


def judged(function: Function) -> tuple[bool, str | None]:
    """Whether a function as a whole is row-wise, and what is known to mix rows."""
    programs = [
        inline_jits(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32)))
        for shape in ((ROWS, OTHER, 4), (MICRO, OTHER, 4))
    ]
    rows = [BatchDims(ROWS // MICRO) for _ in range(2)]
    return rows[0].are_row_wise(*programs), rows[1].find_mixing(*programs)


def loop(x: jax.Array) -> jax.Array:
    """A loop over the other dim, whose carry has rows."""
    step: Any = lambda carry, row: (carry + jnp.sin(row), carry)  # noqa: E731
    carry, kept = lax.scan(step, x[:, 0, 0], x[:, :, 1].T)
    return carry[:, None] * kept.T


def until(x: jax.Array) -> jax.Array:
    """As often as it takes for all rows."""
    return lax.while_loop(lambda v: jnp.any(v < 1), lambda v: v + 1, x)


def by_labels(x: jax.Array) -> jax.Array:
    labels = jnp.argmax(x, -1)
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


TABLE = np.linspace(0, 1, 20, dtype=np.float32).reshape(5, 4)

APART: dict[str, Function] = {
    "elementwise": lambda x: jnp.tanh(x) ** 2 / (1.0 + jnp.abs(x)),
    "clipped": lambda x: jnp.clip(x, -0.5, 0.5),
    "matmul": lambda x: x @ TABLE.T,
    "pairs_in_a_row": lambda x: jnp.einsum("bsd,btd->bst", x, x),
    "softmax": jax.nn.softmax,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "variance_of_a_row": lambda x: x.var((1, 2)),
    "rows_in_another_dim": lambda x: jnp.moveaxis(x, 0, 1).sum(0),
    "rows_and_steps_in_one": lambda x: x.reshape(-1, 4) * 2.0,
    "split_again": lambda x: x.reshape(-1, 4).reshape(-1, OTHER, 4),
    "flattened": lambda x: x.reshape(x.shape[0], -1),
    "cumsum_in_a_row": lambda x: jnp.cumsum(x, 1),
    "sorted_in_a_row": lambda x: jnp.sort(x, -1)[:, :, ::-1],
    "largest_in_a_row": lambda x: lax.top_k(x, 2)[0],
    "shifted_in_a_row": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "with_a_constant": lambda x: jnp.concatenate([x, jnp.ones_like(x)], 1),
    "halves_of_a_row": lambda x: sum(jnp.split(x, 2, axis=2)),
    "stacked": lambda x: jnp.stack([x, x], 1) * 2.0,
    "looked_up": lambda x: jnp.take(TABLE, jnp.argmax(x, -1), axis=0),
    "by_labels": by_labels,
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 4),
    "loop": loop,
    "set_in_a_row": lambda x: lax.dynamic_update_slice(x, x[:, :1], (0, 2, 0)),
    "convolved": lambda x: lax.conv(x, jnp.ones((2, OTHER, 3), x.dtype), (1,), "SAME"),
}
MIXED: dict[str, Function] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x - x.mean(0),
    "softmax_over_rows": lambda x: jax.nn.softmax(x, 0),
    "contrastive": lambda x: x[:, 0] @ x[:, 0].T,
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "shifted": lambda x: lax.pad(x, np.float32(0), [(1, -1, 0)] + [(0, 0, 0)] * 2),
    "first": lambda x: x[:1],
    "first_set": lambda x: lax.dynamic_update_slice(x, jnp.ones_like(x[0:1]), (0,) * 3),
    "scattered": lambda x: x.at[0].set(0.0),
    "added_to_bins": lambda x: jnp.zeros(4).at[jnp.argmax(x[..., 0], 1) % 4].add(1.0),
    "reduced_by_a_function": lambda x: lax.reduce(
        x, np.float32(0), lambda a, b: a + b * 1.5, (0,)
    ),
    "windows_over_rows": lambda x: lax.reduce_window(
        x, np.float32(0), lambda a, b: a * b + a, (2, 1, 1), (1, 1, 1), "SAME"
    ),
    "rows_turned": lambda x: x.reshape(OTHER, -1, 4) * 2.0,
    "numbered": lambda x: x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None],
    "by_the_number_of_rows": lambda x: jax.nn.relu(x / x.shape[0]),
    "until_all_are": until,
    "loop_over_rows": lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[1],
    "permuted": lambda x: x[jnp.argsort(x[:, 0, 0])],
}


def numbers() -> jax.Array:
    shape = (ROWS, OTHER, 4)
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize("name", APART)
def test_what_treats_each_row_by_itself_is_found_to(name):
    function, x = APART[name], numbers()
    assert keeps_apart(function, x)
    whole, parts = function(x), [function(p) for p in jnp.split(x, ROWS // MICRO)]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_never_taken_for_that(name):
    assert not keeps_apart(MIXED[name], numbers())


@pytest.mark.parametrize("name", APART)
def test_a_function_that_treats_each_row_by_itself_is_proven_to(name):
    assert judged(APART[name]) == (True, None)


HIDDEN: dict[str, Function] = {
    "weight_by_the_number_of_rows": lambda x: x * (jnp.asarray(TABLE[0]) / len(x)),
    "power_by_the_number_of_rows": lambda x: x ** x.shape[0],
    "steps_by_the_number_of_rows": lambda x: lax.fori_loop(
        0, x.shape[0], lambda _, v: v * 2, x
    ),
    "weight_in_a_loop": lambda x: lax.scan(
        lambda c, _: (c * (jnp.asarray(TABLE[0]) / len(x)), None), x, length=3
    )[0],
    "window_by_the_number_of_rows": lambda x: x[:, :, 4 - x.shape[0] % 4 :],
    "branch": lambda x: jnp.sin(x) if x.shape[0] > 4 else jnp.cos(x),
    "one_more": lambda x: -jnp.sin(x) if x.shape[0] > 4 else jnp.sin(x),
}


@pytest.mark.parametrize("name", [*MIXED, *HIDDEN])
def test_a_function_that_does_not_is_never_proven_to_and_mostly_found_out(name):
    function = (MIXED | HIDDEN)[name]
    is_row_wise, mixing = judged(function)
    assert not is_row_wise
    # A scatter may look up rows by their numbers; a function may combine anything.
    unknown = (
        *("scattered", "added_to_bins"),
        *("reduced_by_a_function", "windows_over_rows"),
    )
    assert (mixing is not None) == (name not in unknown)


def test_what_mixes_rows_is_said_with_its_line():
    _, found = judged(MIXED["sum"])
    assert found is not None
    assert found.startswith("reduce_sum mixes the rows\nat ")
    assert "test_batch_dims.py:" in found


def test_rows_that_look_themselves_up_are_not_numbered():
    own = lambda x: x[jnp.arange(len(x)), jnp.argmax(x[..., 0], 1)]  # noqa: E731
    assert judged(own) == (False, None)
    numbered = lambda x: own(x) + jnp.arange(len(x), dtype=x.dtype)[:, None]  # noqa: E731
    _, found = judged(numbered)
    assert found is not None
    assert found.startswith("iota numbers the rows")


def test_a_dim_counts_rows_where_it_shrinks_with_the_microbatch():
    whole, micro = (
        jax.make_jaxpr(lambda x: (x, x.T, x[:, :1] + x[:, 0], x.sum()))(
            jax.ShapeDtypeStruct((rows, 4), jnp.float32)
        )
        for rows in (ROWS, MICRO)
    )
    rows = BatchDims(ROWS // MICRO)
    rows.pair(jaxprs.outputs(whole), jaxprs.outputs(micro))
    assert [rows.dim(v) for v in jaxprs.outputs(whole)] == [0, 1, -1, None]
