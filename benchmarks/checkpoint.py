# SPDX-License-Identifier: Apache-2.0
"""How long a checkpoint lets the training loop wait, and what its checksums cost.

The state of a model with Adam's moments is saved several times by the trainer's own
``Checkpoints``; between the saves, and while they are written, the state is updated and
donated as a step does it. Then a run's look at the newest one is timed: its checksums,
and reading it back.

    python benchmarks/checkpoint.py [--quick] [--json PATH] [--folder FOLDER]
"""

import argparse
import logging
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.dist import simulate_devices
from tessera.train.config.mesh_shape import mesh_of_shape

simulate_devices(4)

import jax  # noqa: E402
import report  # noqa: E402

from tessera.train.checkpoints.checkpoint_folder import (  # noqa: E402
    Checkpoint,
    read_checkpoint,
)
from tessera.train.checkpoints.manifest import NAME, write_manifest  # noqa: E402
from tessera.train.checkpoints.restore_arrays import Restoration  # noqa: E402
from tessera.train.checkpoints.saving import Checkpoints  # noqa: E402
from tessera.train.config.run_config import (  # noqa: E402
    Config,
    ModelConfig,
    TrainingConfig,
)
from tessera.train.data.cursor import Cursor  # noqa: E402
from tessera.train.loop.build_run import Run  # noqa: E402
from tessera.train.loop.train_state import init_state  # noqa: E402
from tessera.train.models.named_models import config_of  # noqa: E402

# Widths of a model of 12 layers: about 30 MB, 200 MB, 1.3 GB of state.
WIDTHS = (128, 512, 1280)
SAVES = 5


def run_of(width: int) -> Run:
    """A run of a model of this width on four devices."""
    config = replace(config_of("tiny"), d_model=width, mlp_dim=4 * width, num_layers=12)
    training = TrainingConfig(steps=10**6, checkpoint_every=1, keep=2)
    model = ModelConfig(name="tiny", mesh_shape=((4,), ("fsdp",)), config=config)
    settings = Config(name="checkpoint", model=model, training=training)
    return Run(settings, mesh_of_shape(model.mesh_shape))


def measure(width: int, folder: Path) -> dict[str, Any]:
    """Saves of one state, as a row of the table."""
    job, key = run_of(width), jax.random.key(0)
    state = init_state(job.model, job.step_config.optimizer, key, job.mesh)
    update = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + x.dtype.type(1), tree),
        donate_argnums=0,
    )
    state = jax.block_until_ready(update(state))
    saves: list[tuple[float, float]] = []
    updates = 0
    with Checkpoints(job, folder, "") as checkpoints:
        for step in range(1, SAVES + 2):
            begun = time.perf_counter()
            checkpoints.save(step, state, Cursor(step, {}))
            blocked_seconds = time.perf_counter() - begun
            while checkpoints.durable_step != step:
                state = jax.block_until_ready(update(state))
                updates += 1
                time.sleep(0.02)  # a step is the accelerator's, not the processor's
            saves.append((blocked_seconds, time.perf_counter() - begun))
    first, *saves = saves  # the first one loads what Orbax needs
    last = folder / str(SAVES + 1)
    (last / NAME).unlink()
    begun = time.perf_counter()
    nbytes = write_manifest(last)
    checksums = time.perf_counter() - begun
    begun = time.perf_counter()
    checkpoint = read_checkpoint(last)
    checked = time.perf_counter()
    assert isinstance(checkpoint, Checkpoint), checkpoint
    jax.block_until_ready(Restoration(checkpoint.metadata, job).restore(checkpoint))
    restored = time.perf_counter()
    gigabytes = nbytes / 1e9
    blocked, total = zip(*saves, strict=True)
    return {
        "GB": round(gigabytes, 3),
        "first blocked ms": round(first[0] * 1e3, 1),
        "blocked ms": report.spread([*blocked]),
        "save s": round(statistics.median(total), 3),
        "blocked %": round(
            100 * statistics.median(blocked) / statistics.median(total), 1
        ),
        "checksums s": round(checksums, 3),
        "checksums s/GB": round(checksums / gigabytes, 2),
        "updates meanwhile": updates,
        "check s": round(checked - begun, 3),
        "restore s": round(restored - checked, 3),
    }


def main(options: argparse.Namespace) -> None:
    """Every size, in a folder of its own."""
    logging.getLogger("tessera").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for width in WIDTHS[:2] if options.quick else WIDTHS:
        report.progress(f"width {width}")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows.append(measure(width, Path(folder)))
    report.show(f"{SAVES} checkpoints of four devices' state", rows, options.json)


if __name__ == "__main__":
    found = report.parser(__doc__)
    found.add_argument("--folder", type=Path, help="on the disk to measure")
    main(found.parse_args())
