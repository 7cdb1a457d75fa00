# SPDX-License-Identifier: Apache-2.0
"""Collectives between processes that have values of their own."""

import json
import os
import subprocess
import sys

import pytest

from tessera.train.runtime.launcher import free_port

PROGRAM = """
import json, sys
import jax
import numpy as np

rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)

from tessera import dist

# What each process has read or drawn for itself.
params = {"w": np.full(3, rank + 1.0, np.float32), "step": np.int32(rank + 5)}
with dist.Mesh(axes=["dp"]):
    first = dist.broadcast(params, axis="dp", root=0)
    last = dist.broadcast(params, axis="dp", root=3)
    mean = dist.all_reduce(params["w"], axis="dp", op="mean")
found = {
    "first": first["w"].addressable_data(1).tolist(),
    "step": int(first["step"].addressable_data(0)),
    "last": last["w"].addressable_data(0).tolist(),
    "mean": mean.addressable_data(0).tolist(),
}
print("FOUND", json.dumps(found))
"""


@pytest.mark.full
def test_every_process_gets_the_parameters_of_one():
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PJRT_NPROC": "32"},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
        line = out.split("FOUND ")[1].splitlines()[0]
        assert json.loads(line) == {
            "first": [1.0] * 3,
            "step": 5,
            "last": [2.0] * 3,
            "mean": [1.5] * 3,
        }
