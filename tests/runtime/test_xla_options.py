# SPDX-License-Identifier: Apache-2.0
"""Flags of XLA are tried in another process before this one has them."""

import os
import subprocess
import sys

import jax
import pytest

from tessera import _jax, errors
from tessera.runtime.xla_options import set_xla_options

KNOWN = "--xla_gpu_enable_latency_hiding_scheduler=true"
FATAL = ["--xla_gpu_enable_triton_softmax_fusion=true", f"{KNOWN[:-4]}perhaps"]


@pytest.fixture
def not_started(monkeypatch):
    """As before the first touch of a device."""
    monkeypatch.setattr(_jax, "backend_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")


def test_flags_come_after_those_of_the_environment(not_started):
    set_xla_options([KNOWN], None)
    assert os.environ["XLA_FLAGS"] == f"--xla_cpu_enable_fast_math=false {KNOWN}"


def test_flags_that_would_end_the_process_are_told_one_by_one(not_started):
    with pytest.raises(errors.SettingValueError) as caught:
        set_xla_options([KNOWN, *FATAL], None)
    assert str(caught.value).splitlines()[:3] == [
        "[T502] XLA does not take runtime.xla_flags",
        f"  got: {FATAL[0]}: there is no such flag",
        f"  got: {FATAL[1]}: it does not take this value",
    ]
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"


@pytest.mark.parametrize("flag", ["flags.txt", "--xla_dump_to=a b", "--jax_x=1", ""])
def test_what_is_no_flag_is_not_tried(not_started, flag):
    with pytest.raises(errors.SettingValueError, match="takes flags of XLA"):
        set_xla_options([flag], None)


def test_a_backend_that_has_started_takes_no_flags():
    jax.devices()
    with pytest.raises(errors.BackendStartedError, match=r"\[T701\]"):
        set_xla_options([KNOWN], None)


def test_the_level_is_jaxs_own():
    try:
        set_xla_options([], "O1")
        assert jax.config.values["jax_optimization_level"] == "O1"
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")


def test_a_run_has_its_flags_and_says_which_it_cannot_have(tmp_path):
    program = [sys.executable, "run_training.py", "training.dry_run=true"]
    refused = subprocess.run(
        [*program, f"runtime.xla_flags='{FATAL[0]}'", f"hydra.run.dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 2
    assert f"[T502] XLA does not take runtime.xla_flags\n  got: {FATAL[0]}" in (
        refused.stderr
    )
