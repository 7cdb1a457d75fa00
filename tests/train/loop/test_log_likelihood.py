# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of continuations, beside each row computed by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.errors import OperandError
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop import log_likelihood
from tessera.train.loop.log_likelihood import log_likelihoods
from tessera.train.models import DecoderModel
from tests.small_model import SMALL

MODEL = DecoderModel(SMALL)
MOST = 40
_apply = jax.jit(MODEL.apply)


@pytest.fixture(scope="module")
def params() -> Any:
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def pairs(params: Any) -> list[tuple[list[int], list[int]]]:
    """Contexts and continuations of many lengths; of the last three, likely ones."""
    draw = np.random.Generator(np.random.PCG64(1))

    def ids(size: int) -> list[int]:
        return draw.integers(0, SMALL.vocab_size, size).tolist()

    sizes = [(1, 1), (1, 40), (40, 1), (41, 1), (90, 7), (5, 9), (30, 3), (33, 8)]
    made = [(ids(context), ids(continuation)) for context, continuation in sizes]
    for size, count in ((13, 1), (60, 1), (30, 3)):
        context, tokens = ids(size), list[int]()
        for _ in range(count):
            logits = logits_of(params, [*context, *tokens][-MOST:])
            tokens.append(int(logits[-1].argmax()))
        made.append((context, tokens))
    # All but the one in the middle are the most likely ones.
    made.append((context, [tokens[0], (tokens[1] + 1) % SMALL.vocab_size, tokens[2]]))
    return made


def logits_of(params: Any, ids: list[int]) -> np.ndarray:
    return np.asarray(_apply(params, jnp.array([ids])), np.float64)[0]


def plain(params: Any, context: list[int], continuation: list[int]) -> tuple[Any, bool]:
    """One row without padding, by the definition."""
    ids = [*context, *continuation]
    logits = logits_of(params, ids[-MOST - 1 : -1])[-len(continuation) :]
    totals = np.log(np.exp(logits).sum(axis=1))
    chosen = logits[np.arange(len(continuation)), continuation]
    return (chosen - totals).sum(), bool((logits.argmax(1) == continuation).all())


@pytest.mark.slow(reason="it trains a model and evaluates it")
@pytest.mark.parametrize(
    ("sizes", "batch_size"),
    [
        (None, 4),
        *(pytest.param(n, 3, marks=pytest.mark.full) for n in ((1, 4), (2, 2))),
    ],
)
def test_each_is_that_of_its_row_alone(
    params: Any, pairs: Any, sizes: Any, batch_size: int
) -> None:
    mesh, placed = None, params
    if sizes is not None:
        mesh = mesh_of_shape([sizes, ("fsdp", "tp")])
        placed = MODEL.init(jax.random.key(0), mesh)
    options = {"max_length": MOST, "batch_size": batch_size, "mesh": mesh}
    scored = log_likelihoods(MODEL, placed, pairs, **options)
    expected = [plain(params, *pair) for pair in pairs]
    np.testing.assert_allclose(
        [nats for nats, _ in scored], [nats for nats, _ in expected], rtol=1e-5
    )
    assert [greedy for _, greedy in scored] == [greedy for _, greedy in expected]
    assert [greedy for _, greedy in scored[-4:]] == [True, True, True, False]


def test_the_order_and_the_company_of_a_row_change_nothing(
    params: Any, pairs: Any
) -> None:
    options = {"max_length": MOST, "batch_size": 4}
    scored = log_likelihoods(MODEL, params, pairs, **options)
    for one, result in zip(pairs, scored, strict=True):
        (alone,) = log_likelihoods(MODEL, params, [one], **options)
        assert alone == pytest.approx(result, rel=1e-5)
    assert log_likelihoods(MODEL, params, [], **options) == []


def test_lengths_share_two_programs(params: Any, pairs: Any) -> None:
    """Those of 32 tokens and of 40, the most that are read."""
    programs = log_likelihood._scores.alone
    programs.clear_cache()
    log_likelihoods(MODEL, params, pairs, max_length=MOST, batch_size=4)
    assert programs._cache_size() == 2


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [1] * (MOST + 1))])
def test_what_has_no_log_likelihood_is_refused(params: Any, pair: Any) -> None:
    with pytest.raises(OperandError, match="cannot be scored"):
        log_likelihoods(MODEL, params, [([1], [2]), pair], max_length=MOST)
