# SPDX-License-Identifier: Apache-2.0
"""Tiles are measured when asked to be, kept on disk, and taken by later calls."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import ImplementationError
from tessera.ops.attention import xla
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas import block_sizes, kernel_attention, tuning
from tessera.ops.attention.pallas.block_sizes import (
    Hopper,
    Tiles,
    default_for_hopper,
    kernel_for,
)

SHAPE = (1, 2, 32, 64)
SETTING = Options(causal=True, scale=64**-0.5)
CANDIDATES = [
    Hopper(Tiles(128, 128, 1), Tiles(128, 64, 3)),
    Hopper(Tiles(64, 64, 2), Tiles(64, 64, 1)),
]
H200 = Device("cuda", "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    block_sizes._read.cache_clear()
    yield tmp_path / "tessera" / "attention"
    block_sizes._read.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch):
    """This device described as an H200; attention is computed by XLA."""

    def attend_with(kernel, operands, options):
        if kernel.forward.rows == 0:
            raise ValueError("no rows")
        return xla.attend(operands, options)

    monkeypatch.setattr(Device, "here", lambda: H200)
    monkeypatch.setattr(kernel_attention, "HAS_MOSAIC_GPU_KERNELS", True)
    monkeypatch.setattr(kernel_attention, "attend_with", attend_with)
    monkeypatch.setattr(tuning, "attend_with", attend_with)


def call(shape=SHAPE, dtype="bfloat16"):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return Operands(x, x, x)


def kernel(operands, setting=SETTING, device=H200):
    return kernel_for(operands, setting, device)


@pytest.mark.usefixtures("on_hopper")
def test_what_was_found_best_is_kept_and_taken_by_calls_that_are_alike(folder):
    best = ts.tune_attention(SHAPE, candidates=CANDIDATES, rounds=1)
    assert best in CANDIDATES
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    kept = json.loads(file.read_text())
    assert kept["kernel"] == {
        "forward": list(best.forward),
        "backward": list(best.backward),
    }
    assert json.loads(kept["case"])["jax"] == jax.__version__
    assert kernel(call()) == best
    for other in (
        kernel(call((1, 2, 64, 64))),
        kernel(call(dtype="float16")),
        kernel(call(), Options(causal=True, scale=1.0, window=4)),
        kernel(call(), device=Device("cuda", "another", (9, 0))),
    ):
        assert other == default_for_hopper(64)


def test_what_cannot_be_trusted_or_read_counts_as_not_tuned(folder):
    def keep(best):
        block_sizes.store(best, 1.0, call(), SETTING, H200)
        (file,) = folder.iterdir()
        return file

    file = keep(CANDIDATES[0])
    assert kernel(call()) == CANDIDATES[0]
    for spoil in (
        lambda: file.chmod(0o620),
        lambda: file.write_text("{"),
        lambda: file.write_text('{"kernel": {"blocks": [16, 16]}}'),
        lambda: file.write_text(
            '{"kernel": {"forward": [100, 64, 1], "backward": [64, 64, 1]}}'
        ),
        lambda: file.write_text(
            '{"kernel": {"forward": [64, 64, 1], "backward": [64, 0, 1]}}'
        ),
    ):
        keep(CANDIDATES[0])
        spoil()
        block_sizes._read.cache_clear()
        assert kernel(call()) == default_for_hopper(64)


def test_nothing_is_tuned_where_the_kernel_does_not_run(folder):
    with pytest.raises(ImplementationError) as raised:
        ts.tune_attention(SHAPE)
    assert "the kernel for Hopper runs on GPUs of compute capability 9.0" in str(
        raised.value
    )
    assert not folder.exists()


@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_there_is_more_than_one_way_to_cut_in_each_direction(width):
    default = default_for_hopper(width)
    for stage in (tuning._forward_variants, tuning._backward_variants):
        assert len(set(stage(default, width))) > 1


def test_nothing_is_measured_inside_of_a_trace():
    @jax.jit
    def step(x):
        ts.tune_attention(SHAPE)
        return x

    with pytest.raises(ImplementationError) as raised:
        step(1.0)
    assert "nothing runs while a function is traced" in str(raised.value)


@pytest.mark.usefixtures("on_hopper")
def test_a_call_measures_nothing_and_writes_nothing(folder, monkeypatch):
    monkeypatch.setattr(tuning, "time", SimpleNamespace())  # no clock to look at
    x = jnp.ones(SHAPE, jnp.bfloat16)
    ts.nn.flash_attention(x, x, x, causal=True, implementation="pallas")
    assert not folder.exists()


@pytest.mark.usefixtures("on_hopper")
def test_that_no_candidate_runs_is_an_error_that_says_why():
    none = Hopper(Tiles(0, 64, 1), Tiles(64, 64, 1))
    with pytest.raises(ImplementationError) as raised:
        ts.tune_attention(SHAPE, candidates=[none], rounds=1)
    assert "none of the ways to cut attention's work runs here" in str(raised.value)
    assert "forward=Tiles(rows=0, columns=64, slots=1)" in str(raised.value)
    assert "no rows" in str(raised.value)
