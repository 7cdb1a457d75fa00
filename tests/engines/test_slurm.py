# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one machine: jobs are stopped, queued again, and changed in size."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tessera.train.runtime.launcher import free_port
from tests.engines.conftest import (
    FEWER,
    LIMIT,
    ROOT,
    curve,
    environment,
    num_lines,
    settings,
    wait_for,
)

DAEMONS = "munged", "slurmctld", "slurmd"
pytestmark = [
    pytest.mark.skipif(
        not all(map(shutil.which, DAEMONS)), reason="there is no Slurm, or no munge"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd has to be started by root"),
]
# A job queued again starts when its credentials are over: after 120 s, or these 5.
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE
"""


class Cluster:
    """A Slurm of one machine, on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "daemons.log"
        self._environ = environment() | {"SLURM_CONF": str(folder / "slurm.conf")}

    def ask(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm writes."""
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self._environ | {"PYTHON": sys.executable},
            check=check,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        ).stdout.strip()

    def submit(self, tasks: int, log: Path, *arguments: str) -> str:
        """Submit the example, with settings, and return the job's number."""
        options = f"--ntasks={tasks}", f"--output={log}", "--parsable"
        script = str(ROOT / "examples/slurm.sh")
        return self.ask("sbatch", *options, script, *arguments)

    def shows(self, job: str, field: str) -> bool:
        """Whether a job is so, such as ``JobState=COMPLETED``."""
        return field in self.ask("scontrol", "show", "job", job).split()

    @contextmanager
    def daemon(self, *command: str) -> Iterator[None]:
        """Run a daemon as a child, and end it."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environ, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def slurm() -> Iterator[Cluster]:
    """The daemons, with a configuration and a key of their own."""
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as daemons:
        folder = Path(name)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(os.urandom(1024))
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                folder=folder,
                ports=(free_port(), free_port()),
            )
        )
        cluster = Cluster(folder)
        files = {
            "socket": folder / "munge.socket",
            "key-file": key,
            "pid-file": folder / "munged.pid",
            "log-file": folder / "munged.log",
            "seed-file": folder / "munged.seed",
        }
        options = (f"--{option}={path}" for option, path in files.items())
        # By force: the folder is nobody else's to read, and only root reads it.
        daemons.enter_context(
            cluster.daemon("munged", "--foreground", "--force", *options)
        )
        wait_for(files["socket"].exists, cluster.log)
        daemons.enter_context(cluster.daemon("slurmctld", "-D"))
        daemons.enter_context(cluster.daemon("slurmd", "-D"))
        is_idle = "sinfo", "--noheader", "--format=%t"
        wait_for(lambda: cluster.ask(*is_idle, check=False) == "idle", cluster.log)
        yield cluster
        # Whatever is left of a failed test ends before the daemon that would end it.
        cluster.ask("scancel", "--me", "--signal=KILL", "--full")
        wait_for(lambda: not cluster.ask("squeue", "-h"), cluster.log)


def test_a_job_that_is_queued_again_and_one_of_another_size_go_on(
    tmp_path, cache, slurm, undisturbed_fewer
):
    run, log = tmp_path / "run", tmp_path / "job.log"
    arguments = settings(run, cache, FEWER)

    def learned_more() -> None:
        before = num_lines(run)
        wait_for(lambda: num_lines(run) >= before + 15, log)

    job = slurm.submit(2, log, *arguments)
    learned_more()
    slurm.ask("scancel", "--signal=TERM", job)  # as at the end of its time
    # The example queues it again for code 75 alone.
    wait_for(lambda: slurm.shows(job, "Restarts=1"), log)
    learned_more()
    slurm.ask("scancel", job)
    wait_for(lambda: slurm.shows(job, "JobState=CANCELLED"), log)
    wait_for(lambda: not slurm.ask("squeue", "-h"), log)
    smaller = slurm.submit(1, log, *arguments)
    wait_for(lambda: slurm.shows(smaller, "JobState=COMPLETED"), log)
    text = log.read_text()
    assert f"rank 0 of 2, by step {job}.0 of Slurm" in text
    assert "Slurm's step started no other" in text
    assert curve(run) == undisturbed_fewer
    assert len(undisturbed_fewer) == FEWER + 2
