# SPDX-License-Identifier: Apache-2.0
"""Two processes with two simulated devices each, that run one program."""

import json
import os
import subprocess
import sys
from typing import Any

from tessera.train.runtime.launcher import free_port

SETUP = """
import json, sys
import jax
import numpy as np

rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
"""


def found_by_two(program: str) -> list[Any]:
    """What each process prints as JSON behind ``FOUND``."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SETUP + program, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PJRT_NPROC": "32"},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.split("FOUND ")[1].splitlines()[0]) for out, _ in outputs]
