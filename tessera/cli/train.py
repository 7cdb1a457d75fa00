# SPDX-License-Identifier: Apache-2.0
"""``tessera train``: train a model with the settings of the command line.

Settings are checked before the imports of a run, which take seconds.
"""

from collections.abc import Sequence
from pathlib import Path

from tessera.runtime.exit_codes import exit_on_stop_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line asks; returns the exit code.

    Args:
      arguments: Overrides such as ``training.steps=5``; None takes the process's own.
    """
    exit_on_stop_signals()  # there is nothing to save yet
    from tessera.training.command_line import read_command_line, run_composed

    composed = read_command_line(configs_folder(), arguments)
    if isinstance(composed, int):
        return composed
    from tessera.cli.training_run import run
    from tessera.runtime.process_exit import exit_now

    if code := run_composed(run, composed):
        # The threads of a failed checkpoint would keep Python from exiting.
        exit_now(code)
    return 0


def configs_folder() -> Path:
    """The folder of ``config.yaml``: inside the installed package, or beside it.

    Example:
      >>> (configs_folder() / "config.yaml").exists()
      True
    """
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
