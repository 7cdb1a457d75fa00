# SPDX-License-Identifier: Apache-2.0
"""Two thousand steps on eight simulated devices, through the trainer's own loop.

Eight devices on two cores starve each other's collectives when many steps are queued,
and XLA aborts a process after 40 seconds of that. Simulating devices sets PJRT_NPROC
against it, and the loop bounds how far it runs ahead; here both have to hold. A step
that had to wait for a starved one shows in the slowest step.

    python benchmarks/endurance.py [--quick] [--json PATH]
"""

import argparse
import io
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

from tessera.dist import simulate_devices
from tessera.train.config.mesh_shape import mesh_of_shape

simulate_devices(8)

import report  # noqa: E402

from tessera.train.config.run_config import (  # noqa: E402
    Config,
    ModelConfig,
    RuntimeConfig,
    TrainingConfig,
)
from tessera.train.data.data_config import DataConfig  # noqa: E402
from tessera.train.loop.build_run import Run  # noqa: E402
from tessera.train.loop.console import Console  # noqa: E402
from tessera.train.loop.metrics import MetricWriter  # noqa: E402
from tessera.train.loop.training_loop import Trainer  # noqa: E402
from tessera.train.models.named_models import config_of  # noqa: E402

MESHES = {
    "fsdp": ((8,), ("fsdp",)),
    "fsdp×tp": ((2, 4), ("fsdp", "tp")),
}
STEPS, QUICK_STEPS = 2000, 100


class Recorder(MetricWriter):
    """Keeps the losses, and when each was read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.losses: list[float] = []
        self.read_at: list[float] = []

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Called for every step, and for the validation after the last."""
        if "loss" in values:
            self.losses.append(values["loss"])
            self.read_at.append(time.perf_counter())


def endure(mesh: str, steps: int, in_flight: int) -> dict[str, Any]:
    """One run of ``tiny`` on synthetic data, as a row of the table."""
    settings = Config(
        name="endurance",
        model=ModelConfig(
            name="tiny", mesh_shape=MESHES[mesh], config=config_of("tiny")
        ),
        training=TrainingConfig(
            steps=steps,
            sequence_length=32,
            micro_batch_size=1,
            validate_every=0,
            sample_length=0,
        ),
        data=DataConfig(name="synthetic"),
        runtime=RuntimeConfig(max_steps_in_flight=in_flight),
    )
    job = Run(settings, mesh_of_shape(settings.model.mesh_shape))
    recorder = Recorder()
    with Console(None, stream=io.StringIO(), terminal=False) as console:
        Trainer(job, job.load_data(), console, recorder).train()
    seconds = [after - before for before, after in itertools.pairwise(recorder.read_at)]
    return {
        "mesh": mesh,
        "in flight": in_flight,
        "steps": len(recorder.losses),
        "first loss": round(recorder.losses[0], 3),
        "last loss": round(recorder.losses[-1], 3),
        "seconds": round(sum(seconds), 1),
        "median step ms": round(statistics.median(seconds) * 1e3, 1),
        "slowest step ms": round(max(seconds) * 1e3, 1),
        "programs": job.step.num_programs(),
    }


def main(options: argparse.Namespace) -> None:
    """Run as far ahead as by default, and as far as is allowed."""
    steps = QUICK_STEPS if options.quick else STEPS
    runs = [("fsdp×tp", 64)] if options.quick else [("fsdp", 8), ("fsdp×tp", 64)]
    rows = [endure(mesh, steps, in_flight) for mesh, in_flight in runs]
    report.show(f"{steps:,} steps of tiny on 8 simulated devices", rows, options.json)


if __name__ == "__main__":
    main(report.arguments(__doc__))
