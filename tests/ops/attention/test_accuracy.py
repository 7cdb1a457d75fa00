# SPDX-License-Identifier: Apache-2.0
"""How far attention by blocks is from the truth, beside how far the reference is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import op
from tessera.ops.attention import tiling
from tessera.ops.attention.dispatch import Operands, Options
from tests.ops.attention import reference

pytestmark = pytest.mark.usefixtures("small_blocks")

# Units in the last place of the largest sum of absolute values that a result is: a
# gradient may be 0 by cancellation, and an error below that is luck.
FLOOR = 2


@pytest.fixture(scope="module")
def small_blocks():
    """Several blocks, the last ones padded, for sequences that a test can afford."""
    before, tiling.MAX_ROWS = tiling.MAX_ROWS, 12
    jax.clear_caches()  # programs of other tests have other blocks
    yield
    tiling.MAX_ROWS = before
    jax.clear_caches()


@dataclass(frozen=True)
class Case:
    """A call, drawn."""

    seed: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    width: int
    dtype: str
    causal: bool
    window: int | None
    soft_cap: float | None
    segments: bool

    def arrays(self) -> list[Any]:
        """Queries, keys, values, and the gradient of what is read."""
        draw = np.random.default_rng(self.seed)
        (heads, groups), (queries, keys) = self.heads, self.lengths
        sizes = (heads, queries), (groups, keys), (groups, keys), (heads, queries)
        return [
            jnp.asarray(draw.normal(size=(2, *size, self.width)), self.dtype)
            for size in sizes
        ]

    def segment_ids(self) -> Any:
        """Runs of tokens."""
        if not self.segments:
            return None
        draw = np.random.default_rng(self.seed + 1)
        ids = draw.integers(0, 3, size=(2, self.lengths[0])).astype("i4")
        return np.sort(ids, axis=1)

    def seen(self) -> Any:
        """bool ``[2 or 1, S, T]``."""
        queries, keys = self.lengths
        distance = np.arange(queries)[:, None] - np.arange(keys)
        seen = np.ones((1, queries, keys), bool)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window is not None:
            seen = seen & (distance < self.window)
        ids = self.segment_ids()
        return seen if ids is None else seen & (ids[:, :, None] == ids[:, None])


@st.composite
def cases(draw: Any) -> Case:
    causal, groups = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    queries = draw(st.integers(1, 40))
    segments = draw(st.booleans())
    is_square = causal or segments
    keys = queries if is_square else draw(st.sampled_from([queries, queries + 9]))
    return Case(
        seed=draw(st.integers(0, 99)),
        heads=(groups * draw(st.sampled_from([1, 3])), groups),
        lengths=(queries, keys),
        width=draw(st.sampled_from([8, 20, 80])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        causal=causal,
        window=draw(st.sampled_from([None, 1, 7, 30])) if causal else None,
        soft_cap=draw(st.sampled_from([None, 0.8, 20.0])),
        segments=segments,
    )


def truth(case: Case) -> tuple[list[Any], list[float]]:
    """What is read and the three gradients, in f64; and what each sums at most."""
    q, k, v, g = (np.asarray(x, np.float64) for x in case.arrays())
    copies, (_, groups) = q.shape[1] // k.shape[1], case.heads
    k, v = (x.repeat(copies, axis=1) for x in (k, v))
    scale, seen = q.shape[-1] ** -0.5, case.seen()[:, None]
    scores, slope = q @ k.swapaxes(2, 3) * scale, 1.0
    if case.soft_cap is not None:
        bent = np.tanh(scores / case.soft_cap)
        scores, slope = case.soft_cap * bent, 1.0 - bent**2
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)
    of_weights = g @ v.swapaxes(2, 3)
    mean = (weights * of_weights).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - mean) * slope * scale

    def grouped(x: Any) -> Any:
        return x.reshape(2, groups, copies, *x.shape[2:]).sum(axis=2)

    def results(weights: Any, of_scores: Any, q: Any, k: Any, v: Any, g: Any) -> Any:
        of_k = grouped(of_scores.swapaxes(2, 3) @ q)
        return [weights @ v, of_scores @ k, of_k, grouped(weights.swapaxes(2, 3) @ g)]

    terms = weights * (np.abs(of_weights) + np.abs(mean)) * slope * scale
    sizes = results(weights, terms, *map(np.abs, (q, k, v, g)))
    return results(weights, of_scores, q, k, v, g), [x.max() for x in sizes]


def by_blocks(case: Case) -> Callable[..., Any]:
    """The call, by blocks in XLA."""

    def read(*operands: Any) -> Any:
        return op.flash_attention(
            *operands,
            causal=case.causal,
            window=case.window,
            soft_cap=case.soft_cap,
            segment_ids=case.segment_ids(),
            implementation="xla",
        )

    return read


def by_reference(case: Case) -> Callable[..., Any]:
    """The call, with a matrix of scores."""
    options = Options(case.causal, case.width**-0.5, case.window, case.soft_cap)

    def read(*operands: Any) -> Any:
        return reference.attend(Operands(*operands, case.segment_ids()), options)

    return read


def found(case: Case, read: Callable[..., Any]) -> list[Any]:
    """The same by an implementation."""
    *operands, cotangent = case.arrays()
    out, pull_back = jax.vjp(read, *operands)
    return [np.asarray(x, np.float64) for x in (out, *pull_back(cotangent))]


@pytest.mark.full
@given(cases())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_blocks_are_at_most_twice_as_far_from_the_truth_as_the_reference(case):
    every = *truth(case), found(case, by_blocks(case)), found(case, by_reference(case))
    for want, size, ours, theirs in zip(*every, strict=True):
        ulp = float(jnp.finfo(case.dtype).eps) * size
        allowed = max(2 * np.abs(theirs - want).max(), FLOOR * ulp)
        assert np.abs(ours - want).max() <= allowed
