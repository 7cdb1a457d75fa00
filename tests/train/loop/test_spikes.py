# SPDX-License-Identifier: Apache-2.0
"""Spikes: the robust z-score, what becomes of a step, and what enters the window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.train.loop.spikes import SpikeGuard, robust_z_score

LOSSES = st.lists(st.floats(0, 100, width=32), min_size=4, max_size=33)
score = jax.jit(robust_z_score)


def reference(values: list[float], value: float) -> float:
    """In NumPy and double precision."""
    median = np.median(values)
    deviation = 1.4826 * np.median(np.abs(np.array(values) - median))
    return (value - median) / max(deviation, 0.01 * abs(median), 1e-6)


@pytest.mark.full
@given(LOSSES, st.floats(0, 1000, width=32))
def test_the_z_score_is_that_of_numpy(values, value):
    got = float(robust_z_score(jnp.array(values, jnp.float32), jnp.float32(value)))
    expected = reference(values, value)
    # Rounding of the differences, by the least deviation that divides them.
    scale = max(0.01 * abs(np.median(values)), 1e-6)
    rounding = 4e-7 * max(np.max(values), value) / scale
    assert got == pytest.approx(expected, rel=1e-4, abs=max(rounding, 1e-5)) or (
        abs(expected) > 1e4
    )


@pytest.mark.parametrize("loss", [0.0, 2.5])
def test_constant_losses_divide_by_no_zero_and_find_no_spike_in_rounding(loss):
    values = jnp.full(8, loss, jnp.float32)
    assert float(score(values, jnp.float32(loss))) == 0.0
    assert abs(float(score(values, jnp.float32(loss) * (1 + 1e-6)))) < 0.01
    assert float(score(values, jnp.float32(loss + 1))) > 30


def test_outliers_in_the_window_do_not_hide_the_next_one():
    values = jnp.array([2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 90.0, 80.0], jnp.float32)
    assert float(score(values, jnp.float32(50.0))) > 100


class Judged:
    """A guard that judges one loss after the other; the norms are 1."""

    def __init__(self, action: str, window: int = 4) -> None:
        self.guard = SpikeGuard(action, 5.0, window)
        self.window = self.guard.empty_window()
        self._judge = jax.jit(self.guard.judge)

    def __call__(self, loss: float, norm: float = 1.0) -> tuple[bool, float]:
        """Whether the step is applied, and whether it is a spike."""
        loss, norm = jnp.float32(loss), jnp.float32(norm)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        accepted, self.window, numbers = self._judge(self.window, loss, norm, finite)
        self.numbers = numbers
        return bool(accepted), float(numbers["spike"])


def test_nothing_is_a_spike_before_the_window_is_full():
    judged = Judged("skip")
    for loss in (2.0, 900.0, 2.0, 2.0):
        assert judged(loss) == (True, 0.0)
        assert np.isnan(judged.numbers["loss_z"])
    assert judged(9.0) == (False, 1.0)


@pytest.mark.parametrize(("action", "applied"), [("warn", True), ("skip", False)])
def test_a_spike_is_applied_but_with_skip(action, applied):
    judged = Judged(action)
    for _ in range(4):
        judged(2.0)
    assert judged(9.0) == (applied, 1.0)
    assert int(judged.window.count) == 4 + applied


def test_a_norm_alone_is_a_spike_and_a_fall_is_none():
    judged = Judged("skip")
    for _ in range(4):
        judged(2.0)
    assert judged(2.0, norm=30.0) == (False, 1.0)
    assert judged(0.1, norm=0.01) == (True, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_no_spike_and_never_enters_the_window(value):
    judged = Judged("warn")
    for loss in (2.0, value, 2.0, value, 2.0, 2.0, value):
        assert judged(loss) == (bool(np.isfinite(loss)), 0.0)
    assert judged.window.losses.tolist() == [2.0] * 4
    assert int(judged.window.count) == 4
    assert judged(9.0)[1] == 1.0


def test_the_window_holds_the_last_accepted_steps():
    judged = Judged("skip")
    for loss in (2.0, 2.1, 2.2, 2.3, 2.4, 99.0, 2.5):
        judged(loss)
    assert sorted(judged.window.losses.tolist()) == pytest.approx([2.2, 2.3, 2.4, 2.5])
