# SPDX-License-Identifier: Apache-2.0
"""Submit a training run to Slurm with submitit: a task for each GPU of two machines.

    pip install submitit
    python examples/slurm.py --nodes=2 --gpus=4 'model.mesh_shape=[[8,1],[fsdp,tp]]'

Each task is a rank: srun says which in variables that Tessera reads. With ``--tasks=1``
there is one on each machine, which drives all of its GPUs.

Before the job's time is over, and before it is preempted, the run saves, and the job is
queued again and goes on.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import submitit

ROOT = Path(__file__).resolve().parents[1]
REQUEUE = 75  # what a run exits with that was asked to end
WARNING = 120  # seconds before the end of its time


class Run:
    """A command that a job runs, and runs again each time that it is queued again."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def __call__(self) -> None:
        """Run it, in a folder of the job's own, from the newest checkpoint there."""
        job = os.environ["SLURM_JOB_ID"]
        folder = ROOT / "outputs/slurm" / job / "run"
        resume = [f"hydra.run.dir={folder}", "training.resume=auto"]
        self._process = subprocess.Popen([*self.command, *resume])
        code = self._process.wait()
        if code == REQUEUE and os.environ["SLURM_PROCID"] == "0":
            subprocess.run(["scontrol", "requeue", job], check=False)
        elif code not in (0, REQUEUE):
            sys.exit(code)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Let it save; submitit calls this at the warning, and queues the job again."""
        self._process.send_signal(signal.SIGUSR2)
        # Not its wait(), in the middle of which the handler of the warning runs.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Run(self.command))


def main() -> None:
    """Submit the run, and say its job's number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of each machine")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--partition", default=None)
    parser.add_argument("--tasks", type=int, help="of each machine; default: its GPUs")
    options, settings = parser.parse_known_args()

    executor = submitit.AutoExecutor(
        folder=ROOT / "outputs/slurm/%j", slurm_max_num_timeout=1000
    )
    executor.update_parameters(
        name="tessera",
        nodes=options.nodes,
        tasks_per_node=options.tasks or options.gpus,
        gpus_per_node=options.gpus,
        timeout_min=60 * options.hours,
        slurm_partition=options.partition,
        slurm_signal_delay_s=WARNING,
        # Ranks wait for each other in collectives: one that is gone ends the step.
        slurm_srun_args=["--kill-on-bad-exit=1"],
    )
    command = [
        sys.executable,
        str(ROOT / "run_training.py"),
        f"runtime.grace_period={WARNING - 30}",
        *settings,
    ]
    job = executor.submit(Run(command))
    sys.stdout.write(f"job {job.job_id}, its logs are in {job.paths.folder}\n")


if __name__ == "__main__":
    main()
