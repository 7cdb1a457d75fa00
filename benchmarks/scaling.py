# SPDX-License-Identifier: Apache-2.0
"""How the cost of compiling the trainer's step grows.

With layers, with devices from 1 to 512 (which do not exist: nothing runs), and with
microbatches, of accumulation and of pipelines. Each row is a process of its own:
seconds of its CPU time by stage, how far its memory rises above what it was before the
trace, and the lines of the graph after its passes.

    python benchmarks/scaling.py [--quick] [--json PATH]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = (
    "model=tiny",
    "model.global_every=2",
    "training.micro_batch_size=1",
    "training.sequence_length=64",
    "training.steps=10",
)
LAYERS = (4, 8, 16, 32, 64)
DEVICES = (1, 8, 64, 512)
MICROBATCHES = (1, 8, 64)


def main() -> None:
    """Show the tables, or measure the one case that a child is asked for."""
    parser = report.parser(__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(json.loads(options.case))))
        return
    few = slice(0, 2) if options.quick else slice(None)
    tables = {
        "Layers, scanned": [row("layers", n, layers(n)) for n in LAYERS[few]],
        "Layers, unrolled": [row("layers", n, unrolled(n)) for n in LAYERS[few]],
        "Devices, fsdp × tp": [row("devices", n, devices(n)) for n in DEVICES[few]],
        "Microbatches, accumulated": [
            row("microbatches", n, accumulated(n)) for n in MICROBATCHES[few]
        ],
        "Microbatches, 1f1b on four stages": [
            row("microbatches", n, pipelined(n)) for n in MICROBATCHES[1:][few]
        ],
    }
    report.show_all(tables, options.json)


def layers(count: int) -> list[str]:
    """One device; the layers of a kind are one scan."""
    return [mesh([1], ["fsdp"]), f"model.num_layers={count}"]


def unrolled(count: int) -> list[str]:
    """The same, and no loop over layers in the program."""
    return [*layers(count), f"model.scan_unroll={count}"]


def devices(count: int) -> list[str]:
    """Tensor parallel over eight of them at most."""
    tp = min(count, 8)
    heads = ["model.num_heads=8", "model.num_kv_heads=8"]
    return [mesh([count // tp, tp], ["fsdp", "tp"]), *heads]


def accumulated(count: int) -> list[str]:
    """Gradients of so many microbatches in one step, on eight devices."""
    steps = f"training.gradient_accumulation_steps={count}"
    return [mesh([4, 2], ["fsdp", "tp"]), steps]


def pipelined(count: int) -> list[str]:
    """Four stages and two ways of data parallelism."""
    steps = f"training.gradient_accumulation_steps={count}"
    return [mesh([4, 2], ["pp", "dp"]), "model.num_layers=8", steps]


def mesh(sizes: list[int], axes: list[str]) -> str:
    """The override of a mesh."""
    return f"model.mesh_shape={json.dumps([sizes, axes]).replace(' ', '')}"


def row(name: str, value: int, overrides: list[str]) -> dict[str, Any]:
    """One case, measured in a process of its own."""
    report.progress(f"{value} {name}")
    child = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps([*SMALL, *overrides])],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return {name: value, **json.loads(child.stdout.splitlines()[-1])}


def measured(overrides: list[str]) -> dict[str, Any]:
    """CPU seconds and bytes of compiling the trainer's step."""
    # Here, so that the parent stays small.
    from tessera.train.config.command_line import compose
    from tessera.train.config.mesh_shape import mesh_of_shape
    from tessera.train.loop.build_run import Run

    settings = compose(overrides, CONFIGS).config
    job = Run(settings, mesh_of_shape(settings.model.mesh_shape))
    args = job.abstract_state, job.abstract_batch
    before = peak_bytes()
    traced, trace = timed(lambda: job.step.trace(*args))
    _, passes = timed(lambda: traced.passes)
    lowered, lower = timed(traced.lower)
    _, compiled = timed(lowered.compile)
    return {
        "trace s": trace,
        "passes s": passes,
        "lower s": lower,
        "compile s": compiled,
        "host MiB": round((peak_bytes() - before) / 2**20),
        "lines": len(traced.graph.as_text().splitlines()),
    }


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and its CPU seconds, all threads'."""
    begun = time.process_time()
    result = act()
    return result, round(time.process_time() - begun, 2)


def peak_bytes() -> int:
    """The most memory that this process had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
