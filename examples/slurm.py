# SPDX-License-Identifier: Apache-2.0
"""Submit a training run to Slurm with submitit: a task for each GPU of two machines.

    pip install submitit
    python examples/slurm.py --nodes=2 --gpus=4 'model.mesh_shape=[[8,1],[fsdp,tp]]'

Each task is a rank: srun says which in variables that Tessera reads, so that no
launcher is needed. Where a machine's output should be one stream, let one task of each
machine start the launcher instead: ``--launcher``.
"""

import argparse
import sys
from pathlib import Path

import submitit

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Submit the run, and say its job's number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of each machine")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--partition", default=None)
    parser.add_argument("--launcher", action="store_true", help="one task a machine")
    options, settings = parser.parse_known_args()

    executor = submitit.AutoExecutor(folder=ROOT / "outputs/slurm/%j")
    executor.update_parameters(
        name="tessera",
        nodes=options.nodes,
        tasks_per_node=1 if options.launcher else options.gpus,
        gpus_per_node=options.gpus,
        timeout_min=60 * options.hours,
        slurm_partition=options.partition,
        # Ranks wait for each other in collectives: one that is gone ends the step.
        slurm_srun_args=["--kill-on-bad-exit=1"],
    )
    launcher = ["-m", "tessera.launch", f"--nprocs={options.gpus}"]
    command = [
        sys.executable,
        *(launcher if options.launcher else []),
        str(ROOT / "run_training.py"),
        *settings,
    ]
    job = executor.submit(submitit.helpers.CommandFunction(command))
    sys.stdout.write(f"job {job.job_id}, its logs are in {job.paths.folder}\n")


if __name__ == "__main__":
    main()
