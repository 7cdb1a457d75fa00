# SPDX-License-Identifier: Apache-2.0
"""Two processes restore the state of a loop, and save it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tessera as ts
from tessera.train import restore_checkpoint, save_checkpoint
from tests.train.checkpoints.same_state import equal

TWO = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
from tessera import dist
from tessera.errors import TesseraError
from tessera.train import latest_step, restore_checkpoint, save_checkpoint
from tessera.train.runtime.cluster import detect
from tessera.train.runtime.devices import prepare_devices
from tessera.train.runtime.process_group import joined

folder = sys.argv[1]
with joined(detect(os.environ), {}, platform="cpu") as group:
    prepare_devices(group.count, "cpu", num_processes=group.count)
    mesh = dist.Mesh(["dp"], devices=range(2))
    split = NamedSharding(mesh.jax, jax.P("dp"))
    like = {
        "w": jax.make_array_from_callback((4,), split, lambda i: np.zeros(4, "f4")[i]),
        "count": jnp.int32(0), "key": jax.random.key(0), "rows": np.zeros(2), "step": 0,
    }
    state = restore_checkpoint(folder, like=like)
    assert [s.data.tolist() for s in state["w"].addressable_shards] == [
        [[0.0, 1.0], [2.0, 3.0]][group.rank]
    ]
    assert (int(state["count"]), state["step"]) == (7, 3)
    assert state["rows"].tolist() == [0.5, 2.0]
    assert jax.random.key_data(state["key"]).tolist() == [0, 9]
    for change in ({"step": group.rank}, {"count": jnp.int32(group.rank)}):
        try:
            save_checkpoint(folder, state | change, step=4)
        except TesseraError as error:
            print(error.code, error.got)
    try:
        save_checkpoint(folder, state, step=3)
    except TesseraError as error:
        print(error.code)
    save_checkpoint(folder, state | {"w": state["w"] + 1}, step=4, keep=1)
    print("latest", latest_step(folder))
"""


@pytest.mark.full
def test_two_processes_restore_and_save_their_shards(tmp_path):
    state = {
        "w": jnp.arange(4.0),
        "count": jnp.int32(7),
        "key": jax.random.key(9),
        "rows": np.array([0.5, 2.0]),
        "step": 3,
    }
    save_checkpoint(tmp_path / "run", state, step=3)
    (tmp_path / "two.py").write_text(TWO)
    launcher = ("-m", "tessera.train.commands.launch", "--nprocs=2", "--grace=5")
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *launcher, tmp_path / "two.py", tmp_path / "run"],
        env=environ | {"PYTHONPATH": str(Path(ts.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        lines = [
            line.removeprefix(f"[rank {rank}] ")
            for line in done.stdout.splitlines()
            if line.startswith(f"[rank {rank}] ")
        ]
        assert lines[-4:] == ["T807 step", "T807 count", "T804", "latest 4"]
    got = restore_checkpoint(tmp_path / "run", like=state)
    equal(got, state | {"w": jnp.arange(1.0, 5.0)})
    metadata = json.loads((tmp_path / "run/4/metadata.json").read_text())
    assert metadata["processes"] == 2
