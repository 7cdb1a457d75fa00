# SPDX-License-Identifier: Apache-2.0
"""``--multirun``: one run for each combination of values, by Hydra's own launchers.

Hydra's sweeper makes the combinations and its launcher starts them. Each run is a
process of its own, because the number of simulated devices, XLA's flags and the
processes of a run are settled once in a process.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tessera.errors import SettingConflictError, SettingValueError
from tessera.train.runtime.cluster import detect
from tessera.train.runtime.exit_codes import (
    STOP_SIGNALS,
    handled_signals,
    shell_exit_code,
)
from tessera.train.runtime.python_process import module_command


class SweepRunError(RuntimeError):
    """A run of a sweep failed, and has shown why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def sweep(overrides: Sequence[str], config_dir: Path) -> int:
    """Start a run for each combination of the values that overrides list.

    Each run checks its own settings before it does anything. One that fails does not
    keep Hydra's basic launcher from starting the others.

    Args:
      overrides: Those of the command line, such as ``training.seed=1,2``.
      config_dir: The folder of ``config.yaml``.

    Returns:
      The exit code of the first run that failed, or 0.

    Raises:
      SystemExit: With code 75 or 130, where the sweep was asked to end.
      SettingConflictError: [T507] a launcher has started this process as one of many.
      SettingValueError: [T502] Hydra cannot make runs of the overrides.
    """
    if (cluster := detect(os.environ)).world_size > 1:
        raise SettingConflictError(
            "a sweep starts its runs itself",
            got=f"--multirun in one of {cluster.world_size} processes: {cluster}",
            fix="start the sweep without the launcher, or each run with it",
        )
    task = hydra.main(str(config_dir.resolve()), "config", version_base="1.3")(_run)
    # Otherwise Hydra reports errors itself, without their codes.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    arguments, sys.argv[1:] = sys.argv[1:], ["--multirun", *overrides]
    try:
        task()
    except SweepRunError as error:
        return error.exit_code
    # Hydra has ValueError for a file that is null.
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise SettingValueError(
            "Hydra cannot make a sweep of these overrides",
            got=str(error).splitlines()[0],
            fix="list the values of a setting with commas: training.seed=1,2,3",
        ) from error
    finally:
        sys.argv[1:] = arguments
    return 0


def _run(config: DictConfig) -> None:
    """One run of a sweep, in a process of its own."""
    del config  # the process composes it from the same overrides
    job = HydraConfig.get()
    folder = job.runtime.output_dir.replace("\\", "\\\\").replace("'", "\\'")
    overrides = [*job.overrides.task, f"hydra.run.dir='{folder}'"]
    # In a process group of its own: Ctrl-C reaches it once, through this process.
    process = subprocess.Popen(
        module_command("tessera.train.loop.main", *overrides), process_group=0
    )
    with handled_signals(STOP_SIGNALS, lambda number, _: process.send_signal(number)):
        code = shell_exit_code(process.wait())
    if code in STOP_SIGNALS.values():
        raise SystemExit(code)  # asked to end, and so is the sweep
    if code:
        raise SweepRunError(code)
