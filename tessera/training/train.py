# SPDX-License-Identifier: Apache-2.0
"""One run: join processes, prepare devices, open the folder, then train."""

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import jax

from tessera import _jax_targets
from tessera.mesh import Mesh
from tessera.runtime.cluster import Cluster, detect
from tessera.runtime.compile_cache import make_compile_cache, open_compile_cache
from tessera.runtime.devices import prepare_devices
from tessera.runtime.process_group import Processes, Timeouts, joined
from tessera.runtime.xla_options import compiler_options
from tessera.scope import current_plan, set_plan
from tessera.training.build_run import Run
from tessera.training.checkpoints.choose_checkpoint import choose_start
from tessera.training.checkpoints.saving import Checkpoints
from tessera.training.command_line import Composed
from tessera.training.config import Config
from tessera.training.console import Console, log
from tessera.training.folder_lock import FolderLock
from tessera.training.layout_checks import target_of
from tessera.training.metrics import MetricWriter
from tessera.training.profiling import Window
from tessera.training.run_folder import open_run_folder
from tessera.training.run_summary import dry_run, run_rows
from tessera.training.training_loop import Callbacks, Trainer


def run(composed: Composed) -> None:
    """One run, from its composed configuration, in this process and others."""
    lock = FolderLock()
    with join(composed, lock) as here:
        train(composed, here, lock)


def train(composed: Composed, here: Processes, lock: FolderLock) -> None:
    """This process's part of the run, in a folder that is its own."""
    settings = composed.config
    messages = [str(here.cluster), prepare(settings, here.count), *composed.notes]
    target = target_of(settings)
    run = Run(settings, Mesh.from_shape(settings.model.mesh_shape, target=target))
    run.check()
    if settings.training.dry_run:
        dry_run(run, composed.notes)
        return
    # Nothing but the lock is written before all that can be wrong was looked at.
    corpus = run.load_data()
    choice = choose_start(settings.training.resume, Path(here.shared), here.attempt)
    messages += choice.check(run, corpus, composed.text)
    folder, own, check = None, choice.own_step, lock.check
    make_compile_cache()
    if here.rank == 0:
        folder = open_run_folder(choice.output_dir, composed.text, own, check)
    with (
        MetricWriter(folder) as writer,
        # The launcher says whose line it is.
        Console(
            folder.log if folder else None,
            rank=here.rank,
            num_processes=1 if here.is_launched else here.count,
        ) as console,
        Checkpoints(run, choice.root, composed.text, own, check) as checkpoints,
    ):
        console.show_configuration(composed.text)
        for line in choice.warnings:
            log.warning("%s", line)
        log.info("%s", "\n".join(messages))
        log.info("%s", corpus.describe())
        if not settings.training.eval_only:
            log.info("%s", corpus.describe_epochs(run.num_training_rows))
        log.info("compiling the step")
        here.watchdog.enter("compile")
        console.show_run_table(run_rows(run))
        if here.count > 1:
            here.compare("step", *run.step_fingerprint())
        here.watchdog.enter("startup")
        Trainer(
            *(run, corpus, console, writer, Window.of(run, folder)),
            *(checkpoints, choice.checkpoint),
            callbacks=Callbacks(here.watchdog.enter, here.should_continue),
        ).train()
        here.watchdog.enter("save")
        checkpoints.wait()
        log.info("the run is in %s", choice.output_dir)


def join(composed: Composed, lock: FolderLock) -> AbstractContextManager[Processes]:
    """The processes of the run; a dry run is one of its own, and writes nothing."""
    runtime = composed.config.runtime
    return joined(
        Cluster(source="a dry run")
        if composed.config.training.dry_run
        else detect(
            os.environ,
            coordinator_address=runtime.coordinator_address,
            num_processes=runtime.num_processes,
            process_id=runtime.process_id,
        ),
        {"configuration": composed.of_all_ranks},
        shared=str(composed.output_dir.absolute()),
        claim=None if composed.config.training.dry_run else lock,
        platform=runtime.platform,
        timeouts=Timeouts(
            runtime.rendezvous_timeout,
            runtime.heartbeat_timeout,
            runtime.shutdown_timeout,
        ),
        deadlines={
            phase: getattr(runtime, f"{phase}_deadline")
            for phase in ("startup", "compile", "step", "evaluation", "save")
        },
        grace=runtime.grace_period,
    )


def prepare(settings: Config, num_processes: int) -> str:
    """Find the devices that the mesh asks for, or simulate them; what the log says."""
    platform = settings.runtime.platform
    if settings.runtime.target is not None:
        # Nothing runs, and plugins without devices would complain.
        platform = "cpu"
        _jax_targets.prepare()
    open_compile_cache(settings.runtime.compile_cache)
    if settings.runtime.optimization_level is not None:
        level = settings.runtime.optimization_level
        jax.config.update("jax_optimization_level", level)
    sizes, axes = settings.model.mesh_shape
    devices = prepare_devices(
        # A dry run compiles for devices that need not exist, on a platform that must.
        1 if settings.training.dry_run else settings.model.num_devices,
        platform,
        axes=dict(zip(axes, sizes, strict=True)),
        num_processes=num_processes,
    )
    if flags := (settings.runtime.xla_flags or "").split():
        plan = replace(current_plan(), compiler_options=compiler_options(flags))
        set_plan(plan)
    return devices
