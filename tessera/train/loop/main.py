# SPDX-License-Identifier: Apache-2.0
"""The trainer's entry point: a command line in, the exit code of the run out.

``run_training.py`` and the ``tessera train`` command call ``main``. Mistakes in the
settings are reported before JAX is imported, which takes seconds.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from tessera.errors import TesseraError
from tessera.foundations.config_files import configs_dir
from tessera.train.runtime.exit_codes import exit_on_stop_signals


def main(arguments: Sequence[str] | None = None, notes: Sequence[str] = ()) -> int:
    """Train as the command line says.

    Args:
      arguments: None takes the process's own.
      notes: Lines for the log of the run: how its command line came about.

    Returns:
      The exit code: 0, or that of a coded error, which is shown. A process whose run
      failed or was stopped ends here instead: the threads of an unfinished checkpoint
      would keep Python from its end, and a signal on the way there has no handler.
    """
    with exit_on_stop_signals():  # there is nothing to save yet
        return _main(arguments, notes)


def _main(arguments: Sequence[str] | None, notes: Sequence[str]) -> int:
    # Here, because these imports take seconds.
    from tessera.train.config.command_line import read_command_line

    composed = read_command_line(configs_dir(), arguments)
    if isinstance(composed, int):
        return composed
    composed = replace(composed, notes=(*composed.notes, *notes))
    from tessera.train.loop.train import run
    from tessera.train.runtime.process_exit import exit_now

    code = 0
    try:
        run(composed)
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except SystemExit as stop:
        # Python's own shutdown takes a second, in which a signal would change the code.
        if not isinstance(stop.code, int):
            raise  # of code that the run imports: a message, or nothing
        code = stop.code
    if code:
        exit_now(code)
    return 0
