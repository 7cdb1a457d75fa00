# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases; its ``WANDB_*`` environment variables say where to.

Its own steps have to increase, so ours are a number in each line, over which its charts
are drawn. A step that is repeated after a resume is a later line with the same number.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

from tessera.train.trackers.tracking import Outcome, TrackedRun


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run, self.run_id = run, run.id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log({"step": step, **numbers})

    def finish(self, outcome: Outcome) -> None:
        """See ``Tracker``."""
        if outcome == "preempted":
            # With a code that is not 0, the state of the run is "preempted".
            self._run.mark_preempting()
        self._run.finish(exit_code=int(outcome != "finished"))


def open_tracker(run: TrackedRun) -> WandbTracker:
    """Begin a run, or go on with one."""
    wandb = import_module("wandb")

    opened = wandb.init(
        id=run.run_id or uuid4().hex,
        name=run.name,
        dir=str(run.folder),
        config=dict(run.settings),
        resume="allow",
        allow_val_change=True,
        # The log of a run is its own, and no one answers questions in this thread.
        settings=wandb.Settings(console="off", silent=True, login_timeout=1),
    )
    if opened.disabled:
        raise RuntimeError("W&B is disabled, or nobody is logged in: run wandb login")
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")
    return WandbTracker(opened)
