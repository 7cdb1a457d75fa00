# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and shared memory of attention's kernels on GPUs, without a GPU.

    python benchmarks/attention_registers.py [--quick] [--json PATH]

Forward and backward pass of causal attention. XLA writes the kernels of a program in
NVIDIA's assembly language, and ``ptxas`` says what each takes. cuDNN's own kernels are
compiled where they run, so of that implementation only what XLA does beside them is
here. "shared bytes" are the static ones. It needs ``pip install
'tessera[targets-cuda13]'``.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")

import multiprocessing
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import report
from attention_compiled import BATCH, CASES, GROUPS, HEADS, LENGTH, Case, compiled

from tessera.runtime.devices import prepare_devices

TARGETS = {"h100:1x1": "sm_90a", "b200:1x1": "sm_100a"}
IMPLEMENTATIONS = ("xla", "cudnn")
_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


def kernels(target: str, case: Case, implementation: str) -> report.Row:
    """What the kernels of one program take, in a process that writes them to files."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"
        prepare_devices(1, "cpu")
        program = compiled(target, case, implementation)
        files = [f for f in sorted(Path(folder).glob("*.ptx")) if f.stat().st_size]
        said = "".join(assembled(file, TARGETS[target]) for file in files)
    registers = [int(found) for found in _USED.findall(said)]
    spills = [sum(map(int, found)) for found in _SPILLS.findall(said)]
    return {
        "target": target,
        "case": case.name,
        "implementation": implementation,
        "kernels": len(registers),
        "most registers": max(registers, default=0),
        "spilled bytes": sum(spills),
        "shared bytes": max(map(int, _SHARED.findall(said)), default=0),
        "temporary MiB": round(program.memory.temporaries / 2**20, 1),
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
    """Compile every case for every target; print the table."""
    options = report.arguments(__doc__)
    prepare_devices(1, "cpu")
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for target in list(TARGETS)[: 1 if options.quick else None]:
        for case in CASES[: 2 if options.quick else None]:
            # cuDNN has no soft cap.
            for implementation in IMPLEMENTATIONS[: 1 if case.packed else None]:
                report.progress(f"{target}, {case.name}, {implementation}")
                with ProcessPoolExecutor(1, mp_context=spawn) as other:
                    row = other.submit(kernels, target, case, implementation).result()
                rows.append(row)
    title = (
        f"{BATCH} × {HEADS} query heads, {GROUPS} of keys, {LENGTH} tokens, bf16, "
        f"ptxas {ptxas_version()}"
    )
    report.show(title, rows, options.json)


if __name__ == "__main__":
    main()
