# SPDX-License-Identifier: Apache-2.0
"""Train a model: configuration -> mesh -> model -> compiled step -> loop.

    python run_training.py model=tiny model.mesh_shape=[[4,1],[fsdp,tp]]

``--help`` lists every setting; docs/configuration.md explains them.
"""

import sys
from pathlib import Path

import jax

from tessera.graph.profile_report import of_program
from tessera.mesh import Mesh
from tessera.runtime.devices import prepare_devices
from tessera.training.checkpoints.resuming import choose
from tessera.training.checkpoints.saving import Checkpoints
from tessera.training.command_line import Composed, run_from_command_line
from tessera.training.config import Settings
from tessera.training.console import Console, log
from tessera.training.job import Job
from tessera.training.loop import Trainer
from tessera.training.metrics import MetricWriter
from tessera.training.outputs import open_run_folder
from tessera.training.profiling import Window
from tessera.training.summary import dry_run_text, run_rows


def main(composed: Composed) -> None:
    """One run, from its composed configuration."""
    settings = composed.settings
    told = prepare(settings)
    job = Job(settings, Mesh.from_shape(settings.model.mesh_shape))
    job.check()
    if settings.training.dry_run:
        with Console(None) as console:
            console.show_run_table(run_rows(job))
            log.info("%s", dry_run_text(job))
        return
    # Nothing is written before everything that can be wrong was looked at.
    corpus = job.load_data()
    choice = choose(settings.training.resume, composed.output_dir)
    told += "".join(f"\n{line}" for line in choice.check(job, corpus, composed.text))
    rank, count = jax.process_index(), jax.process_count()
    folder = None
    if rank == 0:
        folder = open_run_folder(choice.output_dir, composed.text, choice.own_step)
    log_file = folder.log if folder else None
    with (
        MetricWriter(folder) as writer,
        Console(log_file, rank=rank, num_processes=count) as console,
        Checkpoints(job, choice.root, composed.text, choice.own_step) as checkpoints,
    ):
        console.show_configuration(composed.text)
        for line in choice.warnings:
            log.warning("%s", line)
        log.info("%s", told)
        log.info("%s", corpus.describe())
        log.info("compiling the step")
        console.show_run_table(run_rows(job))
        window = None
        training = settings.training
        if training.profile_communication and folder is not None:
            window = Window(
                folder.profile,
                lambda: of_program(job.compiled),
                wait=training.profile_wait,
                warmup=training.profile_warmup,
                active=training.profile_active,
            )
        Trainer(
            job, corpus, console, writer, window, checkpoints, choice.checkpoint
        ).run()
        checkpoints.wait()
        log.info("the run is in %s", choice.output_dir)


def prepare(settings: Settings) -> str:
    """Find the devices that the mesh asks for, or simulate them; what the log says."""
    sizes, axes = settings.model.mesh_shape
    return prepare_devices(
        # A dry run compiles for devices that need not exist, on a platform that must.
        1 if settings.training.dry_run else settings.model.num_devices,
        settings.runtime.platform,
        axes=dict(zip(axes, sizes, strict=True)),
    )


if __name__ == "__main__":
    sys.exit(run_from_command_line(main, Path(__file__).parent / "configs"))
