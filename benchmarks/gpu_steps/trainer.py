# SPDX-License-Identifier: Apache-2.0
"""The trainer's step: time, MFU and memory beside what was predicted without a GPU.

Every model is a process of its own, which starts with an empty GPU:
``python -m gpu_steps.trainer NAME``.
"""

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from gpu_steps.rows import OUT, QUICK, emit, errors_kept, gib

# Written by the step "predict".
PREDICTIONS: Final = Path(__file__).with_name("predictions.json")
MACHINES: Final = ("h100", "h200")

# Model, tokens of a sequence, sequences, remat.
_LARGE: Final = {
    "llama3.2_1b 4k": ("llama3.2_1b", 4096, 4, "named"),
    "qwen3_0.6b 2k": ("qwen3_0.6b", 2048, 8, "named"),
    "gemma3_1b 4k": ("gemma3_1b", 4096, 4, "named"),
    "llama3.2_1b 2k": ("llama3.2_1b", 2048, 8, "full"),
}
MODELS: Final = {"tiny": ("tiny", 128, 8, "named")} if QUICK else _LARGE


def run_of(name: str, target: str | None = None) -> Any:
    """The trainer's run of a model, for this GPU or for a target."""
    import jax

    from tessera.foundations.config_files import configs_dir
    from tessera.targets.target import Target
    from tessera.train.config.command_line import compose
    from tessera.train.config.mesh_shape import mesh_of_shape
    from tessera.train.loop.build_run import Run

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    model, length, rows, remat = MODELS[name]
    settings = [
        f"model={model}",
        "data=synthetic",
        "training.mixed_precision=bf16",
        f"training.sequence_length={length}",
        f"training.micro_batch_size={rows}",
        f"training.remat={remat}",
        "training.checkpoint_every=null",
    ]
    if target is not None:
        settings += [f"runtime.target={target}", "training.dry_run=true"]
    config = compose(settings, configs_dir()).config
    machine = None if target is None else Target.parse(target)
    return Run(config, mesh_of_shape(config.model.mesh_shape, target=machine))


def trainer() -> None:
    """Each model, one after the other."""
    for name in MODELS:
        with errors_kept("trainer", run=name):
            subprocess.run(
                [sys.executable, "-m", "gpu_steps.trainer", name],
                timeout=600 if QUICK else 75,
                check=True,
            )


def measure(name: str) -> None:
    """A row: the compiled program, its predictions, and fifteen steps of it."""
    import jax
    import jax.numpy as jnp

    from tessera.analysis.device_peaks import mfu, peak_flops
    from tessera.targets.machine import machine_of_kind
    from tessera.train.loop.train_state import init_state
    from tessera.train.runtime.devices import prepare_devices

    prepare_devices(1)
    _, length, rows, _ = MODELS[name]
    run = run_of(name)
    kind = jax.devices()[0].device_kind
    machine = machine_of_kind(kind)
    known = compiled(run, name, machine.name if machine else None)
    config = run.step_config
    state = init_state(
        run.model,
        config.optimizer,
        jax.random.key(0),
        run.mesh,
        zero_stage=config.zero_stage,
    )
    times, losses = steps(run, state, batch_for(run, rows, length))
    median = statistics.median(times)
    share = mfu(run.flops, median, 1, peak_flops(kind, jnp.bfloat16))
    memory = jax.devices()[0].memory_stats() or {}
    emit(
        "trainer",
        **known,
        step_ms=round(1e3 * median, 1),
        least_ms=round(1e3 * min(times), 1),
        tokens_s=round(rows * length / median),
        mfu=share and round(share, 4),
        measured_peak_GiB=gib(memory.get("peak_bytes_in_use")),
        losses=[*losses[:2], losses[-1]],
    )


def compiled(run: Any, name: str, machine: str | None) -> dict[str, Any]:
    """What the program says, and what was predicted without this device."""
    start = time.perf_counter()
    program = run.compiled
    known: dict[str, Any] = {
        "run": name,
        "compile_s": round(time.perf_counter() - start, 1),
        "compiler_peak_GiB": gib(program.memory.peak),
        "temporaries_GiB": gib(program.memory.temporaries),
        "cudnn": "fmha" in program.as_text(),
    }
    if machine is not None:
        with errors_kept("trainer", run=name, what="predicted from this program"):
            known["predicted_ms"] = _predicted_ms(program, machine)
    if PREDICTIONS.exists():
        predictions = json.loads(PREDICTIONS.read_text())
        known["predicted_without_gpu"] = predictions.get(f"{machine} {name}")
    return known


def _predicted_ms(program: Any, machine: str) -> float:
    from tessera.analysis.timeline.prediction import timeline
    from tessera.mesh import Mesh

    mesh = Mesh(["device"], shape=(1,), target=f"{machine}:1x1")
    return round(1e3 * timeline(program.as_text(), mesh).seconds, 1)


def steps(run: Any, state: Any, batch: Any) -> tuple[list[float], list[float]]:
    """Seconds of steps but the first three, and all losses."""
    times: list[float] = []
    losses: list[float] = []
    for _ in range(5 if QUICK else 15):
        start = time.perf_counter()
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    return times[3:], losses


def batch_for(run: Any, rows: int, length: int) -> Any:
    """Drawn tokens, in the layout of the step."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from tessera.train.config.step_config import batch_spec

    shape = (1, rows, length)
    words = run.model.config.vocab_size
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, words, (1, rows, length + 1), np.int32)
    batch = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
    }
    layout = NamedSharding(run.mesh.jax, batch_spec(run.step_config))
    return jax.device_put(batch, layout)


def program_text() -> None:
    """The text of the program whose memory was predicted worst, to read it later."""
    from tessera.train.runtime.devices import prepare_devices

    prepare_devices(1)
    name = next(iter(MODELS))
    program = run_of(name).compiled
    path = OUT / f"program-{name.replace(' ', '-')}.txt.gz"
    path.write_bytes(gzip.compress(program.as_text().encode()))
    emit(
        "program_text",
        run=name,
        file=path.name,
        peak_GiB=gib(program.memory.peak),
        temporaries_GiB=gib(program.memory.temporaries),
    )


def predict() -> None:
    """Time and memory by the compiler for GPUs that are not here, for the next day."""
    from tessera.train.runtime.devices import prepare_devices

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prepare_devices(1, "cpu")
    found = {}
    for machine in MACHINES:
        for name in MODELS:
            with errors_kept("predict", run=f"{machine} {name}"):
                program = run_of(name, f"{machine}:1x1").compiled
                row = {
                    "step_ms": round(1e3 * program.timeline.seconds, 1),
                    "peak_GiB": gib(program.memory.peak),
                    "temporaries_GiB": gib(program.memory.temporaries),
                }
                found[f"{machine} {name}"] = row
                emit("predict", run=f"{machine} {name}", **row)
    if not QUICK:
        PREDICTIONS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    measure(sys.argv[1])
