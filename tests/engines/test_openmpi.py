# SPDX-License-Identifier: Apache-2.0
"""Real Open MPI: mpirun starts the ranks, passes a stop on, and starts fewer."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import (
    FEWER,
    LIMIT,
    command,
    curve,
    environment,
    kill,
    num_lines,
    wait_for,
)

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="there is no Open MPI"
)
Start = Callable[[int], subprocess.Popen[bytes]]


@pytest.fixture
def mpirun(tmp_path: Path, cache: Path) -> Iterator[Start]:
    """Starts so many ranks of one device each, on the loopback interface."""
    jobs: list[subprocess.Popen[bytes]] = []
    as_root = dict.fromkeys(
        ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"
    )

    def start(ranks: int) -> subprocess.Popen[bytes]:
        with (tmp_path / "mpirun.log").open("ab") as log:
            job = subprocess.Popen(
                [
                    *("mpirun", "-np", str(ranks), "--oversubscribe"),
                    *("--bind-to", "none", "--mca", "oob_tcp_if_include", "lo"),
                    *("--mca", "btl_tcp_if_include", "lo"),
                    *command(tmp_path / "run", cache, FEWER),
                ],
                env=environment() | as_root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        kill(job)


def test_a_stopped_run_goes_on_with_another_number_of_ranks(
    tmp_path, mpirun, undisturbed_fewer
):
    run, log = tmp_path / "run", tmp_path / "mpirun.log"

    def stopped(job: subprocess.Popen[bytes], by: signal.Signals) -> int:
        before = num_lines(run)
        wait_for(lambda: num_lines(run) >= before + 15, log)
        os.kill(job.pid, by)
        return job.wait(LIMIT)

    assert stopped(mpirun(2), signal.SIGUSR2) == 75, log.read_text()[-5000:]
    # mpirun's own answer to SIGTERM; it gives the ranks one second.
    assert stopped(mpirun(1), signal.SIGTERM) == 1
    assert mpirun(2).wait(LIMIT) == 0, log.read_text()[-5000:]
    text = log.read_text()
    assert text.count("rank 0 of 2, by Open MPI's OMPI_COMM_WORLD_RANK") == 2
    assert "Open MPI's OMPI_COMM_WORLD_RANK started no other" in text
    assert curve(run) == undisturbed_fewer
    assert len(undisturbed_fewer) == FEWER + 2
