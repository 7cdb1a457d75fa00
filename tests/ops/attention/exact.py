# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients written out in NumPy in f64, and how far others are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tessera.ops.attention.dispatch import Operands, Options
from tests.ops.attention import reference

NAMES = ("out", "dq", "dk", "dv")


def drawn(
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    queries: int = 48,
    keys: int = 48,
    width: int = 16,
    dtype: Any = "float32",
) -> tuple[Operands, jax.Array]:
    """Operands, and a gradient of the result."""
    rng = np.random.default_rng(0)
    sizes = [(heads, queries), (groups, keys), (groups, keys), (heads, queries)]
    q, k, v, gradient = (
        jnp.asarray(rng.normal(size=(batch, *size, width)), dtype) for size in sizes
    )
    return Operands(q, k, v), gradient


def exact(
    operands: Operands, setting: Options, gradient: Any, *, size: bool = False
) -> tuple[Any, ...]:
    """The result and the gradients of q, k and v, f64.

    With ``size`` the terms of every sum are added up without their signs: rounding them
    once to f32 is an error of at most these times half a step.
    """
    q, k, v, d = (np.asarray(x, np.float64) for x in (*operands[:3], gradient))
    repeats, groups = q.shape[1] // k.shape[1], k.shape[1]
    k, v = k.repeat(repeats, 1), v.repeat(repeats, 1)
    scores, bend = q @ k.swapaxes(2, 3) * setting.scale, 1.0
    if setting.soft_cap is not None:
        bent = np.tanh(scores / setting.soft_cap)
        scores, bend = bent * setting.soft_cap, 1 - bent**2
    seen = visible(operands, setting)[:, None]
    scores = np.where(seen, scores, -np.inf)
    highest = np.maximum(scores.max(-1, keepdims=True), -1e9)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    out = weights @ v
    of_weights, share = d @ v.swapaxes(2, 3), -(out * d).sum(-1, keepdims=True)
    if size:
        q, k, v, d = (np.abs(x) for x in (q, k, v, d))
        out, of_weights, share = weights @ v, d @ v.swapaxes(2, 3), np.abs(share)
    of_scores = weights * (of_weights + share) * bend * setting.scale

    def over_heads(x: Any) -> Any:
        return x.reshape(x.shape[0], groups, repeats, *x.shape[2:]).sum(2)

    of_k = over_heads(of_scores.swapaxes(2, 3) @ q)
    return out, of_scores @ k, of_k, over_heads(weights.swapaxes(2, 3) @ d)


def visible(operands: Operands, setting: Options) -> np.ndarray:
    """Which keys each query attends to: bool ``[B or 1, S, T]``."""
    queries, keys = operands.q.shape[2], operands.k.shape[2]
    distance = np.arange(queries)[:, None] - np.arange(keys)
    mask = np.ones_like(distance, bool)[None]
    if setting.causal:
        mask = mask & (distance >= 0)
    if setting.window is not None:
        mask = mask & (distance < setting.window)
    if operands.segments is None:
        return mask
    ids = np.asarray(operands.segments)
    return mask & (ids[:, :, None] == ids[:, None])


def with_gradients(
    attend: Callable[[Operands], jax.Array], operands: Operands, gradient: jax.Array
) -> tuple[Any, ...]:
    """What :func:`exact` gives, of another implementation, in one program."""

    def run(arrays: Any, gradient: Any) -> Any:
        out, back = jax.vjp(lambda *x: attend(operands._replace(**named(x))), *arrays)
        return out, *back(gradient)

    return jax.jit(run)(operands[:3], gradient)


def named(arrays: Any) -> dict[str, Any]:
    return dict(zip("qkv", arrays, strict=True))


def errors(results: tuple[Any, ...], wanted: tuple[Any, ...]) -> np.ndarray:
    """The largest difference in each."""
    return np.array(
        [
            np.abs(np.asarray(a, np.float64) - b).max()
            for a, b in zip(results, wanted, strict=True)
        ]
    )


def check_as_exact_as_the_reference(
    attend: Callable[[Operands], jax.Array],
    operands: Operands,
    setting: Options,
    gradient: jax.Array,
    *,
    factor: float = 2,
) -> None:
    """Errors against f64 are within ``factor`` times the reference's in the same dtype.

    The reference is sometimes exact by chance. It is granted what rounds the largest
    result, and what rounds the terms of the largest sum to f32 once.
    """
    wanted = exact(operands, setting, gradient)
    sizes = exact(operands, setting, gradient, size=True)
    ours = errors(with_gradients(attend, operands, gradient), wanted)
    plain = with_gradients(lambda x: reference.attend(x, setting), operands, gradient)
    step, fine = (float(jnp.finfo(x).eps) / 2 for x in (operands.q.dtype, "float32"))
    floor = [
        step * np.abs(x).max() + fine * y.max()
        for x, y in zip(wanted, sizes, strict=True)
    ]
    theirs = np.maximum(errors(plain, wanted), floor)
    assert np.all(ours <= factor * theirs), dict(zip(NAMES, ours / theirs, strict=True))
