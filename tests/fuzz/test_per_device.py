# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F821 - dims are strings, which ruff takes for names
"""Random keys and gradients by hand in code per device, beside one device.

A body is a random chain of layers, noise and dropout, and what it returns: rows, their
mean loss, or its gradient, reduced in one way or another. Per device it is refused, or
gives what plain JAX gives for the whole arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist, graph, op
from tessera.errors import CollectiveError, RandomNumbersError

ROWS, WIDTH = 8, 4
KEY = jax.random.key(5)
DRAW = np.random.default_rng(0)
X, W = (DRAW.normal(size=s).astype("f") for s in ((ROWS, WIDTH), (WIDTH, WIDTH)))
REFUSED = CollectiveError, RandomNumbersError


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)


# Of rows, weights and a key: the rows after it. ``keys`` are one for each row.
LAYERS: dict[str, Callable[..., Any]] = {
    "dense": lambda x, w, key, keys: jnp.tanh(x @ w),
    "scale": lambda x, w, key, keys: x * w[0],
    "noise": lambda x, w, key, keys: x + jax.random.normal(key, x.shape),
    "dropout": lambda x, w, key, keys: dropout(x, key),
    "captured": lambda x, w, key, keys: x + jax.random.uniform(KEY, x.shape[1:]),
    "split": lambda x, w, key, keys: (
        x * jax.random.normal(jax.random.split(key)[1], x.shape)
    ),
    "one number": lambda x, w, key, keys: x * jax.random.uniform(key),
    "noisy weights": lambda x, w, key, keys: x @ (w + jax.random.normal(key, w.shape)),
    "of each row": lambda x, w, key, keys: (
        x + jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(keys)
    ),
    "a number in a loop": lambda x, w, key, keys: lax.scan(
        lambda k, row: (jax.random.split(k)[0], row * jax.random.uniform(k)), key, x
    )[1],
    "in a loop": lambda x, w, key, keys: lax.scan(
        lambda c, row: (c, row + jax.random.normal(key, row.shape)), 0, x
    )[1],
}
SAFE = ("dense", "scale", "one number", "noisy weights", "of each row")


@dataclass(frozen=True)
class Body:
    """A drawn chain of layers."""

    layers: tuple[str, ...]

    @classmethod
    def of(cls, draw: Random) -> "Body":
        pool = [*LAYERS] if draw.random() < 0.4 else SAFE
        return cls(tuple(draw.choice(pool) for _ in range(draw.randint(1, 4))))

    def rows(self, w: Any, x: Any, key: Any, keys: Any) -> Any:
        for number, name in enumerate(self.layers):
            x = LAYERS[name](x, w, jax.random.fold_in(key, number), keys)
        return x

    def loss(self, w: Any, x: Any, key: Any, keys: Any) -> Any:
        return jnp.mean(self.rows(w, x, key, keys) ** 2)


def summed(body: Body, w: Any, *rest: Any) -> Any:
    return jax.grad(body.loss)(w, *rest) / lax.axis_size("dp")


def averaged(body: Body, w: Any, *rest: Any) -> Any:
    return dist.all_reduce(jax.grad(body.loss)(w, *rest), axis="dp", op="mean")


def averaged_by_ts(body: Body, w: Any, *rest: Any) -> Any:
    gradient = ts.grad(body.loss(w, *rest), w, allow_unused=True)
    return dist.all_reduce(gradient, axis="dp", op="mean")


def own(body: Body, w: Any, *rest: Any) -> Any:
    return averaged(body, dist.per_device(w, axis="dp"), *rest)


def own_by_ts(body: Body, w: Any, *rest: Any) -> Any:
    return averaged_by_ts(body, dist.per_device(w, axis="dp"), *rest)


def of_the_mean(body: Body, w: Any, *rest: Any) -> Any:
    def loss(w: Any) -> Any:
        return dist.all_reduce(body.loss(w, *rest), axis="dp", op="mean")

    return jax.grad(loss)(w)


def wrapped(body: Body, w: Any, *rest: Any) -> Any:
    mean = dist.average_gradients(optax.identity(), axis="dp")
    gradient = jax.grad(body.loss)(dist.per_device(w, axis="dp"), *rest)
    return mean.update(gradient, mean.init(w))[0]


GRADIENTS = (summed, averaged, averaged_by_ts, own, own_by_ts, of_the_mean, wrapped)


def keys_of_rows() -> Any:
    return jax.random.split(KEY, ROWS)


def close(found: Any, want: Any, what: Any) -> None:
    apart = np.abs(np.asarray(found) - np.asarray(want)).max()
    assert apart <= 2e-4 * (1 + np.abs(np.asarray(want)).max()), what


@pytest.mark.fuzz(sample=10, whole=150)
def test_a_kernel_gives_what_one_device_gives_or_is_refused(seed):
    draw = Random(seed)
    body, devices = Body.of(draw), draw.choice([2, 4, 8])
    gradient = draw.choice([None, *GRADIENTS])
    kernel = op.kernel(body.rows if gradient is None else partial_of(gradient, body))

    def step(w, x, key, keys):
        return kernel(w, x, key, keys)

    mesh = ts.Mesh(["dp"], devices=range(devices))
    specs = {"w": P(), "x": P("dp"), "key": P(), "keys": P("dp")}
    given = W, X, jax.random.key(seed), keys_of_rows()
    try:
        found = ts.function(step, mesh=mesh, in_specs=specs)(*given)
    except REFUSED:
        is_safe = set(body.layers) <= set(SAFE)
        assert not is_safe or gradient in (averaged, averaged_by_ts), body
        return
    want = (body.rows if gradient is None else jax.grad(body.loss))(*given)
    close(found, want, (body, gradient))


def partial_of(gradient: Callable[..., Any], body: Body) -> Callable[..., Any]:
    def mean_gradient(w, x, key, keys):
        return gradient(body, w, x, key, keys)

    return mean_gradient


split = ts.distribute(strategy="tensor_parallel", mesh_axes=["tp"])
# Of features that tp splits, where the rows' own are whole.
HIDDEN: dict[str, Callable[..., Any]] = {
    "activation": jnp.tanh,
    "noise": lambda h: h + jax.random.normal(KEY, h.shape),
    "dropout": lambda h: dropout(h, KEY),
    "noise of features": lambda h: h * jax.random.uniform(KEY, h.shape[1:]),
    "one number": lambda h: h * jax.random.uniform(KEY),
}
WHOLE_ROWS = ("dense", "scale", "noise", "dropout", "captured", "one number")


@pytest.mark.fuzz(sample=5, whole=70)
def test_tensor_parallel_bodies_give_what_one_device_gives_or_are_refused(seed):
    draw = Random(seed)
    before = Body(tuple(draw.choices(WHOLE_ROWS, k=draw.randint(0, 2))))
    after = Body(tuple(draw.choices(WHOLE_ROWS, k=draw.randint(0, 2))))
    hidden = draw.choices([*HIDDEN], k=draw.randint(1, 2))

    def on_features(x, up, down, square, reduce):
        h = before.rows(square, x, KEY, None) @ up
        for name in hidden:
            h = HIDDEN[name](h)
        return after.rows(square, reduce(h @ down), KEY, None)

    @split
    def body(
        x: ts.Tensor["B", "D"],
        up: ts.Tensor["D", "F"],
        down: ts.Tensor["F", "D"],
        square: ts.Tensor["D", "D"],
    ) -> ts.Tensor["B", "D"]:
        return on_features(x, up, down, square, partial(dist.all_reduce, axis="tp"))

    wide = np.random.default_rng(seed).normal(size=(2, WIDTH, 8)).astype("f")
    given = X, wide[0], wide[1].T, W
    try:
        with ts.Mesh(["tp"], devices=range(draw.choice([2, 4]))):
            found = body(*given)
    except REFUSED:
        assert not set(hidden) <= {"activation", "one number"}, hidden
        return
    close(found, on_features(*given, lambda part: part), (before, hidden, after))


@pytest.mark.fuzz(sample=5, whole=80)
def test_stages_give_what_one_device_gives_or_are_refused(seed):
    draw = Random(seed)
    first, second = Body.of(draw), Body.of(draw)
    key = jax.random.key(seed)
    stages = [
        graph.stage(name)(lambda w, x, keys, body=body: body.rows(w, x, key, keys))
        for name, body in (("first", first), ("second", second))
    ]

    def chain(w, x, keys):
        return stages[1](w, stages[0](w, x, keys), keys)

    mesh = ts.Mesh(["pp"], devices=range(2))
    batch = {"stages": stages, "mesh": mesh, "batch": ["x", "keys"]}
    piped = graph.pipeline(microbatches=draw.choice([2, 4]), **batch)(chain)
    given = W, X, keys_of_rows()
    try:
        found = ts.function(piped, mesh=mesh)(*given)
    except REFUSED:
        assert not {*first.layers, *second.layers} <= set(SAFE), (first, second)
        return
    close(found, chain(*given), (first, second))


@pytest.mark.fuzz(sample=5, whole=70)
def test_accumulated_gradients_are_those_of_the_batch_or_are_refused(seed):
    draw = Random(seed)
    body, key = Body.of(draw), jax.random.key(seed)
    microbatches = draw.choice([2, 4])

    def step(w, x, keys):
        def of_part(part):
            return ts.grad(body.loss(w, part[0], key, part[1]), w, allow_unused=True)

        return ts.accumulate_gradients(of_part, (x, keys), microbatches)

    given = W, X, keys_of_rows()
    try:
        found = ts.function(step)(*given)
    except REFUSED:
        assert not set(body.layers) <= set(SAFE), body
        return
    close(found, jax.grad(body.loss)(W, X, key, given[2]), body)
