# SPDX-License-Identifier: Apache-2.0
"""One run: join processes, prepare devices, open the folder, then train."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

from tessera.train.checkpoints.checkpoint_folder import Checkpoint
from tessera.train.checkpoints.choose_checkpoint import choose_start
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.command_line import Composed
from tessera.train.config.layout_checks import target_of
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.files.hub import local_path
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console, log, table
from tessera.train.loop.folder_lock import FolderLock
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.profiling import Window
from tessera.train.loop.rollout_batches import open_rollouts
from tessera.train.loop.run_environment import join, prepare
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.loop.run_records import description_of, recorded, reported
from tessera.train.loop.run_summary import dry_run, run_rows, start_rows
from tessera.train.loop.training_loop import Callbacks, Trainer
from tessera.train.models.families.published_files import (
    Published,
    published_texts,
)
from tessera.train.records.phases import PhaseClock
from tessera.train.runtime.compile_cache import make_compile_cache
from tessera.train.runtime.preemption_notices import CLOUDS, preemption_notices
from tessera.train.runtime.process_group import Processes
from tessera.train.runtime.time_limit import time_limit
from tessera.train.trackers.tracking import check_tracker, tracked


def run(composed: Composed) -> None:
    """One run, from its composed configuration, in this process and others."""
    lock, clock, runtime = FolderLock(), PhaseClock(), composed.config.runtime
    with (
        join(composed, lock) as here,
        time_limit(runtime.max_run_time, here.request_stop),
        preemption_notices(CLOUDS[runtime.preemption_notice], here.request_stop),
    ):
        here.watchdog.subscribe(clock.enter)
        train(composed, here, lock, clock)


def _published(composed: Composed, checkpoint: Checkpoint | None) -> Mapping[str, str]:
    """The files of the folder that the model came from, which exports write again."""
    path = composed.config.training.init_from
    if composed.published:
        return composed.published
    if checkpoint is not None:
        return checkpoint.metadata.published
    path = path and local_path(path)
    return published_texts(path) if path and Path(path).is_dir() else {}


def _compile(run: Run, console: Console) -> list[tuple[str, str]]:
    """Compile the step, and show what it takes: its memory, and what it sends."""
    begin = perf_counter()
    *others, memory, sent = rows = run_rows(run)
    title = f"compiled in {perf_counter() - begin:.0f} s"
    console.show_table(title, [memory, sent], table(others))
    return rows


def train(
    composed: Composed, here: Processes, lock: FolderLock, clock: PhaseClock
) -> None:
    """This process's part of the run, in a folder that is its own."""
    settings = composed.config
    devices = prepare(settings, here.count)
    is_alone = here.count == 1 and not here.cluster.notes
    messages = [*([] if is_alone else [str(here.cluster)]), *composed.notes]
    target = target_of(settings)
    run = Run(settings, mesh_of_shape(settings.model.mesh_shape, target=target))
    run.check()
    if settings.training.dry_run:
        dry_run(run, composed.notes, _published(composed, None))
        return
    if here.rank == 0:
        check_tracker(settings.training.tracker)
    # Nothing but the lock is written before all that can be wrong was looked at.
    corpus = run.load_data()
    if here.count > 1:
        here.compare("data", *run.data_fingerprint(corpus))
    choice = choose_start(settings.training.resume, Path(here.shared), here.attempt)
    messages += choice.check(run, corpus, composed.text)
    published = _published(composed, choice.checkpoint)
    enter = here.watchdog.enter
    rollouts = open_rollouts(run, corpus, enter, choice.output_dir, published)
    folder, own, check = None, choice.own_step, lock.check
    make_compile_cache()
    if here.rank == 0:
        folder = open_run_folder(choice.output_dir, composed.text, own, check)
    with (
        tracked(folder, composed.text, here.is_stopped) as track,
        MetricWriter(folder, track) as writer,
        # The launcher says whose line it is.
        Console(
            folder.log if folder else None,
            rank=here.rank,
            num_processes=1 if here.is_launched else here.count,
        ) as console,
        reported(folder if settings.training.report else None),
        recorded(
            folder,
            clock,
            resumed_step=own,
            **description_of(run.mesh, here.count),
        ) as records,
        Checkpoints(
            run, choice.root, composed.text, own, check, published
        ) as checkpoints,
        rollouts or nullcontext(),
    ):
        unusual = (*run.warnings(Published.parse(published)), *corpus.warnings())
        for line in (*choice.warnings, *unusual):
            log.warning("%s", line)
        for line in messages:
            log.info("%s", line)
        begins = start_rows(run, corpus, composed, choice, devices)
        detail = f"{here.cluster}\n{corpus.describe()}\n{composed.text.rstrip()}"
        console.show_table("run", begins, detail)
        log.info("compiling the step")
        enter("compile")
        records.write("program", run=begins, rows=_compile(run, console))
        if here.count > 1:
            here.compare("step", *run.step_fingerprint())
        enter("startup")
        trainer = Trainer(
            run,
            corpus,
            console,
            writer,
            Window.of(run, folder, writer),
            checkpoints,
            choice.checkpoint,
            callbacks=Callbacks(enter, here.should_continue, records, rollouts),
        )
        trainer.train()
        enter("save")
        checkpoints.wait()
        records.write("stop" if trainer.is_stopped else "end", step=trainer.step)
        log.info("the run is in %s", choice.output_dir)
