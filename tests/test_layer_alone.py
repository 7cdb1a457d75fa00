# SPDX-License-Identifier: Apache-2.0
"""With JAX and NumPy alone the layer runs, and commands say what is missing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tessera.__main__ import _OF_TRAINER

ROOT = Path(__file__).parents[1]
IMPORTED_AS = {"hydra-core": "hydra", "PyYAML": "yaml", "orbax-checkpoint": "orbax"}


def run_alone(program):
    """Run a program as if these libraries were not installed."""
    text = f"import sys\nsys.modules |= dict.fromkeys({set(_OF_TRAINER)})\n{program}"
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )


def test_the_package_needs_jax_and_numpy_and_the_trainer_more():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {Requirement(line).name for line in project["dependencies"]}
    assert needed == {"jax", "numpy"}
    extra = [
        Requirement(line).name for line in project["optional-dependencies"]["train"]
    ]
    assert {IMPORTED_AS.get(name, name) for name in extra} == _OF_TRAINER


STEP = """
from tessera.dist import simulate_devices
simulate_devices(2)
import jax
import jax.numpy as jnp
import tessera as ts
from tessera import dist

mesh = ts.Mesh(["dp"], shape=[2])
double = ts.jit(lambda x: jnp.sum(x * 2), mesh=mesh, in_specs={"x": jax.P("dp")})
assert double(jnp.ones(4)) == 8
print(double.last.collectives, dist.inspect(jnp.ones(4)))
"""


@pytest.mark.slow(reason="it starts Python")
def test_a_function_runs_and_is_inspected_without_the_trainer():
    done = run_alone(STEP)
    assert done.returncode == 0, done.stderr
    assert "all-reduce" in done.stdout


@pytest.mark.full
def test_the_step_of_the_readme_runs_without_the_trainer():
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    done = run_alone(found[0])
    assert done.returncode == 0, done.stderr
    assert "Mesh" in done.stdout


@pytest.mark.slow(reason="it starts Python")
@pytest.mark.parametrize("name", ["train"])
def test_a_command_of_the_trainer_says_what_to_install(name):
    done = run_alone(
        "from tessera.__main__ import main\n"
        f"sys.exit(main([{name!r}, 'a', 'b.safetensors']))"
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "  fix: run: pip install 'tessera-spmd[train]'",
        "  docs: https://tessera-spmd.github.io/tessera/errors/T511.html",
    ]
