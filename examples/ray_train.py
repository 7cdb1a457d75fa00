# SPDX-License-Identifier: Apache-2.0
r"""A run under Ray Train: a worker for each rank.

    pip install 'ray[train]'
    python examples/ray_train.py --workers=2 --gpus=4 --folder=/shared/run \
        'model.mesh_shape=[[-1],[dp]]' training.global_batch_size=96

Each worker starts its rank as a process, by ``PYTHON`` if Tessera has an environment of
its own. The folder of the run is on a file system that all machines share.

This is no ``JaxTrainer``, which would connect JAX's processes itself, before Tessera
compares the ranks.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

ROOT = Path(__file__).resolve().parents[1]


def run_rank(config: dict[str, Any]) -> None:
    """Run one rank; an error of it is one of its worker, and Ray starts all again."""
    context = ray.train.get_context()
    variables = {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "MASTER_ADDR": broadcast_from_rank_zero(ray.util.get_node_ip_address()),
        "MASTER_PORT": str(config["port"]),
        # Ray shows each worker its own devices alone, so none are to be divided.
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    # The rank ends with its worker, also where that is killed.
    subprocess.run(
        ["setpriv", "--pdeathsig=KILL", *config["command"]],
        cwd=config["root"],
        env=os.environ | variables,
        check=True,
    )


def main() -> None:
    """Start the workers, and wait for the end of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker")
    parser.add_argument("--folder", type=Path, required=True, help="of the run, shared")
    parser.add_argument("--port", type=int, default=29500, help="the first of three")
    parser.add_argument("--max-failures", type=int, default=3)
    options, settings = parser.parse_known_args()
    folder = options.folder.resolve()
    command = [
        *(os.environ.get("PYTHON", sys.executable), "run_training.py"),
        *(f"hydra.run.dir={folder}", "training.resume=auto", *settings),
    ]
    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={"command": command, "root": ROOT, "port": options.port},
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker={"CPU": 1, "GPU": options.gpus},
        ),
        run_config=ray.train.RunConfig(
            storage_path=f"{folder}.ray",
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
