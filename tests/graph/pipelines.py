# SPDX-License-Identifier: Apache-2.0
"""Steps for tests of ``graph.pipeline``, and their numbers on one device.

A step is written once, over a function ``pipe`` that makes a pipeline of stages, or
leaves them alone: what runs on one device knows nothing of microbatches.
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera import graph
from tessera.mesh import Mesh
from tessera.tracing import scope

ONE = Mesh(["dp", "tp"], devices=[0], shape=(1, 1))
TWO = Mesh(["pp"], devices=range(2))
KEY = jax.random.key(1)
ROWS, LENGTH, WIDTH, WORDS = 16, 3, 8, 12

Pipe = Callable[..., Any]
Make = Callable[[Pipe], Callable[..., Any]]


def cases(names: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test, of which all but a few are for ``make test-all``."""
    full = pytest.mark.full
    return [name if name in fast else pytest.param(name, marks=full) for name in names]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def words(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, shape, np.int32)


def weight(name: str, *shape: int) -> Any:
    """A parameter of the stage that is being traced."""
    return scope.parameter(name, shape, init="normal")


def dense(name: str, size: int = WIDTH) -> Any:
    """A stage with a bias, so that no gradient is zero."""

    @graph.stage(name)
    def stage(x: Any) -> Any:
        x = x @ weight("kernel", x.shape[-1], size) + weight("bias", size)
        return x + jnp.tanh(x)

    return stage


def unpiped(stages: Any, batch: Any = None) -> Any:
    del stages, batch
    return lambda body: body


def built(make: Callable[[Pipe], Any], mesh: Mesh, **options: Any) -> Any:
    """A step on a mesh; ``make`` gives its body from a way to make pipelines."""
    pipe = unpiped if mesh is ONE else partial(graph.pipeline, mesh=mesh, **options)
    return graph.training_step(module="step", mesh=mesh)(make(pipe))


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    there = jax.tree_util.tree_leaves_with_path(want)
    for (path, x), y in zip(there, jax.tree.leaves(got), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x) > 0, path
        apart = np.linalg.norm(y - x) / np.linalg.norm(x)
        assert apart <= tolerance, (jax.tree_util.keystr(path), apart)


def same_as_one_device(
    make: Callable[[Pipe], Any],
    batch: Any,
    mesh: Mesh = TWO,
    *,
    tolerance: float = 2e-5,
    **options: Any,
) -> Any:
    """Check a step's results beside those of one device; return the step."""
    plain, piped = built(make, ONE), built(make, mesh, **{"microbatches": 4} | options)
    results = []
    for step, on in ((plain, ONE), (piped, mesh)):
        with on:  # as kernels want it
            step.init(KEY, batch)
            results.append(step(batch))
    close(results[1], results[0], tolerance)
    return piped


BATCH = {
    "x": normal(ROWS, LENGTH, 5),
    "labels": words(ROWS, LENGTH),
    "weights": np.abs(normal(ROWS, LENGTH, seed=4)),
}


# --- a chain of two stages

double = graph.stage("double")(lambda x: 2.0 * x)


def stages(first: Callable[..., Any]) -> list[Any]:
    return [graph.stage("first")(first), double]


def chain(pipe: Pipe, first: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``double(first(...))`` as a pipeline of two stages."""
    both = stages(first)
    body = wraps(first)(lambda *args: both[1](both[0](*args)))
    return pipe(stages=both, **options)(body)


def pipes(microbatches: int = 4, **options: Any) -> Pipe:
    return partial(graph.pipeline, mesh=TWO, microbatches=microbatches, **options)


def same(make: Make, *arguments: Any, microbatches: int = 4, **options: Any) -> None:
    """Check a step beside the same one without a pipeline."""
    want = ts.function(make(lambda **_: lambda body: body))(*arguments)
    pipe = pipes(microbatches, **options)
    close(ts.function(make(pipe), mesh=TWO)(*arguments), want)
