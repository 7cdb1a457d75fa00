# SPDX-License-Identifier: Apache-2.0
"""Two processes that call one function, with the same values or with their own."""

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

import jax.numpy as jnp
import tessera as ts
from jax.sharding import NamedSharding, PartitionSpec as P
from tessera import dist

mesh = dist.Mesh(axes=["dp"], devices=range(4))
ROWS = np.arange(8, dtype=np.float32) ** 2


def loss(w, batch):
    return jnp.mean(batch["x"] * w)


def call(w, x, captured=0.0, **options):
    step = ts.function(
        lambda w, batch: loss(w, batch) + jnp.sum(captured),
        mesh=mesh, in_specs={"batch": P("dp")}, **options,
    )
    try:
        return float(step(w, {"x": x}))
    except ts.TesseraError as error:
        return f"{error.code} {error.got.partition(':')[0]}"


own = np.split(ROWS, 2)[rank]
placed = jax.make_array_from_process_local_data(NamedSharding(mesh.jax, P("dp")), own)
one = np.float32(1)
found = {
    "whole": call(one, ROWS),
    "parts": call(one, own),
    "parts on a device": call(one, jnp.asarray(own)),
    "shapes": call(one, ROWS[: 8 - 4 * rank]),
    "global": call(one, placed),
    "weights": call(np.float32(1 + rank), placed),
    "number": call(1.0 + rank, placed),
    "closed over": call(one, placed, np.full(3, rank, np.float32)),
}
print("FOUND", json.dumps(found))
"""


@pytest.mark.full
def test_values_of_one_process_are_refused_where_the_whole_is_expected():
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
            "whole": 17.5,
            "parts": "T707 batch/x",
            "parts on a device": "T707 batch/x",
            "shapes": "T707 batch/x",
            "global": 17.5,
            "weights": "T707 w",
            "number": "T707 w",
            "closed over": "T707 closed-over array 0",
        }
