# SPDX-License-Identifier: Apache-2.0
"""Executes a rank's program in a process that the kernel kills with its launcher.

    python -I -S start_rank.py 4711 python run_training.py model=tiny

The launcher runs this file by its path, without imports that take time. Linux kills the
process when its parent dies, whatever both are doing: importing, compiling, or holding
the interpreter's lock. On other systems a rank checks for its launcher when it joins
the others, and four times a second from then on.
"""

import os
import signal
import sys

_PARENT_DEATH_SIGNAL = 1


def main(launcher: int, command: list[str]) -> None:
    """Execute a program that does not outlive its launcher.

    Args:
      launcher: The process that started this one.
      command: The program and its arguments.
    """
    end_with_parent()
    # A launcher that died before the line above is no longer the parent.
    if os.getppid() == launcher:
        os.execvp(command[0], command)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; only Linux can."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    except (ImportError, AttributeError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(128 + signal.SIGTERM)
