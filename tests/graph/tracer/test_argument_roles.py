# SPDX-License-Identifier: Apache-2.0
"""What a program does with its inputs: gradients, losses, and new values of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.graph.tracer.argument_roles import gradient_uses, updated_indices
from tessera.jax_compat import jaxprs

W, X, M = (np.full((4, 4), value, np.float32) for value in (1.0, 2.0, 3.0))


def loss_of(w: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def program_of(step: Callable[..., Any]) -> Any:
    return ts.function(step).trace(W, X, M).origin.graph.program


def by_step(step: Callable[..., Any]) -> tuple[str, str]:
    """Which of ``w``, ``x`` and ``m`` are differentiated by, and which losses read."""
    program = program_of(step)
    uses = gradient_uses(program)
    names = dict(zip(jaxprs.inputs(program), "wxm", strict=True))
    return tuple(
        "".join(names[v] for v in names if v in found)
        for found in (uses.differentiated, uses.read)
    )


def in_a_scan(w: Any, x: Any, m: Any) -> Any:
    def body(w: Any, row: Any) -> tuple[Any, None]:
        return w - ts.grad(loss_of(w, row), w) * m, None

    return jax.lax.scan(body, w, jnp.stack([x, x]))[0]


def in_a_branch(w: Any, x: Any, m: Any) -> Any:
    def taken() -> Any:
        return ts.grad(loss_of(w, x), w)

    return jax.lax.cond(m.sum() > 0, taken, lambda: m)


def in_a_loop(w: Any, x: Any, m: Any) -> Any:
    def body(carry: Any) -> Any:
        count, w = carry
        return count + 1, w - ts.grad(loss_of(w, x), w)

    return jax.lax.while_loop(lambda c: c[0] < m.sum(), body, (0.0, w))[1]


STEPS: dict[str, Callable[..., Any]] = {
    "at_once": lambda w, x, m: ts.grad(loss_of(w, x), w) + m,
    "of_a_view": lambda w, x, m: ts.grad(
        loss_of(cast := w.T.astype(jnp.float16).astype(jnp.float32), x), cast
    ),
    "in_a_scan": in_a_scan,
    "in_a_branch": in_a_branch,
    "in_a_loop": in_a_loop,
    "in_a_jitted_function": lambda w, x, m: jax.jit(
        lambda w, x: ts.grad(loss_of(w, x), w)
    )(w, x),
    "of_a_function": lambda w, x, m: ts.value_and_grad(loss_of)(w, x),
    "of_a_function_in_vmap": lambda w, x, m: jax.vmap(
        lambda row: ts.value_and_grad(loss_of)(w, row[None])[1]
    )(x),
}


@pytest.mark.parametrize("name", STEPS)
def test_weights_and_data_are_told_apart_by_the_gradient(name):
    assert by_step(STEPS[name]) == ("w", "wx")


def test_a_derived_value_is_differentiated_by_and_its_inputs_are_not():
    def step(w: Any, x: Any, m: Any) -> Any:
        hidden = x @ w
        return ts.grad(jnp.sum(jnp.sin(hidden)), hidden)

    assert by_step(step) == ("", "wx")


def test_without_a_gradient_nothing_is_known():
    assert by_step(lambda w, x, m: loss_of(w, x) + m) == ("", "")


def test_the_primitive_that_records_a_gradient_compiles_to_nothing():
    step = ts.function(lambda w, x: ts.value_and_grad(loss_of)(w, x))
    plain = jax.jit(jax.value_and_grad(loss_of))
    ours, theirs = step.compile(W, X).jax, plain.lower(W, X).compile()
    assert ours.cost_analysis()["flops"] == theirs.cost_analysis()["flops"]
    with_vmap = jax.jit(jax.vmap(ts.value_and_grad(loss_of), (None, 0)))
    assert with_vmap(W, X[None])[0].shape == (1,)
    slope = jax.grad(lambda w: ts.value_and_grad(loss_of)(w, X)[0])(jnp.asarray(W))
    np.testing.assert_allclose(slope, jax.grad(loss_of)(W, X), rtol=1e-6)


NEW: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "itself": (lambda w, x, m: w, [0]),
    "less_a_step": (lambda w, x, m: w - 0.1 * x / (jnp.sqrt(m) + 1.0), [0]),
    "more_a_step": (lambda w, x, m: jnp.sin(x) + w, [0]),
    "decayed": (lambda w, x, m: 0.9 * m + 0.1 * jnp.sin(w @ x), [2]),
    "decayed_and_less": (lambda w, x, m: (w * 0.99) - m, [0]),
    "if_finite": (lambda w, x, m: jnp.where(jnp.isfinite(m), w - m, w), [0]),
    "if_told": (
        lambda w, x, m: jax.lax.cond(x.sum() > 0, lambda: w - m * x, lambda: w),
        [0],
    ),
    "in_a_jitted_function": (lambda w, x, m: jax.jit(lambda w: w - x)(w), [0]),
    "two": (lambda w, x, m: w + m, [0, 2]),
    "a_product": (lambda w, x, m: w * m, []),
    "another_thing": (lambda w, x, m: jnp.tanh(w), []),
    "a_product_of_matrices": (lambda w, x, m: w @ x, []),
}


@pytest.mark.parametrize("name", NEW)
def test_a_result_is_a_new_value_of_what_it_is_made_from_by_additions(name):
    step, expected = NEW[name]
    assert updated_indices(program_of(step)) == [expected]
