# SPDX-License-Identifier: Apache-2.0
"""Joins the processes of a run, and prepares the devices of its mesh."""

import os
from contextlib import AbstractContextManager
from dataclasses import replace

import jax

from tessera.analysis.trace_events import COMMAND_BUFFERS
from tessera.jax_compat import target_devices
from tessera.tracing.scope import current_plan, set_plan
from tessera.train.config.command_line import Composed
from tessera.train.config.run_config import Config
from tessera.train.loop.folder_lock import FolderLock
from tessera.train.models.definition import DECODER
from tessera.train.runtime.cluster import Cluster, detect
from tessera.train.runtime.compile_cache import open_compile_cache
from tessera.train.runtime.devices import prepare_devices
from tessera.train.runtime.process_group import Processes, Timeouts, joined
from tessera.train.runtime.rank_consistency import module_fingerprint


def join(composed: Composed, lock: FolderLock) -> AbstractContextManager[Processes]:
    """The processes of the run; a dry run is one of its own, and writes nothing."""
    runtime, model = composed.config.runtime, composed.config.model
    is_own = model.definition != DECODER
    modules = (*composed.modules, *((model.definition,) if is_own else ()))
    is_dry = composed.config.training.dry_run
    return joined(
        Cluster(source="a dry run") if is_dry else detect(os.environ),
        {"configuration": composed.flat, "modules": module_fingerprint(modules)},
        shared=str(composed.output_dir.absolute()),
        claim=None if is_dry else lock,
        platform=runtime.platform,
        timeouts=Timeouts(
            runtime.rendezvous_timeout,
            runtime.heartbeat_timeout,
            runtime.shutdown_timeout,
        ),
        deadlines={
            phase: getattr(runtime, f"{phase}_deadline")
            for phase in ("startup", "compile", "step", "evaluation", "rollout", "save")
        },
        grace=runtime.grace_period,
    )


def prepare(settings: Config, num_processes: int) -> str:
    """Find the devices that the mesh asks for, or simulate them; what the log says."""
    platform = settings.runtime.platform
    if settings.runtime.target is not None:
        # Nothing runs, and plugins without devices would complain.
        platform = "cpu"
        target_devices.prepare()
    open_compile_cache(settings.runtime.compile_cache)
    sizes, axes = settings.model.mesh_shape
    devices = prepare_devices(
        # A dry run compiles for devices that need not exist, on a platform that must.
        1 if settings.training.dry_run else settings.model.num_devices,
        platform,
        axes=dict(zip(axes, sizes, strict=True)),
        num_processes=num_processes,
    )
    if settings.training.profile_communication and jax.default_backend() == "gpu":
        # Each kernel is launched by itself.
        set_plan(replace(current_plan(), compiler_options=((COMMAND_BUFFERS, ""),)))
    return devices
