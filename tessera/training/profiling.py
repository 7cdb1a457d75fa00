# SPDX-License-Identifier: Apache-2.0
"""``training.profile_communication``: what a step sends, and a trace of a few steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax

from tessera.errors import OutputPathError
from tessera.graph.profile import Profile

FIRST: Final = 3
STEPS: Final = 3


def write_profile(folder: Path, profile: Profile) -> None:
    """Write the step's collectives and balance as ``collectives.txt`` and ``.json``.

    Raises:
      OutputPathError: [T504] the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "collectives.txt").write_text(profile.as_text() + "\n")
        figures = json.dumps(profile.as_json(), indent=2)
        (folder / "collectives.json").write_text(figures + "\n")
    except OSError as error:
        raise OutputPathError(
            "the profile cannot be written",
            got=f"{folder}: {error.strerror}",
            fix="make room there, or set training.profile_communication=false",
        ) from error


class Window:
    """Traces a few early steps, for xprof and Perfetto.

    Args:
      folder: Where the trace goes.
      last_step: Steps of the run; of a shorter one fewer steps are traced.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self._folder = folder
        self._start = min(FIRST, last_step)
        self._stop = self._start + STEPS
        self._is_open = False

    def before(self, step: int, drain: Callable[[], None]) -> None:
        """Start or stop the trace where ``step`` is next.

        Args:
          step: The step that is about to start.
          drain: Waits for the steps in flight, which belong to the other side.
        """
        if step == self._start:
            drain()
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._is_open = True
        elif step == self._stop:
            drain()
            self.close()

    def close(self) -> None:
        """Stop the trace, if it runs."""
        if self._is_open:
            jax.profiler.stop_trace()
            self._is_open = False
