# SPDX-License-Identifier: Apache-2.0
"""Programs for GPUs and TPUs that are not here, and how to read them.

The vendor's own compiler makes them, so they are those that the devices would run. Each
is compiled once in a process.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import pytest

from tessera import function
from tessera.foundations.config_files import configs_dir
from tessera.graph.compile_stages import Compiled
from tessera.mesh import Mesh
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run

# ``make test-targets`` sets it. The compilers are not in the environment of the other
# tests, and are slow; ``optimized``, since the tests' default turns optimizations off.
only_in_test_targets = [
    pytest.mark.skipif(
        "TESSERA_TEST_TARGETS" not in os.environ,
        reason="make test-targets has the compilers",
    ),
    pytest.mark.usefixtures("optimized"),
]

H100, V5E, V5P = "h100:1x8", "v5e:2x4", "v5p:2x2x2"

# Of ``tiny`` on eight devices; a device has 8 rows of 128 tokens, or shares
# them along tp and pp.
LAYOUTS = {
    "fsdp": ("model.mesh_shape=[[8],[fsdp]]", "training.remat=full"),
    "tp": ("model.mesh_shape=[[4,2],[fsdp,tp]]", "training.remat=full"),
    "pp": (
        "model.mesh_shape=[[2,4],[pp,fsdp]]",
        "training.remat=full",
        "training.gradient_accumulation_steps=8",
    ),
    "gathered": (
        "model.mesh_shape=[[2,4],[pp,fsdp]]",
        "training.remat=full",
        "training.gradient_accumulation_steps=8",
        "training.pipeline_gather=step",
    ),
    "dots": ("model.mesh_shape=[[8],[dp]]", "training.remat=dots"),
    "offload": (
        "model.mesh_shape=[[8],[dp]]",
        "training.remat=full",
        "training.offload_optimizer=true",
    ),
}
NUM_LAYERS, NUM_PARAMETERS = 6, 1_511_936
# Of a layer, those that are matrices.
MATRICES = 128 * (4 + 2 + 2 + 4) * 32 + 3 * 128 * 512
ROWS, LENGTH, WIDTH = 8, 128, 128
ACTIVATIONS = 2 * ROWS * LENGTH * WIDTH  # of one device, bytes in bf16

_START = re.compile(r" +%\S+ = .* ([a-z-]+)-start\(")


@cache
def trainer_step(target: str, layout: str, precision: str = "bf16") -> Compiled:
    """The trainer's step of ``tiny`` in one of ``LAYOUTS``."""
    settings = [*LAYOUTS[layout], f"runtime.target={target}"]
    settings += ["model=tiny", f"training.mixed_precision={precision}"]
    settings += ["training.dry_run=true"]
    config = compose(settings, configs_dir()).config
    mesh = mesh_of_shape(config.model.mesh_shape, target=Target.parse(target))
    return Run(config, mesh).compiled


def on_one_device(target: str, run: Callable[..., Any], *arguments: Any) -> Compiled:
    """A function that is compiled for the first device of a target."""
    mesh = Mesh(["dp"], shape=(1,), target=target)
    return function(mesh=mesh)(run).compile(*arguments)


def compile_without_spills(compiled: Compiled) -> None:
    """Compile it again for an NVIDIA GPU; fails where a kernel spills registers."""
    option = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    compiled.traced.lower().jax.compile(option)


def custom_calls(compiled: Compiled) -> set[str]:
    """The targets of its custom calls, such as a library's kernels."""
    return set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text()))


def async_starts(compiled: Compiled) -> dict[str, list[bool]]:
    """By kind of collective, whether each of XLA's pairs for GPUs is asynchronous."""
    found: dict[str, list[bool]] = {}
    for line in compiled.as_text().splitlines():
        if start := _START.match(line):
            asynchronous = '"is_sync":false' in line
            found.setdefault(start[1], []).append(asynchronous)
    return found


def rows(compiled: Compiled, kind: str, *axes: str) -> list[Any]:
    """The rows of its ledger of one kind of collective over the given axes."""
    ledger = compiled.collectives.rows
    return [row for row in ledger if (row.kind, row.axes) == (kind, axes)]


def dtypes(row: Any) -> set[str]:
    """The dtypes of what a collective moves."""
    return {shape.dtype for shape in row.arrays}


def host_argument_bytes(compiled: Compiled) -> int:
    """Bytes of the arguments that are in the memory of the host."""
    return compiled.jax.memory_analysis().host_argument_size_in_bytes


def array(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    """An argument without values."""
    return jax.ShapeDtypeStruct(shape, dtype)
