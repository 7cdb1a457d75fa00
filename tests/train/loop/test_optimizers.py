# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules against the arithmetic that they stand for."""

import math
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tessera import errors
from tessera.ops.clipping import global_norm
from tessera.train.config.optimizer_config import (
    OPTIMIZERS,
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    check,
)
from tessera.train.loop.optimizers import (
    clip_by_global_norm,
    decay_mask,
    make_optimizer,
    make_schedule,
)

PARAMS = {
    "up": {"kernel": jnp.full((2, 3), 2.0), "bias": jnp.full((2, 3), 2.0)},
    "pre_norm": {"scale": jnp.full((4, 2), 2.0)},
    "embedding": jnp.full((5, 2), 2.0),
    "gain": jnp.full((7,), 2.0),
}


def run(config, gradients, **kwargs):
    """The parameters after one update for each gradient, the same for every number."""
    optimizer, _ = make_optimizer(config, steps=100, **kwargs)

    @jax.jit
    def step(params, state, gradient):
        gradients = jax.tree.map(lambda p: jnp.full_like(p, 1.0) * gradient, params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in gradients:
        params, state = step(params, state, jnp.float32(gradient))
    return params


def constant(config, rate=0.1):
    return replace(config, learning_rate=rate, warmup_steps=0, schedule="constant")


def numbers(tree):
    """The one value of each parameter."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(leaf.ravel()[0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_adamw_is_adam_plus_decay_of_matrices_and_embeddings_only():
    config = constant(AdamWConfig(weight_decay=0.5))
    found = numbers(run(config, [1.0]))
    # The first update of Adam is the gradient's sign, and 0.1 · 0.5 · 2.0 decays.
    for name in ("up/kernel", "embedding"):
        assert found[name] == pytest.approx(2.0 - 0.1 - 0.1, abs=1e-6)
    for name in ("up/bias", "pre_norm/scale", "gain"):
        assert found[name] == pytest.approx(2.0 - 0.1, abs=1e-6)


def test_adam_follows_its_paper():
    config = constant(AdamConfig(beta1=0.8, beta2=0.9, epsilon=1e-3))
    value, mean, square = 2.0, 0.0, 0.0
    gradients = [1.0, -0.5, 3.0]
    for t, g in enumerate(gradients, 1):
        mean, square = 0.8 * mean + 0.2 * g, 0.9 * square + 0.1 * g * g
        unbiased, spread = mean / (1 - 0.8**t), math.sqrt(square / (1 - 0.9**t))
        value -= 0.1 * unbiased / (spread + 1e-3)
    assert numbers(run(config, gradients))["gain"] == pytest.approx(value, rel=1e-6)


def test_sgd_has_momentum_and_nesterov():
    gradients = [1.0, -0.5, 3.0]
    for nesterov in (False, True):
        value, trace = 2.0, 0.0
        for g in gradients:
            trace = 0.9 * trace + g
            value -= 0.1 * (g + 0.9 * trace if nesterov else trace)
        config = constant(SgdConfig(nesterov=nesterov))
        found = numbers(run(config, gradients))["gain"]
        assert found == pytest.approx(value, rel=1e-6)


def test_sgd_without_momentum_keeps_no_memory_of_the_parameters_size():
    optimizer, _ = make_optimizer(SgdConfig(momentum=0.0), steps=10)
    state = optimizer.init(PARAMS)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) <= 1


def test_lion_moves_by_the_sign():
    config = constant(LionConfig(weight_decay=0.0))
    assert numbers(run(config, [5.0]))["gain"] == pytest.approx(2.0 - 0.1, abs=1e-6)
    assert numbers(run(config, [-5.0]))["gain"] == pytest.approx(2.0 + 0.1, abs=1e-6)


@pytest.mark.full
def test_adafactor_keeps_rows_and_columns_only():
    config = AdafactorConfig(least_dim_to_factor=4)
    optimizer, _ = make_optimizer(config, steps=10)
    state = optimizer.init({"w": jnp.ones((64, 32))})
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 64 + 32 + 8
    small = {"w": jnp.full((64, 32), 0.5)}
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, small), state, small)
    # A twentieth of the highest rate in the first of twenty warm-up steps, times 0.5.
    assert float(updates["w"][0, 0]) == pytest.approx(-1e-2 / 20 * 0.5, rel=1e-3)


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_keeps_its_form_and_dtypes_from_step_to_step(name):
    optimizer, _ = make_optimizer(OPTIMIZERS[name](), steps=10, clip_norm=1.0)
    state = optimizer.init(PARAMS)

    def step(state):
        gradients = jax.tree.map(jnp.ones_like, PARAMS)
        return optimizer.update(gradients, state, PARAMS)[1]

    assert jax.tree.map(jax.typeof, jax.eval_shape(step, state)) == jax.tree.map(
        jax.typeof, jax.eval_shape(step, step(state))
    )


def test_the_rate_rises_in_a_line_then_falls_to_its_fraction_at_the_last_step():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.25)
    for schedule, halfway in (("cosine", 1.25), ("linear", 1.25), ("constant", 2.0)):
        rate = make_schedule(replace(config, schedule=schedule), 14)
        rates = [float(rate(step)) for step in range(14)]
        assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
        assert rates[8] == pytest.approx(halfway)
        assert rates[13] == pytest.approx(2.0 if schedule == "constant" else 0.5)
        assert all(a >= b for a, b in pairwise(rates[3:]))


def test_a_warm_up_may_be_a_fraction_of_the_run():
    config = OptimizerConfig(warmup_steps=0.25)
    rates = [make_schedule(c, 16) for c in (config, replace(config, warmup_steps=4))]
    assert [rates[0](step) for step in range(16)] == [
        rates[1](step) for step in range(16)
    ]
    assert [e.code for e in check(AdamWConfig(warmup_steps=1.5))] == ["T502"]


def test_cosine_is_a_cosine():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, final_fraction=0.0)
    rate = make_schedule(config, 10)
    expected = [(1 + np.cos(np.pi * (step + 1) / 10)) / 2 for step in range(10)]
    np.testing.assert_allclose([rate(step) for step in range(10)], expected, atol=1e-7)


def test_a_run_shorter_than_its_warm_up_ends_while_the_rate_rises():
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=20), 5)
    assert [float(rate(step)) for step in range(5)] == pytest.approx(
        [0.05, 0.1, 0.15, 0.2, 0.25]
    )


@pytest.mark.parametrize(
    ("rule", "highest"), [("none", 0.1), ("linear", 0.8), ("sqrt", 0.1 * 8**0.5)]
)
def test_the_rate_is_scaled_by_the_number_of_groups_after_a_warm_up(rule, highest):
    config = SgdConfig(scale_learning_rate=rule, warmup_steps=4, schedule="constant")
    rate = make_schedule(config, 10, world_size=8)
    expected = [highest * share for share in (0.25, 0.5, 0.75, 1.0, 1.0)]
    np.testing.assert_allclose([rate(step) for step in range(5)], expected, rtol=1e-6)


def test_a_scaled_rate_is_what_the_optimizer_uses():
    config = SgdConfig(
        scale_learning_rate="linear", warmup_steps=0, schedule="constant", momentum=0.0
    )
    optimizer, _ = make_optimizer(config, steps=10, world_size=8)
    gradient = jnp.ones(3)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    np.testing.assert_allclose(updates, -0.8 * np.ones(3), rtol=1e-6)


def test_the_schedule_traces_and_is_float32():
    rate = make_schedule(OptimizerConfig(), 10)
    assert jax.jit(rate)(jnp.int32(3)).dtype == jnp.float32
    assert float(jax.jit(rate)(jnp.int32(3))) == float(rate(3))


def test_clipping_scales_all_gradients_together_and_only_down():
    clip = clip_by_global_norm(1.0)
    large = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped, _ = clip.update(large, clip.init(large))
    assert [float(v[0]) for v in clipped.values()] == pytest.approx([0.6, 0.8])
    small = {"a": jnp.array([0.3]), "b": jnp.array([0.4])}
    kept, _ = clip.update(small, clip.init(small))
    assert jax.tree.map(float, jax.tree.map(jnp.squeeze, kept)) == jax.tree.map(
        float, jax.tree.map(jnp.squeeze, small)
    )


def test_clipping_keeps_dtypes_and_spreads_no_nan():
    clip = clip_by_global_norm(1.0)
    mixed = {"a": jnp.array([jnp.nan]), "b": jnp.array([4.0], jnp.bfloat16)}
    kept, _ = clip.update(mixed, clip.init(mixed))
    assert kept["b"].dtype == jnp.bfloat16
    assert float(kept["b"][0]) == 4.0


def test_clipping_acts_before_the_optimizer():
    config = constant(SgdConfig(momentum=0.0), rate=1.0)
    moved = run(config, [10.0], clip_norm=1.0)
    shift = jax.tree.map(lambda after, before: after - before, moved, PARAMS)
    assert float(global_norm(shift)) == pytest.approx(1.0, rel=1e-5)


def test_the_decay_mask_knows_norms_by_name_also_when_they_are_stacked():
    assert decay_mask(PARAMS) == {
        "up": {"kernel": True, "bias": False},
        "pre_norm": {"scale": False},
        "embedding": True,
        "gain": False,
    }


def test_an_unknown_optimizer_is_refused_with_a_hint():
    with pytest.raises(errors.UnknownOptimizerError) as caught:
        make_optimizer(AdamWConfig(name="adamm"), steps=1)
    assert str(caught.value) == (
        "[T505] optimizer.name is what optimizer= chooses, with its settings\n"
        "  got: optimizer.name=adamm\n"
        "  fix: use optimizer=<name>: did you mean 'adam'? Known: 'adamw', 'adam', "
        "'sgd', 'lion', 'adafactor'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T505.html"
    )


def test_a_name_with_another_optimizers_settings_is_refused():
    (error,) = check(AdamWConfig(name="sgd"))
    assert (error.code, error.got) == ("T505", "optimizer.name=sgd")


def test_an_unknown_schedule_is_refused_with_a_hint():
    (error,) = check(AdamWConfig(schedule="cosin"))
    assert str(error) == (
        "[T505] optimizer.schedule does not take this value\n"
        "  got: optimizer.schedule=cosin\n"
        "  fix: did you mean 'cosine'? use cosine, linear or constant\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T505.html"
    )


@pytest.mark.parametrize(
    ("config", "got", "fix"),
    [
        (
            AdamWConfig(learning_rate=-1.0),
            "optimizer.learning_rate=-1.0",
            "use a number above 0",
        ),
        (
            AdamWConfig(learning_rate=math.nan),
            "optimizer.learning_rate=nan",
            "use a number above 0",
        ),
        (
            AdamConfig(beta2=1.0),
            "optimizer.beta2=1.0",
            "use a number at least 0 and below 1",
        ),
        (
            OptimizerConfig(name="x", final_fraction=2.0),
            "optimizer.final_fraction=2.0",
            "use a number from 0 to 1",
        ),
    ],
)
def test_values_out_of_range_are_refused(config, got, fix):
    error = check(config)[-1]
    assert (type(error), error.got, error.fix) == (errors.SettingValueError, got, fix)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_constant_rate_has_no_final_fraction(fraction):
    found = check(SgdConfig(schedule="constant", final_fraction=fraction))
    assert [error.got for error in found] == [
        "optimizer.final_fraction=0.5; optimizer.schedule=constant"
    ] * (fraction == 0.5)


def test_all_mistakes_come_in_one_error():
    with pytest.raises(errors.SettingValueError) as caught:
        make_optimizer(AdamWConfig(beta1=2.0, warmup_steps=-1), steps=1)
    assert str(caught.value) == (
        "[T502] 2 things in the configuration cannot be used\n"
        "  got: 1. [T502] optimizer.warmup_steps does not take this value: "
        "optimizer.warmup_steps=-1\n"
        "  got: 2. [T502] optimizer.beta1 does not take this value: "
        "optimizer.beta1=2.0\n"
        "  fix: 1. use a number of steps, or a fraction below 1, from 0 to 2147483647\n"
        "  fix: 2. use a number at least 0 and below 1\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html"
    )
