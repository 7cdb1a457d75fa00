# SPDX-License-Identifier: Apache-2.0
"""Real Ray Train: workers that fail are started again, and fewer of them go on."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.conftest import (
    ENGINES,
    FEWER,
    LIMIT,
    ROOT,
    curve,
    environment,
    kill,
    num_lines,
    settings,
    wait_for,
)
from tests.faults.test_launch import descendants

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "ip", "setpriv"))),
    reason="Ray listens on all interfaces: this takes a network namespace",
)
Start = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def start_workers(tmp_path: Path, cache: Path) -> Iterator[Start]:
    """Starts the example, and a Ray of its own, where there is only loopback."""
    drivers: list[subprocess.Popen[bytes]] = []
    isolated = 'ip link set lo up && exec "$@"'
    # The paths of Ray's sockets would be too long below tmp_path.
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:
        variables = {
            "PYTHON": sys.executable,
            "RAY_TMPDIR": sockets,
            # No token in the user's home: nobody else is in the network.
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            # By default a busy machine has to start all of Ray in 15 s.
            "RAY_agent_register_timeout_ms": "200000",
        }

        def start(workers: int) -> subprocess.Popen[bytes]:
            with (tmp_path / "ray.log").open("ab") as log:
                driver = subprocess.Popen(
                    [
                        *("unshare", "--map-root-user", "--net", "sh", "-c", isolated),
                        *("sh", f"{ENGINES}/python", "examples/ray_train.py"),
                        *(f"--folder={tmp_path / 'run'}", f"--workers={workers}"),
                        *settings(tmp_path / "run", cache, FEWER),
                    ],
                    cwd=ROOT,
                    env=environment() | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            drivers.append(driver)
            return driver

        yield start
        for driver in drivers:
            kill(driver)


def ranks_of(driver: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a run's ranks."""
    ranks = []
    for pid in descendants(driver.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"run_training.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(pid)
    return ranks


def test_a_run_goes_on_after_failures_and_with_fewer_workers(
    tmp_path, start_workers, undisturbed_fewer
):
    run, log = tmp_path / "run", tmp_path / "ray.log"

    def learned_more() -> None:
        before = num_lines(run)
        wait_for(lambda: num_lines(run) >= before + 15, log)

    def has_started(times: int) -> bool:
        return log.read_text().count("rank 0 of 2, by torchrun's RANK") == times

    driver = start_workers(2)
    learned_more()
    worker = int(Path(f"/proc/{ranks_of(driver)[0]}/stat").read_text().split()[3])
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: has_started(2), log)
    learned_more()
    os.kill(ranks_of(driver)[0], signal.SIGTERM)
    wait_for(lambda: has_started(3), log)
    learned_more()
    kill(driver)
    assert start_workers(1).wait(LIMIT) == 0, log.read_text()[-5000:]
    assert "torchrun's RANK and WORLD_SIZE started no other" in log.read_text()
    assert curve(run) == undisturbed_fewer
    assert len(undisturbed_fewer) == FEWER + 2
