# SPDX-License-Identifier: Apache-2.0
"""Memory, registers and spills of the programs that GPUs run, without a GPU.

    python benchmarks/gpu_kernels.py [--quick] [--json PATH]

Forward and backward pass of causal attention, of the fused loss and of a layer of
experts, and whole steps of ``gpu_day.py``'s models. XLA writes the
kernels of a program in NVIDIA's assembly language, and ``ptxas`` says what each takes.
cuDNN's own kernels are compiled where they run, so of that implementation only what XLA
does beside them is here. "shared bytes" are the static ones. It needs ``pip install
'tessera-spmd[targets-cuda13]'``, or ``targets-cuda12``.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import report
from attention_compiled import BATCH, CASES, GROUPS, HEADS, LENGTH
from attention_compiled import compiled as attention
from gpu_steps.trainer import MODELS, run_of

from tessera import function, op
from tessera.mesh import Mesh
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.layer import ExpertLayout, expert_layer
from tessera.ops.moe.routing import RoutingOptions
from tessera.train.runtime.devices import prepare_devices

TARGETS = {"h100:1x1": "sm_90a", "b200:1x1": "sm_100a"}
TOKENS, WIDTH = 8192, 2048
VOCABULARY = 128_256
EXPERTS, HIDDEN, TOP_K = 128, 768, 8
_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


def programs() -> dict[str, Callable[[str], Any]]:
    """By name, what compiles a program for a target."""
    found: dict[str, Callable[[str], Any]] = {}
    for case in CASES:
        # cuDNN has no soft cap.
        for name in ("xla",) if case.packed else ("xla", "cudnn"):
            call = partial(attention, case=case, implementation=name)
            found[f"attention, {case.name}, {name}"] = call
    found["fused loss"] = fused_loss
    found["experts"] = experts
    for name in MODELS:
        found[f"step, {name}"] = partial(step, name)
    return found


def fused_loss(target: str) -> Any:
    """The mean cross-entropy of tokens, and its gradients."""
    loss = jax.value_and_grad(op.fused_linear_cross_entropy, argnums=(0, 1))
    labels = jax.ShapeDtypeStruct((TOKENS,), "int32")
    arguments = array(TOKENS, WIDTH), array(VOCABULARY, WIDTH), labels
    return on_one_device(target, loss, *arguments)


def experts(target: str) -> Any:
    """The sum of a layer's squared output, and its gradients."""

    def loss(x: Any, weights: Any) -> Any:
        options = RoutingOptions(top_k=TOP_K)
        out = expert_layer(x, weights, options, ExpertLayout())[0]
        return jnp.square(out.astype(jnp.float32)).sum()

    up, down = array(EXPERTS, WIDTH, HIDDEN), array(EXPERTS, HIDDEN, WIDTH)
    weights = Weights(array(WIDTH, EXPERTS), up, up, down)
    gradients = jax.value_and_grad(loss, argnums=(0, 1))
    return on_one_device(target, gradients, array(1, TOKENS, WIDTH), weights)


def step(model: str, target: str) -> Any:
    """The trainer's step of one of ``gpu_day.py``'s models."""
    return run_of(model, target).compiled


def on_one_device(target: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """A function that is compiled for one device of a target."""
    mesh = Mesh(["dp"], shape=(1,), target=target)
    return function(mesh=mesh)(run).compile(*arguments)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    """An argument in bf16 without values."""
    return jax.ShapeDtypeStruct(shape, "bfloat16")


def kernels(target: str, name: str) -> report.Row:
    """What the kernels of one program take, in a process that writes them to files."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"
        prepare_devices(1, "cpu")
        memory = programs()[name](target).memory
        files = [f for f in sorted(Path(folder).glob("*.ptx")) if f.stat().st_size]
        said = "".join(assembled(file, TARGETS[target]) for file in files)
    registers = [int(found) for found in _USED.findall(said)]
    spills = [sum(map(int, found)) for found in _SPILLS.findall(said)]
    return {
        "target": target,
        "program": name,
        "kernels": len(registers),
        "most registers": max(registers, default=0),
        "spilled bytes": sum(spills),
        "shared bytes": max(map(int, _SHARED.findall(said)), default=0),
        "temporary MiB": round(memory.temporaries / 2**20, 1),
        "peak MiB": round(memory.peak / 2**20, 1),
    }


def assembled(file: Path, architecture: str) -> str:
    """What ``ptxas`` says of the kernels in a file."""
    packages = Path(sys.prefix, "lib", f"python3.{sys.version_info[1]}/site-packages")
    found = (packages / f"nvidia/{name}/bin/ptxas" for name in ("cu13", "cuda_nvcc"))
    compiler = next(file for file in found if file.exists())
    command = [compiler, "-v", f"-arch={architecture}", file, "-o", os.devnull]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def ptxas_version() -> str:
    """The version of the package that ``ptxas`` is in, of CUDA 13 or 12."""
    try:
        return version("nvidia-cuda-nvcc")
    except PackageNotFoundError:
        return version("nvidia-cuda-nvcc-cu12")


def main() -> None:
    """Compile every program for every target; print the table."""
    options = report.arguments(__doc__)
    prepare_devices(1, "cpu")
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for target in list(TARGETS)[: 1 if options.quick else None]:
        for name in list(programs())[: 2 if options.quick else None]:
            report.progress(f"{target}, {name}")
            with ProcessPoolExecutor(1, mp_context=spawn) as other:
                rows.append(other.submit(kernels, target, name).result())
    title = (
        f"attention: {BATCH} × {HEADS} query heads, {GROUPS} of keys, {LENGTH} tokens; "
        f"loss: {TOKENS} × {WIDTH}, vocabulary {VOCABULARY}; experts: {TOKENS} × "
        f"{WIDTH}, {TOP_K} of {EXPERTS}, {HIDDEN} wide; bf16, ptxas {ptxas_version()}"
    )
    report.show(title, rows, options.json)


if __name__ == "__main__":
    main()
