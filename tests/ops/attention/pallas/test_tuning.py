# SPDX-License-Identifier: Apache-2.0
"""Tiles are measured when asked to be, kept on disk, and taken by later calls."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera.errors import ImplementationError
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas import tuning
from tessera.ops.attention.pallas.block_sizes import (
    Blocks,
    Hopper,
    Portable,
    Tiles,
    default_for_hopper,
)

SHAPE = (1, 2, 32, 8)
SETTING = Options(causal=True, scale=8**-0.5)
CANDIDATES = [Portable(Blocks(16, 16)), Portable(Blocks(32, 32))]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._read.cache_clear()
    yield tmp_path / "tessera" / "attention"
    tuning._read.cache_clear()


def call(shape=SHAPE, dtype="float32"):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return Operands(x, x, x)


def kernel(operands, setting=SETTING, device=None):
    return tuning.kernel_for(operands, setting, device or Device.here())


def test_what_was_found_best_is_kept_and_taken_by_calls_that_are_alike(folder):
    best = ts.tune_attention(SHAPE, dtype="f32", candidates=CANDIDATES, rounds=1)
    assert best in CANDIDATES
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    kept = json.loads(file.read_text())
    assert kept["kernel"] == {"blocks": list(best.blocks)}
    assert json.loads(kept["case"])["jax"] == jax.__version__
    assert kernel(call()) == best
    for other in (
        kernel(call((1, 2, 64, 8))),
        kernel(call(dtype="bfloat16")),
        kernel(call(), Options(causal=True, scale=1.0, window=4)),
        kernel(call(), device=Device("cpu", "another")),
    ):
        assert other == Portable()


def test_what_cannot_be_trusted_or_read_counts_as_not_tuned(folder):
    def keep(best):
        case = tuning._case(call(), SETTING, Device.here())
        tuning._write(case, best, 1.0)
        return tuning._file(case)

    file = keep(Portable(Blocks(16, 16)))
    assert kernel(call()) == Portable(Blocks(16, 16))
    for spoil in (
        lambda: file.chmod(0o620),
        lambda: file.write_text("{"),
        lambda: file.write_text('{"kernel": {"blocks": [0, 16]}}'),
        lambda: file.write_text('{"kernel": {"forward": [100, 64, 1]}}'),
    ):
        keep(Portable(Blocks(16, 16)))
        spoil()
        tuning._read.cache_clear()
        assert kernel(call()) == Portable()


def test_a_kernel_for_hopper_is_kept_in_both_directions(monkeypatch):
    monkeypatch.setattr(
        "tessera.ops.attention.pallas.kernel_attention.HAS_MOSAIC_GPU_KERNELS", True
    )
    device, operands = Device("cuda", "H", (9, 0)), call((1, 2, 256, 64), "bfloat16")
    assert kernel(operands, device=device) == default_for_hopper(64)
    best = Hopper(Tiles(128, 128, 1), Tiles(128, 64, 3))
    tuning._write(tuning._case(operands, SETTING, device), best, 1.0)
    assert kernel(operands, device=device) == best


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


def test_a_call_measures_nothing_and_writes_nothing(folder, monkeypatch):
    monkeypatch.setattr(tuning, "time", SimpleNamespace())  # no clock to look at
    x = jnp.ones(SHAPE)
    ts.nn.flash_attention(x, x, x, causal=True, implementation="pallas")
    assert not folder.exists()


def test_that_no_candidate_runs_is_an_error_that_says_why():
    with pytest.raises(ImplementationError) as raised:
        ts.tune_attention(SHAPE, candidates=[Portable(Blocks(0, 16))], rounds=1)
    assert "none of the ways to cut attention's work runs here" in str(raised.value)
    assert "Blocks(queries=0, keys=16)" in str(raised.value)
