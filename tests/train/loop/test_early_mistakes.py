# SPDX-License-Identifier: Apache-2.0
"""A mistake in a setting is told before JAX, which takes seconds, is imported."""

import json
import os
import subprocess
import sys

import pytest

from tests.train.config.command_lines import CONFIGS_DIR, ROOT

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboardX", "rich")

# What a person may write -> the code of what they are told.
MISTAKES = {
    "training.lr=0.1": "T501",
    "trainin.steps=5": "T501",
    "model=gemma3_1": "T403",
    "optimizer=adan": "T505",
    "training.steps=five": "T502",
    "training.steps=99999999999999999999999": "T502",
    "training.mixed_precision=fp4": "T502",
    "training.remat=[full,[none]]": "T502",
    "training.loss_chunk=0": "T502",
    "training.gradient_accumulation_steps=4 training.sync_gradients_every=3": "T503",
    "training.profile_wait=5": "T507",
    "training.pipeline_chunks=2": "T507",
    "training.numerics=deterministic training.reduction_parts=3": "T502",
    "training.numerics=deterministic model.mesh_shape=[[9],[dp]]": "T507",
    "training.gradient_compression=int8": "T501",
    "training.micro_batch_size=1048576 training.sequence_length=16777216 "
    "model.vocab_size=268435456 model.mesh_shape=[[1024],[dp]]": "T503",
    "model.mesh_shape=[[4,2],[fdsp,tp]]": "T103",
    "model.mesh_shape=[[4,2],[tp,tp]]": "T102",
    "model.mesh_shape=[[4],[dp,tp]]": "T101",
    "model.mesh_shape=[[100000000000000000000],[dp]]": "T101",
    "model.vocab_size=9999999999999": "T405",
    "model.num_kv_heads=3": "T405",
    "model.rope_base_local=1e39": "T405",
    "model.router_z_weight=1": "T507",
    "data=text": "T502",
    "data.path=books": "T507",
    "data.synthetic.tokens=99999999999999 data=synthetic": "T502",
    "optimizer.learning_rate=1e39": "T502",
    "optimizer.learning_rate=1e-60": "T502",
    "optimizer.learning_rate=1e36 optimizer.scale_learning_rate=linear "
    "model.mesh_shape=[[1024],[dp]]": "T502",
    "optimizer.beta2=0.9999999999": "T502",
    "optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true": "T507",
    "runtime.platform=abacus": "T502",
    "runtime.step_deadline=1e300": "T502",
    "name=../x": "T504",
    "hydra.run.dir=": "T504",
    "--cfg=hydra": "T501",
}

PROGRAM = f"""
import contextlib, io, json, runpy, sys
from pathlib import Path
from tessera.train.config.command_line import read_command_line

told = {{}}
for line in {list(MISTAKES)!r}:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = read_command_line(Path({str(CONFIGS_DIR)!r}), line.split())
    told[line] = said.getvalue()[1:5] if code == 2 else code
sys.argv[1:] = ["training.lr=0.1"]
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        runpy.run_path({str(ROOT / "run_training.py")!r}, run_name="__main__")
    except SystemExit as end:
        told["the program"] = said.getvalue()[1:5], end.code
print(json.dumps([told, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


@pytest.mark.full
def test_mistakes_are_told_without_jax_flax_optax_orbax_and_grain(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told, heavy = json.loads(done.stdout.splitlines()[-1])  # after lines of Hydra
    assert told == MISTAKES | {"the program": ["T501", 2]}
    assert heavy == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def told():
    """What a process prints that imports more and more, and its errors."""
    program = f"""
import sys
from pathlib import Path
import tessera, tessera.train.commands.launch
print([name for name in {HEAVY!r} if name in sys.modules])
from tessera.train.config.command_line import read_command_line
code = read_command_line(Path({str(CONFIGS_DIR)!r}), ["model.mesh_shape=[[3],[tp]]"])
print(code, [name for name in {HEAVY!r} if name in sys.modules])
print(tessera.Mesh is tessera.dist.Mesh)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout.splitlines(), done.stderr


def test_the_facade_and_the_launcher_import_no_jax(told):
    lines, errors = told
    assert lines[0] == "[]", errors
    assert lines[2] == "True"


def test_what_asks_the_model_needs_no_more_than_the_model(told):
    lines, errors = told
    assert lines[1] == "2 ['jax', 'jaxlib', 'flax', 'optax', 'rich']"
    assert errors.startswith("[T402] ")
