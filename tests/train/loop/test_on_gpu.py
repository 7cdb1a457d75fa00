# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer on an NVIDIA GPU, beside the same runs on the CPU."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.train.loop import train as train_command
from tessera.train.models import DecoderModel
from tessera.train.rollouts import generate
from tests.on_gpu import only_on_gpu
from tests.small_model import SMALL
from tests.train.config.command_lines import run_from_command_line
from tests.train.loop.short_runs import Ran, run_of, settings_of, train

pytestmark = only_on_gpu

# What changes a run, and how far apart losses may be, relative: GPUs multiply f32 in
# TF32 unless they are told otherwise.
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "f32": ({}, 2e-3),
    "bf16": ({"mixed_precision": "bf16"}, 1e-2),
    "fp16": ({"mixed_precision": "fp16"}, 1e-2),
    "fp8": ({"mixed_precision": "fp8"}, 5e-2),
    "rematerialized": ({"remat": "full"}, 2e-3),
    "fused loss": ({"loss_chunk": 16}, 2e-3),
    "optimizer on the host": ({"offload_optimizer": True}, 2e-3),
    "deterministic": ({"numerics": "deterministic", "reduction_parts": 4}, 2e-3),
}
# Prints the losses of a run, on the CPU.
ON_CPU = """
import json, sys
from pathlib import Path
from tests.train.loop.test_on_gpu import losses, trained
print(json.dumps(losses(trained(sys.argv[1], Path(sys.argv[2])))))
"""
ROOT = Path(__file__).parents[3]
SHORT = ("model=tiny", "training.steps=6", "training.sequence_length=32")
SHORT += ("training.micro_batch_size=2", "training.log_every=1")
SHORT += ("training.validation_sequences=4", "training.sample_length=0")
SHORT += ("training.report=false",)


def trained(name: str, folder: Path) -> Ran:
    settings = settings_of()
    training = dataclasses.replace(
        settings.training, log_every=1, sample_length=0, **SETTINGS[name][0]
    )
    return train(run_of(dataclasses.replace(settings, training=training)), folder)


def losses(ran: Ran) -> list[float]:
    return [step["loss"] for step in ran.steps]


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_near_those_of_the_cpu(name, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", ON_CPU, name, str(tmp_path / "cpu")],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    found = losses(trained(name, tmp_path / "gpu"))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    expected = json.loads(out.splitlines()[-1])
    assert len(found) == len(expected) == 12
    np.testing.assert_allclose(found, expected, rtol=SETTINGS[name][1])


@pytest.mark.parametrize("name", ["f32", "deterministic"])
def test_a_run_again_has_the_same_bits(name, tmp_path):
    one, other = (trained(name, tmp_path / part) for part in ("one", "other"))
    assert one.numbers == other.numbers
    jax.tree.map(np.testing.assert_array_equal, one.state.params, other.state.params)


def test_an_optimizer_on_the_host_gives_the_bits_of_one_on_the_device(tmp_path):
    plain = trained("f32", tmp_path / "plain")
    away = trained("optimizer on the host", tmp_path / "away")
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(away.state.optimizer)
        if leaf.ndim
    }
    assert kinds == {"pinned_host"}
    assert losses(away) == losses(plain)


@pytest.mark.parametrize("numerics", ["fast", "deterministic"])
def test_a_run_goes_on_bit_for_bit(numerics, tmp_path):
    def losses_of(folder: str, *words: str) -> dict[int, float]:
        path = tmp_path / folder
        run = (*SHORT, f"training.numerics={numerics}", f"hydra.run.dir={path}")
        run += ("training.reduction_parts=2",) if numerics == "deterministic" else ()
        words = (*run, "training.checkpoint_every=3", *words)
        assert run_from_command_line(train_command.run, words) == 0
        lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    whole = losses_of("whole")
    resumed = losses_of("on", f"training.resume={tmp_path}/whole/checkpoints/3")
    assert sorted(resumed) == [4, 5, 6]
    assert resumed == {step: whole[step] for step in resumed}


def test_a_run_shows_the_memory_that_it_takes(tmp_path):
    shown = trained("f32", tmp_path).steps[-1]
    assert shown["peak_memory_bytes"] > 10_000


def test_greedy_generation_takes_the_likeliest_token_of_the_whole_sequence():
    model = DecoderModel(SMALL)
    params = model.init(jax.random.key(0))
    prompt = np.random.default_rng(0).integers(0, 64, (3, 9))
    with jax.default_matmul_precision("highest"):
        rows = generate(model, params, prompt, 12, jax.random.key(1), temperature=0.0)
        for length in range(9, 21):
            scores = model.apply(params, jnp.asarray(rows[:, :length]))[:, -1]
            taken = jnp.take_along_axis(scores, rows[:, length, None], 1)[:, 0]
            np.testing.assert_allclose(taken, scores.max(-1), atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_autocast_multiplies_in_a_narrow_dtype_and_sums_in_f32(dtype):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(512, 512)).astype("f4") for _ in range(2))

    @ts.function
    def product(x, w):
        with ts.autocast(dtype):
            return x @ w

    narrow = {"bf16": jnp.bfloat16, "f16": jnp.float16}[dtype]
    rounded = [np.asarray(jnp.asarray(a, narrow), np.float64) for a in (x, w)]
    found = np.asarray(product(x, w), np.float64)
    np.testing.assert_allclose(found, rounded[0] @ rounded[1], atol=1e-3)
