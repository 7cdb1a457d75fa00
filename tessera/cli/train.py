# SPDX-License-Identifier: Apache-2.0
"""``tessera train``: train a model with the settings of the command line.

Settings are checked before the imports of a run, which take seconds.
"""

from collections.abc import Sequence
from pathlib import Path

from tessera.runtime.exit_codes import end_when_asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line asks; returns the exit code.

    Args:
      arguments: Overrides such as ``training.steps=5``; None takes the process's own.
    """
    end_when_asked()  # there is nothing to save yet
    from tessera.training.command_line import read_command_line, run_composed

    composed = read_command_line(configs_folder(), arguments)
    if isinstance(composed, int):
        return composed
    from tessera.cli.training_run import run
    from tessera.runtime.process_exit import leave

    if code := run_composed(run, composed):
        leave(code)  # the threads of a checkpoint that failed keep Python from its end
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
