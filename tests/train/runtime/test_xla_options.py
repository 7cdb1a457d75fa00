# SPDX-License-Identifier: Apache-2.0
"""Flags of XLA become options of the compilations of one run."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import pytest

import tessera as ts
from tessera import errors
from tessera.graph.lower.lower_to_jit import options_of
from tessera.jax_compat.workarounds import correct_options
from tessera.tracing import scope
from tessera.train.config.command_line import compose
from tessera.train.loop import run_environment
from tessera.train.loop.main import configs_dir
from tessera.train.runtime.xla_options import compiler_options

KNOWN = "--xla_gpu_enable_latency_hiding_scheduler=true"
UNKNOWN = "--xla_gpu_enable_triton_softmax_fusion=true"
NO_BOOL = f"{KNOWN[:-4]}perhaps"


def test_flags_become_options_and_the_last_of_two_holds():
    flags = ["--xla_cpu_enable_fast_math", KNOWN, "--xla_cpu_enable_fast_math=false"]
    assert compiler_options(flags) == (
        ("xla_cpu_enable_fast_math", False),
        ("xla_gpu_enable_latency_hiding_scheduler", True),
    )
    assert compiler_options([]) == ()


def test_a_flag_that_xla_refuses_is_named():
    with pytest.raises(errors.SettingValueError) as caught:
        compiler_options([KNOWN, UNKNOWN])
    assert str(caught.value).splitlines()[:2] == [
        "[T502] XLA does not take runtime.xla_flags",
        "  got: No such compile option: 'xla_gpu_enable_triton_softmax_fusion'",
    ]
    with pytest.raises(errors.SettingValueError, match="'perhaps' is not a valid bool"):
        compiler_options([NO_BOOL])


@pytest.mark.parametrize(
    "flag",
    [
        *("flags.txt", "--xla_dump_to=a b", "--jax_x=1", ""),
        "--xla_force_host_platform_device_count=8",
    ],
)
def test_what_is_no_flag_of_the_compiler_is_refused(flag):
    with pytest.raises(errors.SettingValueError, match="takes flags of XLA's compiler"):
        compiler_options([flag])


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


def test_a_run_sets_its_flags_and_jaxs_optimization_level(monkeypatch):
    settings = [
        "runtime.optimization_level=O1",
        "runtime.xla_flags='--xla_cpu_enable_fast_math=false'",
    ]
    config = compose(settings, configs_dir()).config
    monkeypatch.setattr(run_environment, "prepare_devices", lambda *_, **__: "devices")
    plan = scope.current_plan()
    try:
        assert run_environment.prepare(config, 1) == "devices"
        assert jax.config.values["jax_optimization_level"] == "O1"
        options = scope.current_plan().compiler_options
        assert options == (("xla_cpu_enable_fast_math", False),)
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
        scope.set_plan(plan)


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


@pytest.mark.full
def test_a_run_has_its_flags_and_says_which_it_cannot_have(tmp_path):
    program = [sys.executable, "run_training.py", "training.dry_run=true"]
    refused = subprocess.run(
        [*program, f"runtime.xla_flags='{UNKNOWN}'", f"hydra.run.dir={tmp_path}"],
        env={**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("[T502] XLA does not take runtime.xla_flags\n")
