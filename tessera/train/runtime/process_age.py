# SPDX-License-Identifier: Apache-2.0
"""How long ago a process began, its imports included."""

import os
import time
from pathlib import Path
from typing import Final

_IMPORTED_AT: Final = time.monotonic()


def process_age(pid: int) -> float:
    """Seconds since a process began.

    Where the system does not say, since this one imported the module.
    """
    try:
        # The 22nd field, behind a name in parentheses that may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_AT
