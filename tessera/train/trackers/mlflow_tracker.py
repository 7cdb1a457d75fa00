# SPDX-License-Identifier: Apache-2.0
"""MLflow; its ``MLFLOW_*`` environment variables say where to.

It keeps every value of a step that is repeated after a resume, and shows the last one.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from tessera.train.config.setting_fields import as_yaml, walk
from tessera.train.trackers.tracking import Outcome, TrackedRun

# Of one request, and of one value.
_MOST_PARAMS: Final = 100
_LONGEST_PARAM: Final = 6000
_STATUS: Final[Mapping[Outcome, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
}


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._mlflow, self.run_id = mlflow, run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._mlflow.log_metrics(dict(numbers), step=step)

    def finish(self, outcome: Outcome) -> None:
        """See ``Tracker``."""
        self._mlflow.end_run(_STATUS[outcome])


def open_tracker(run: TrackedRun) -> MlflowTracker:
    """Begin a run, or go on with one."""
    mlflow = import_module("mlflow")

    name = None if run.run_id else run.name
    opened = mlflow.start_run(run_id=run.run_id, run_name=name)
    params = {
        name: as_yaml(value)[:_LONGEST_PARAM] for name, value in walk(run.settings)
    }
    # A parameter never changes in MLflow; tags do.
    before = opened.data.params
    changed = {
        f"resumed.{name}": value
        for name, value in params.items()
        if before.get(name, value) != value
    }
    new = [(name, value) for name, value in params.items() if name not in before]
    for begin in range(0, len(new), _MOST_PARAMS):
        mlflow.log_params(dict(new[begin : begin + _MOST_PARAMS]))
    if changed:
        mlflow.set_tags(changed)
    return MlflowTracker(mlflow, opened.info.run_id)
