# SPDX-License-Identifier: Apache-2.0
"""The first instructions of a rank: it ends with its launcher, and starts its program.

    python -I -S start_rank.py 4711 python run_training.py model=tiny

The launcher starts this file, by its path and without imports that take time. Linux
kills the process when the one that started it dies, whatever both are doing: importing,
compiling, or holding the interpreter's lock. Elsewhere a rank looks for its launcher
when it joins the others, and four times a second from then on.
"""

import os
import signal
import sys

_PARENT_DEATH_SIGNAL = 1


def main(launcher: int, command: list[str]) -> None:
    """Become a program that does not outlive its launcher.

    Args:
      launcher: The process that started this one.
      command: The program and its arguments.
    """
    end_with_parent()
    # One that died before the line above is nobody's parent any more.
    if os.getppid() == launcher:
        os.execvp(command[0], command)


def end_with_parent() -> None:
    """Ask the system to kill this process when its parent dies; Linux alone can."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    except (ImportError, AttributeError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(128 + signal.SIGTERM)
