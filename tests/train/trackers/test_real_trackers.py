# SPDX-License-Identifier: Apache-2.0
"""The libraries themselves, with local stores; skipped where they are not installed."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# In a process of its own: the libraries warn, and leave threads and processes.
PROGRAM = """
import sys
from pathlib import Path
from tessera.train.loop.run_folder import open_run_folder
from tessera.train.trackers import tracking
from tessera.train.trackers.tracking import tracked

# A loaded machine takes longer to import a library than a stopped run waits for it.
tracking._FINISH_SECONDS = dict.fromkeys(tracking._FINISH_SECONDS, 120.0)
folder, step, text = sys.argv[1:]
step = int(step)
opened = open_run_folder(Path(folder), text, continued_step=step or None)
with tracked(opened, text, lambda: not step) as log:
    log(step + 1, {"loss": 2.5})
    log(step + 2, {"loss": 2.0, "communication_seconds/dp-fsdp": 0.5})
"""
CONFIG = "name: small\ntraining: {steps: %d, tracker: %s}\n"


def run(tracker: str, folder: Path, step: int, **environment: str) -> str:
    text = CONFIG % (8 + step, tracker)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, str(step), text],
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    assert "numbers are missing" not in ended.stderr
    return str(json.loads((folder / "tracker.json").read_text())["id"])


@pytest.mark.full
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_goes_on_offline_under_the_same_id(tmp_path):
    ids = {run("wandb", tmp_path, step, WANDB_MODE="offline") for step in (0, 1)}
    (run_id,) = ids
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert folders
    assert all(folder.name.endswith(run_id) for folder in folders)
    written = b"".join(file.read_bytes() for f in folders for file in f.glob("*.wandb"))
    assert b"communication_seconds/dp-fsdp" in written


@pytest.mark.full
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_goes_on_in_a_local_store(tmp_path):
    store = tmp_path / "mlruns"
    local = {
        "MLFLOW_TRACKING_URI": store.as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    ids = {run("mlflow", tmp_path, step, **local) for step in (0, 1)}
    (run_id,) = ids
    (folder,) = store.glob(f"*/{run_id}")
    lines = (folder / "metrics/loss").read_text().splitlines()
    # Value and step, of which 2 is there twice: once of each process.
    assert [line.split()[1:3] for line in lines] == [
        *(["2.5", "1"], ["2.0", "2"]),
        *(["2.5", "2"], ["2.0", "3"]),
    ]
    assert (folder / "params/training.steps").read_text() == "8"
    assert (folder / "tags/resumed.training.steps").read_text() == "9"
    assert "status: 3" in (folder / "meta.yaml").read_text()  # FINISHED
