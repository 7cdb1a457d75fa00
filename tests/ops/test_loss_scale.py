# SPDX-License-Identifier: Apache-2.0
"""The loss scale falls when gradients overflow, grows when they long have not, ends."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.errors import LossScaleError, SettingValueError
from tessera.ops.loss_scale import LossScale, all_finite


def state(scale, streak=0, **settings):
    held = LossScale.dynamic(**settings)
    return dataclasses.replace(held, value=jnp.float32(scale), streak=jnp.int32(streak))


def after(scale, *, finite):
    new = scale.adjust(jnp.bool_(finite))
    return float(new.value), int(new.streak)


def test_it_begins_at_32768():
    first = LossScale.dynamic()
    assert (float(first.value), int(first.streak)) == (32768.0, 0)
    assert first.value.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(first)[1:]} == {jnp.dtype("int32")}


def test_overflow_halves_it_and_begins_a_new_streak():
    assert after(state(1024, 150), finite=False) == (512.0, 0)


def test_it_holds_while_gradients_are_finite():
    assert after(state(1024, 7), finite=True) == (1024.0, 8)


def test_the_two_hundredth_finite_step_doubles_it():
    assert after(state(1024, 198), finite=True) == (1024.0, 199)
    assert after(state(1024, 199), finite=True) == (2048.0, 0)


def test_it_does_not_fall_below_one_nor_grow_beyond_two_to_the_twenty_fourth():
    assert after(state(1, 5), finite=False) == (1.0, 0)
    assert after(state(2.0**24, 199), finite=True) == (2.0**24, 0)


def test_growth_backoff_and_interval_are_settings():
    settings = {"growth": 3.0, "backoff": 0.25, "growth_interval": 3}
    mine = state(90, 2, initial=100.0, largest=250.0, **settings)
    assert after(mine, finite=True) == (250.0, 0)
    assert after(mine, finite=False) == (22.5, 0)


@pytest.mark.slow(reason="it compiles several programs")
@hypothesis.settings(max_examples=15)  # a length is a program
@hypothesis.given(st.lists(st.sampled_from([1, 199, 200, 401, -1, -3]), max_size=8))
def test_it_is_always_a_power_of_two_within_its_limits(runs):
    """Runs of finite (positive) and overflowed (negative) steps, against a loop."""
    scale, streak, stalled, overflows = 2.0**15, 0, 0, 0
    for run in runs:
        for _ in range(abs(run)):
            streak += 1
            if run < 0:
                stalled = stalled + 1 if scale == 1.0 else 0
                overflows += 1
                scale, streak = max(scale / 2, 1.0), 0
            else:
                stalled = 0
                if streak == 200:
                    scale, streak = min(scale * 2, 2.0**24), 0
    finite = jnp.array([run > 0 for run in runs for _ in range(abs(run))], bool)
    final, _ = jax.lax.scan(
        lambda s, f: (s.adjust(f), None), LossScale.dynamic(), finite
    )
    expected = [scale, streak, stalled, overflows]
    assert [float(leaf) for leaf in jax.tree.leaves(final)] == expected


# --- the loss, the gradients


def test_a_loss_in_fp16_is_scaled_in_f32():
    scaled = LossScale.dynamic(2.0**24).scale(jnp.float16(3.0))
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 3 * 2.0**24)


def test_small_gradients_in_fp16_survive_being_unscaled():
    tiny = np.float64(1e-9)
    scaled = {"w": jnp.asarray([tiny * 2.0**15], jnp.float16)}
    found = LossScale.dynamic().unscale(scaled)["w"]
    assert found.dtype == jnp.float32
    assert float(found[0]) == pytest.approx(tiny, rel=1e-2)


def test_scaling_and_unscaling_by_a_power_of_two_changes_no_gradient():
    draw = np.random.default_rng(0)
    w, x = (jnp.asarray(draw.normal(size=8), jnp.float32) for _ in range(2))
    scale = LossScale.dynamic()

    @ts.function
    def gradients(w, x, scale):
        loss = jnp.sum(jnp.tanh(w * x))
        return ts.grad(loss, w), scale.unscale(ts.grad(scale.scale(loss), w))

    plain, scaled = gradients(w, x, scale)
    np.testing.assert_array_equal(plain, scaled)


# --- overflow


def test_infinities_and_nans_anywhere_are_not_finite():
    assert all_finite({"a": jnp.ones(3), "b": [jnp.zeros(())]})
    assert not all_finite({"a": jnp.ones(3), "b": [jnp.array([0.0, jnp.inf])]})
    assert not all_finite([jnp.array(jnp.nan, jnp.float16)])
    assert all_finite({})


def test_one_device_that_overflows_counts_for_all(dp_mesh):
    """In an SPMD region each device has its own gradients."""
    values = jnp.ones(8).at[5].set(jnp.inf)

    @ts.op.kernel
    def finite_of(x):
        return jnp.where(all_finite(x), 1.0, 0.0)[None] + 0 * jnp.nan_to_num(x)

    with dp_mesh:
        x = ts.dist.tensor(
            (8,), ts.ShardSpec((0,), ("dp",)), init=lambda k, s, d: values
        )
        np.testing.assert_array_equal(finite_of(x), np.zeros(8))


def test_global_arrays_that_are_split_count_as_a_whole(dp_mesh):
    place = ts.ShardSpec((0,), ("dp",)).named((8,), dp_mesh)
    for bad, expected in ((None, True), (7, False)):
        x = jnp.ones(8) if bad is None else jnp.ones(8).at[bad].set(jnp.nan)
        found = jax.jit(all_finite)(jax.device_put(x, place))
        assert bool(found) == expected


def test_a_step_with_fp16_gradients_leaves_out_what_overflows_and_goes_on():
    @ts.function
    def step(w, x, scale):
        loss = jnp.mean((x * w.astype(jnp.float16)) ** 2)
        gradient = ts.grad(scale.scale(loss), w)
        gradient = scale.unscale(gradient)
        finite = all_finite(gradient)
        new = jnp.where(finite, w - 0.1 * gradient, w)
        return new, scale.adjust(finite), finite

    w, scale = jnp.float32(2.0), LossScale.dynamic(2.0**20)
    x = jnp.full((4,), 1.5, jnp.float16)
    history = []
    for _ in range(16):
        before = float(w)
        w, scale, finite = step(w, x, scale)
        assert bool(finite) or float(w) == before
        history.append(bool(finite))
    assert history == sorted(history), "first overflows, then none"
    assert not history[0]
    assert history[-1]
    assert int(scale.overflows) == history.count(False)
    assert step.num_programs() == 1
    scale.check()


# --- the end


def test_an_overflow_at_the_smallest_scale_is_an_error_with_the_counts():
    scale = LossScale.dynamic(4.0)
    for _ in range(2):
        scale = scale.adjust(jnp.bool_(False))
        scale.check()
    scale = scale.adjust(jnp.bool_(False))
    with pytest.raises(LossScaleError) as caught:
        scale.check()
    assert str(caught.value) == (
        "[T506] gradients overflow with the smallest loss scale\n"
        "  got: loss scale 1, overflows: 1 in a row, 3 in all\n"
        "  fix: use bf16, which needs no loss scale, or a lower learning rate\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T506.html"
    )
    scale.adjust(jnp.bool_(True)).check()


@pytest.mark.parametrize(
    "settings",
    [
        {"initial": 0.5},
        {"growth": 0.5},
        {"backoff": 2.0},
        {"backoff": 0.0},
        {"growth_interval": 0},
        {"largest": 2.0},
        {"patience": 0},
    ],
)
def test_settings_out_of_their_range_are_errors(settings):
    with pytest.raises(
        SettingValueError, match="the options of a loss scale are out of range"
    ):
        LossScale.dynamic(**settings)
