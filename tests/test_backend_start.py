# SPDX-License-Identifier: Apache-2.0
"""What starts no backend: it can run on a login node, and before devices are chosen."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "configs"

STEPS = {
    "importing the module of devices, which sets nothing": """
import os
before = dict(os.environ)
import tessera.train.runtime.devices
assert dict(os.environ) == before
""",
    "composing settings": f"""
from pathlib import Path
from tessera.train.config.command_line import compose
compose(["model.mesh_shape=[[4,2],[fsdp,tp]]"], Path({str(CONFIGS)!r}))
""",
    "looking at a tensor on more devices than there are": """
from tessera.analysis.inspection import inspect
from tessera.mesh import Mesh
from tessera.shard import ShardSpec, tensor
mesh = Mesh(["tp", "pp", "dp"], devices=range(720))
w = tensor((90_000, 90_000), ShardSpec(("row", "col"), ("tp", "pp")), mesh)
assert "per device" in str(inspect({"w": w}))
assert "more devices" in str(inspect(w))
""",
    "planning the layout of a model": """
from tessera.train.models import DecoderModel, config_of
mesh = Mesh(("fsdp", "tp"), devices=range(16), shape=(8, 2))
model = DecoderModel(config_of("gemma3_4b"))
model.layouts(mesh), model.layout_notes(mesh)
""",
}


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What one process says after each step, up to the first that fails."""
    program = "import jax\nfrom tessera.jax_compat import jaxprs\n" + "".join(
        f"{step}\nprint({name!r}, jaxprs.backend_started())\n"
        for name, step in STEPS.items()
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [*done.stdout.splitlines(), done.stderr]


@pytest.mark.parametrize("step", STEPS)
def test_it_starts_no_backend(step: str, said: list[str]) -> None:
    assert f"{step} False" in said, said[-1]
