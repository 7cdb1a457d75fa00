# SPDX-License-Identifier: Apache-2.0
"""Small runs of ``run_training.py``, in this process and in others.

The tests of this folder compare runs bit for bit, so all of them compile alike, and
what one has compiled, the others take from the folder of compiled programs.
"""

import os
from pathlib import Path

from tessera.train.loop import train
from tests.train.config.command_lines import run_from_command_line

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "run_training.py")
# Of one layer, without validation, and the same program for any number of steps.
SMALL = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=64"),
    *("runtime.platform=cpu", "data=synthetic", "data.synthetic.tokens=20000"),
    *("data.synthetic.vocab_size=64", "data.validation_fraction=0"),
    *("optimizer=sgd", "optimizer.schedule=constant", "optimizer.warmup_steps=0"),
    *("training.sequence_length=16", "training.micro_batch_size=4"),
    *("training.sample_length=0", "training.report=false", "training.log_every=1"),
)


def environ(**variables: str) -> dict[str, str]:
    """The environment of a run: this one, without what chooses devices and ranks."""
    ours = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    others = ("JAX_", "TESSERA_", "SLURM_")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ours) or not name.startswith(others)
    }
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        **variables,
    }


def train_here(*settings: str) -> int:
    """The exit code of a run in this process, which has eight devices."""
    return run_from_command_line(train.run, settings)
