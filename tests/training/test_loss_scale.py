# SPDX-License-Identifier: Apache-2.0
"""The loss scale halves when gradients overflow and grows when they long have not."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp

from tessera.training.loss_scale import (
    GROWTH_INTERVAL,
    INITIAL,
    LARGEST,
    SMALLEST,
    LossScale,
)


def state(scale, streak):
    return LossScale(jnp.float32(scale), jnp.int32(streak))


def after(scale, *, finite):
    new = scale.updated(jnp.bool_(finite))
    return float(new.scale), int(new.streak)


def test_it_begins_at_32768():
    first = LossScale.initial()
    assert (float(first.scale), int(first.streak)) == (32768.0, 0)
    assert (first.scale.dtype, first.streak.dtype) == (jnp.float32, jnp.int32)


def test_overflow_halves_it_and_begins_a_new_streak():
    assert after(state(1024, 150), finite=False) == (512.0, 0)


def test_it_holds_while_gradients_are_finite():
    assert after(state(1024, 7), finite=True) == (1024.0, 8)


def test_the_two_hundredth_finite_step_doubles_it():
    assert GROWTH_INTERVAL == 200
    assert after(state(1024, 198), finite=True) == (1024.0, 199)
    assert after(state(1024, 199), finite=True) == (2048.0, 0)


def test_it_does_not_fall_below_one():
    assert SMALLEST == 1.0
    assert after(state(1, 5), finite=False) == (1.0, 0)


def test_it_does_not_grow_beyond_two_to_the_twenty_fourth():
    assert LARGEST == 2.0**24
    assert after(state(LARGEST, 199), finite=True) == (LARGEST, 0)


@hypothesis.settings(max_examples=15)  # a length is a program
@hypothesis.given(st.lists(st.sampled_from([1, 199, 200, 401, -1, -3]), max_size=8))
def test_it_is_always_a_power_of_two_within_its_limits(runs):
    """Runs of finite (positive) and overflowed (negative) steps, against a loop."""
    scale, streak = INITIAL, 0
    for run in runs:
        for _ in range(abs(run)):
            streak += 1
            if run < 0:
                scale, streak = max(scale / 2, 1.0), 0
            elif streak == 200:
                scale, streak = min(scale * 2, 2.0**24), 0
    finite = jnp.array([run > 0 for run in runs for _ in range(abs(run))], bool)
    final, _ = jax.lax.scan(
        lambda s, f: (s.updated(f), None), LossScale.initial(), finite
    )
    assert (float(final.scale), int(final.streak)) == (scale, streak)
