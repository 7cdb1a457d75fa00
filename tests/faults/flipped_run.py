# SPDX-License-Identifier: Apache-2.0
"""A training run with a device that flips a bit, which may be killed as it ends.

Its arguments are those of ``run_training.py``. The environment says the rest:
``FLIPPED_CALLS=6`` of the step on the device ``FLIPPED_POSITION=3`` of the mesh, and
``KILLED_AFTER=module:name`` the function after whose first call rank 0 is killed.
"""

import importlib
import os
import signal
import sys
from functools import cached_property
from typing import Any

from tessera.train.loop import train
from tessera.train.loop.build_run import Run
from tessera.train.loop.main import main
from tests.train.loop.flipped_step import Flipped


class FlippedRun(Run):
    """A run whose own step flips bits; its repetitions do not."""

    @cached_property
    def step(self) -> Any:
        device = self.mesh.jax.devices.flat[int(os.environ["FLIPPED_POSITION"])]
        calls = {int(call) for call in os.environ["FLIPPED_CALLS"].split(",")}
        return WithPrograms(Run.step.func(self), device.id, calls)  # type: ignore[attr-defined]


class WithPrograms(Flipped):
    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def die_after(place: str) -> None:
    """Have this process killed when a function has been called."""
    module_name, _, name = place.partition(":")
    *path, attribute = name.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, attribute)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, attribute, wrapped)


if __name__ == "__main__":
    train.Run = FlippedRun  # type: ignore[misc]
    if "KILLED_AFTER" in os.environ and os.environ.get("RANK", "0") == "0":
        die_after(os.environ["KILLED_AFTER"])
    sys.exit(main())
