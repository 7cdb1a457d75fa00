# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of targets: beside full logits, on any mesh, below adapters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.foundations.tree import named_leaves, nest
from tessera.train.loop.scores import make_score_step
from tessera.train.models.decoder.lora import LoraConfig
from tests.train.loop.post_training_runs import (
    LENGTH,
    ONE,
    ROWS,
    TWO_BY_TWO,
    placed,
    preference_run,
)
from tests.train.loop.short_runs import CONFIG

TEMPERATURE = 1.5
FIXED = {"numerics": "deterministic", "reduction_parts": 4}


def rows():
    """Two texts in each row, the targets of the first four and of padding left out."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 264, (ROWS, LENGTH + 1), np.int32)
    segments = np.repeat([1, 2, 0], [9, 5, 2]).astype(np.int32)
    positions = np.concatenate([np.arange(9), np.arange(5), np.zeros(2)])
    targets = tokens[:, 1:].copy()
    targets[:, [0, 1, 2, 3, 8, 13, 14, 15]] = -100
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "segment_ids": np.tile(segments, (ROWS, 1)),
        "positions": np.tile(positions.astype(np.int32), (ROWS, 1)),
    }


def params_of(run):
    """The same numbers on every mesh; adapters that add something."""
    layouts = run.step_config.zero.params
    params = run.model.init(jax.random.key(0), run.mesh, layouts=layouts)
    leaves = named_leaves(params)
    for number, name in enumerate(sorted(run.model.adapters)):
        draw, old = np.random.default_rng(number), leaves[name]
        values = draw.normal(size=old.shape).astype(old.dtype) / 8
        leaves[name] = jax.device_put(values, old.sharding)
    return nest(leaves)


def scored(run, params, **options):
    batch = placed(run, rows())
    score = make_score_step(run.step_config, temperature=TEMPERATURE, **options)
    return np.asarray(score(params, batch)).reshape(ROWS, LENGTH)


def by_logits(run, params):
    """In f64, of logits that the model makes of every row at once."""
    model, batch = run.model, {n: jnp.asarray(a) for n, a in rows().items()}
    logits = jax.jit(lambda p, b: model.logits(p, b, model.place(None)))(params, batch)
    scaled = np.asarray(logits, np.float64) / TEMPERATURE
    logs = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
    targets = rows()["targets"]
    own = np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets < 0, 0.0, own)


@pytest.fixture(scope="module")
def alone():
    run = preference_run()
    params = params_of(run)
    return scored(run, params), by_logits(run, params)


@pytest.mark.slow(reason="compiles scores and logits of a small model")
def test_scores_are_those_of_full_logits(alone):
    scores, expected = alone
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-6)
    assert scores.dtype == np.float32
    assert not scores[rows()["targets"] < 0].any()


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "training"),
    [
        (("fsdp", "tp"), {}),
        (("fsdp", "cp"), {}),
        (("fsdp", "pp"), {}),
        (("dp", "tp"), {"zero_stage": 3}),
    ],
    ids=["fsdp-tp", "fsdp-cp", "fsdp-pp", "dp-tp-zero-3"],
)
def test_a_mesh_scores_each_target_in_its_place(alone, axes, training):
    run = preference_run(mesh=((2, 2), axes), **training)
    np.testing.assert_allclose(scored(run, params_of(run)), alone[0], rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("base", ["none", "int8"])
def test_without_adapters_scores_are_those_of_the_base(base):
    lora = LoraConfig(rank=2, quantize_base=base)
    config = dataclasses.replace(CONFIG, lora=lora, d_model=64, head_dim=16)
    run = preference_run(model={"config": config})
    params = params_of(run)
    none = {
        n: 0 * x if n in run.model.adapters else x
        for n, x in named_leaves(params).items()
    }
    below = scored(run, params, drops_adapters=True)
    np.testing.assert_array_equal(below, scored(run, nest(none)))
    assert np.abs(below - scored(run, params)).max() > 1e-3
    if base == "none":
        plain = preference_run(
            model={"config": dataclasses.replace(config, lora=LoraConfig())}
        )
        kept = {
            n: x for n, x in named_leaves(params).items() if n not in run.model.adapters
        }
        np.testing.assert_allclose(below, scored(plain, nest(kept)), rtol=0, atol=1e-6)


@pytest.mark.full
def test_deterministic_scores_have_the_same_bits_on_a_mesh(optimized):
    runs = [preference_run(mesh=mesh, **FIXED) for mesh in (ONE, TWO_BY_TWO)]
    one, two = (scored(run, params_of(run)) for run in runs)
    assert one.tobytes() == two.tobytes()
