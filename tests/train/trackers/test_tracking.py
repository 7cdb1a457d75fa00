# SPDX-License-Identifier: Apache-2.0
"""What a tracker gets of a run: stand-ins for the libraries, which record their calls.

`test_real_trackers.py` has the libraries themselves.
"""

import json
import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tessera.errors import MissingLibraryError
from tessera.train.loop.metrics import MetricWriter
from tessera.train.loop.run_folder import RunFolder, open_run_folder
from tessera.train.trackers import tracking
from tessera.train.trackers.tracking import check_tracker, tracked

CONFIG = "name: small\ntraining:\n  steps: 8\n  clip_norm: null\n"
ALIVE = 240.0


class Wandb(ModuleType):
    """The part of ``wandb`` that is called."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []
        self.disabled = False
        self.Settings = SimpleNamespace

    def init(self, **given: Any) -> "Wandb":
        self.calls.append(("init", given))
        self.id = given["id"]
        return self

    def define_metric(self, *given: Any, **named: Any) -> None:
        self.calls.append(("define", given, named))

    def log(self, numbers: dict[str, float]) -> None:
        self.calls.append(("log", numbers))

    def mark_preempting(self) -> None:
        self.calls.append("preempting")

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))

    @property
    def lines(self) -> list[dict[str, float]]:
        return [call[1] for call in self.calls if call[0] == "log"]

    @property
    def given(self) -> dict[str, Any]:
        return self.calls[0][1]


class Mlflow(ModuleType):
    """The part of ``mlflow`` that is called, with runs that stay."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: list[Any] = []

    def start_run(self, run_id: str | None = None, **given: Any) -> Any:
        if run_id is None:
            data = SimpleNamespace(params={}, tags={}, metrics=[])
            info = SimpleNamespace(run_id=f"run{len(self.runs)}", status="RUNNING")
            self.runs.append(SimpleNamespace(info=info, data=data))
            run_id = info.run_id
        self.active = next(run for run in self.runs if run.info.run_id == run_id)
        return self.active

    def log_params(self, params: dict[str, str]) -> None:
        assert len(params) <= 100
        assert not params.keys() & self.active.data.params.keys()
        self.active.data.params.update(params)

    def set_tags(self, tags: dict[str, str]) -> None:
        self.active.data.tags.update(tags)

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.active.data.metrics.append((step, numbers))

    def end_run(self, status: str) -> None:
        self.active.info.status = status


@pytest.fixture
def wandb(monkeypatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch) -> Mlflow:
    module = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


@pytest.fixture
def heard() -> Any:
    """Warnings of the log of a run."""
    messages: list[str] = []

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("tessera"), Hearing()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def run(
    tracker: str,
    folder: RunFolder | None,
    lines: list[tuple[int, dict[str, float]]],
    *,
    config: str = CONFIG,
    stopped: bool = False,
) -> None:
    text = f"{config}  tracker: {tracker}\n"
    with (
        tracked(folder, text, lambda: stopped) as track,
        MetricWriter(folder, track) as writer,
    ):
        for step, numbers in lines:
            writer.write(step, numbers)


def test_wandb_gets_every_line_with_the_step_as_a_number(wandb, tmp_path):
    folder = open_run_folder(tmp_path, CONFIG)
    run("wandb", folder, [(1, {"loss": 2.5}), (1, {"val_loss": float("nan")})])
    assert wandb.lines == [{"step": 1, "loss": 2.5}, {"step": 1}]
    assert wandb.given["name"] == "small"
    assert wandb.given["config"] == {
        "name": "small",
        "training": {"steps": 8, "clip_norm": None, "tracker": "wandb"},
    }
    assert wandb.calls[1:3] == [
        ("define", ("step",), {}),
        ("define", ("*",), {"step_metric": "step"}),
    ]
    assert wandb.calls[-1] == ("finish", 0)
    entry = json.loads((tmp_path / "tracker.json").read_text())
    assert entry == {"tracker": "wandb", "id": wandb.given["id"]}


def test_a_resume_in_the_same_folder_goes_on_with_the_same_run(wandb, tmp_path):
    """Steps that the first process did not save come again, and are sent again."""
    run("wandb", open_run_folder(tmp_path, CONFIG), [(1, {"a": 1.0}), (2, {"a": 2.0})])
    first = wandb.given["id"]
    wandb.calls.clear()
    folder = open_run_folder(tmp_path, CONFIG, continued_step=1)
    run("wandb", folder, [(2, {"a": 2.0})])
    assert wandb.given["id"] == first
    assert wandb.given["resume"] == "allow"
    assert wandb.lines == [{"step": 2, "a": 2.0}]


def test_a_run_that_begins_anew_in_its_folder_is_another_run(wandb, tmp_path):
    run("wandb", open_run_folder(tmp_path, CONFIG), [])
    first = wandb.given["id"]
    wandb.calls.clear()
    run("wandb", open_run_folder(tmp_path, CONFIG), [])
    assert wandb.given["id"] != first
    assert json.loads((tmp_path / "tracker.1.json").read_text())["id"] == first


def test_mlflow_gets_the_settings_and_every_line(mlflow, tmp_path):
    folder = open_run_folder(tmp_path, CONFIG)
    run("mlflow", folder, [(1, {"loss": 2.5}), (2, {"loss": 2.0})])
    (opened,) = mlflow.runs
    assert opened.data.metrics == [(1, {"loss": 2.5}), (2, {"loss": 2.0})]
    assert opened.data.params == {
        "name": "small",
        "training.steps": "8",
        "training.clip_norm": "null",
        "training.tracker": "mlflow",
    }
    assert opened.info.status == "FINISHED"


def test_settings_that_a_resume_changes_are_tags_of_mlflow(mlflow, tmp_path):
    """Its parameters never change, and an old value alone would be wrong."""
    run("mlflow", open_run_folder(tmp_path, CONFIG), [])
    longer = CONFIG.replace("steps: 8", "steps: 16\n  seed: 1")
    folder = open_run_folder(tmp_path, longer, continued_step=4)
    run("mlflow", folder, [(5, {"loss": 1.0})], config=longer)
    (opened,) = mlflow.runs
    assert opened.data.params["training.steps"] == "8"
    assert opened.data.params["training.seed"] == "1"
    assert opened.data.tags == {"resumed.training.steps": "16"}
    assert opened.data.metrics == [(5, {"loss": 1.0})]


def test_more_settings_than_mlflow_takes_at_once(mlflow, tmp_path):
    config = CONFIG + "".join(f"  s{number}: 0\n" for number in range(250))
    run("mlflow", open_run_folder(tmp_path, config), [], config=config)
    assert len(mlflow.runs[0].data.params) == 254


@pytest.mark.parametrize(
    ("stopped", "fails", "ends", "status"),
    [
        (False, False, [("finish", 0)], "FINISHED"),
        (True, False, ["preempting", ("finish", 1)], "KILLED"),
        (False, True, [("finish", 1)], "FAILED"),
        (True, True, [("finish", 1)], "FAILED"),
    ],
)
def test_the_tracker_hears_how_the_run_ended(
    wandb, mlflow, tmp_path, stopped, fails, ends, status
):
    for tracker in ("wandb", "mlflow"):
        folder = open_run_folder(tmp_path / tracker, CONFIG)
        try:
            text = f"{CONFIG}  tracker: {tracker}\n"
            with tracked(folder, text, lambda: stopped):
                assert not fails
        except AssertionError:
            assert fails
    assert wandb.calls[3:] == ends
    assert mlflow.runs[0].info.status == status


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_warned_of_once_and_the_run_goes_on(
    wandb, tmp_path, heard, monkeypatch, where
):
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError(f"no network in {where}")

    monkeypatch.setattr(wandb, where, fail)
    folder = open_run_folder(tmp_path, CONFIG)
    run("wandb", folder, [(1, {"a": 1.0}), (2, {"a": 2.0})])
    (message,) = heard
    assert message.startswith("numbers are missing in wandb, and the run goes on: ")
    assert f"no network in {where}" in message
    assert len(folder.metrics.read_text().splitlines()) == 2


def test_one_line_that_fails_does_not_stop_the_next(wandb, tmp_path, heard):
    def log(numbers: dict[str, float]) -> None:
        if numbers["step"] == 1:
            raise ConnectionError("reset")
        wandb.calls.append(("log", numbers))

    wandb.log = log  # type: ignore[method-assign]
    folder = open_run_folder(tmp_path, CONFIG)
    run("wandb", folder, [(1, {"a": 1.0}), (2, {"a": 2.0})])
    assert wandb.lines == [{"step": 2, "a": 2.0}]
    assert len(heard) == 1


def test_a_server_that_does_not_answer_blocks_nothing(
    wandb, tmp_path, heard, monkeypatch
):
    """The queue fills up, and the end waits for so long and no longer."""
    let_go = threading.Event()
    monkeypatch.setattr(wandb, "log", lambda numbers: let_go.wait(ALIVE))
    monkeypatch.setattr(tracking, "_MOST_WAITING", 3)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", {"finished": 0.05})
    folder = open_run_folder(tmp_path, CONFIG)
    run("wandb", folder, [(step, {"a": 1.0}) for step in range(1, 9)])
    let_go.set()
    assert len(folder.metrics.read_text().splitlines()) == 8
    (message,) = heard
    assert "it is 3 lines behind at step" in message


def test_a_disabled_wandb_is_not_taken_for_one_that_tracks(wandb, tmp_path, heard):
    wandb.disabled = True
    run("wandb", open_run_folder(tmp_path, CONFIG), [(1, {"a": 1.0})])
    (message,) = heard
    assert "run wandb login" in message
    assert not (tmp_path / "tracker.json").exists()


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("", 1),
        ("[" * 5000, 1),
        ('{"tracker": "wandb", "id": 7}', 1),
        ('{"tracker": "wandb", "id": "../a"}', 1),
        ('{"tracker": "mlflow", "id": "abc"}', 0),
    ],
)
def test_an_id_that_is_none_begins_a_new_run(wandb, tmp_path, heard, text, warned):
    folder = open_run_folder(tmp_path, CONFIG)
    (tmp_path / "tracker.json").write_text(text)
    run("wandb", folder, [])
    assert len(wandb.given["id"]) == 32
    assert len(heard) == warned


def test_other_processes_and_none_track_nothing(wandb, tmp_path):
    run("wandb", None, [(1, {"a": 1.0})])
    run("none", open_run_folder(tmp_path, CONFIG), [(1, {"a": 1.0})])
    assert wandb.calls == []
    assert not (tmp_path / "tracker.json").exists()


def test_a_library_that_is_not_installed_is_said(monkeypatch, tmp_path):
    """Also where W&B has left a folder of its own name."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    check_tracker("none")
    for _ in range(2):
        with pytest.raises(MissingLibraryError) as caught:
            check_tracker("wandb")
        assert "pip install 'tessera-spmd[wandb]'" in caught.value.fix
        (tmp_path / "wandb").mkdir(exist_ok=True)
    (tmp_path / "wandb" / "__init__.py").touch()
    check_tracker("wandb")
