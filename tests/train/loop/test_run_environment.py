# SPDX-License-Identifier: Apache-2.0
"""What a run prepares: options of XLA for its compilations, and its deadlines."""

from dataclasses import fields, replace

import jax
import pytest

import tessera as ts
from tessera.graph.lower.lower_to_jit import options_of
from tessera.jax_compat.workarounds import correct_options
from tessera.tracing import scope
from tessera.train.config.command_line import compose
from tessera.train.config.run_config import RuntimeConfig
from tessera.train.loop import run_environment
from tessera.train.loop.folder_lock import FolderLock
from tessera.train.loop.main import configs_dir


def test_steps_are_compiled_with_the_options():
    plan = scope.current_plan()
    scope.set_plan(replace(plan, compiler_options=(("xla_nosuch", True),)))
    try:
        lowered = ts.function(lambda x: x + 1).lower(1.0)
    finally:
        scope.set_plan(plan)
    assert options_of(lowered.traced.graph) == {"xla_nosuch": True} | correct_options(
        "cpu"
    )
    with pytest.raises(Exception, match="No such compile option: 'xla_nosuch'"):
        lowered.compile()


def test_a_profiled_run_on_gpus_launches_each_kernel_by_itself(monkeypatch):
    profiled = "training.profile_communication=true"
    config = compose([profiled], configs_dir()).config
    monkeypatch.setattr(run_environment, "prepare_devices", lambda *_, **__: "devices")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plan = scope.current_plan()
    try:
        run_environment.prepare(config, 1)
        options = scope.current_plan().compiler_options
        assert options == (("xla_gpu_enable_command_buffer", ""),)
    finally:
        scope.set_plan(plan)


def test_every_deadline_of_the_settings_is_watched(monkeypatch):
    given = {}
    monkeypatch.setattr(
        run_environment, "joined", lambda *_, **more: given.update(more)
    )
    overrides = "runtime.rollout_deadline=7", "training.dry_run=true"
    run_environment.join(compose(overrides, configs_dir()), FolderLock())
    names = (field.name for field in fields(RuntimeConfig))
    watched = {f"{phase}_deadline" for phase in given["deadlines"]}
    assert watched == {name for name in names if name.endswith("_deadline")}
    assert given["deadlines"]["rollout"] == 7
