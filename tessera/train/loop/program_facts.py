# SPDX-License-Identifier: Apache-2.0
"""``program.json``: what is known of a run's step once it is compiled.

The report reads it, in processes that neither compile nor import JAX.
"""

import json
from contextlib import suppress
from typing import Any, Final

import jax

from tessera.analysis.inspection import inspect
from tessera.targets.machine import machine_of_kind
from tessera.train.loop.build_run import Run
from tessera.train.loop.run_folder import RunFolder, cannot_write, write_durably

# Of a schedule; thousands of microbatches make a table that nobody reads.
_WIDEST: Final = 2000


def program_facts(run: Run) -> dict[str, Any]:
    """Mesh, parameters, FLOPs, memory, collectives and pipeline of the compiled step.

    Sizes are bytes of one device. The memory of a device is None where neither JAX nor
    a file of ``configs/target`` says how much it has.
    """
    ledger, model, mesh = run.compiled.collectives, run.model, run.mesh
    return {
        "mesh": dict(mesh.shape),
        "device_ids": list(mesh.device_ids),
        "parameters": {"total": model.num_params, "active": model.num_active_params},
        "flops": run.flops,
        "memory": run.compiled.memory.as_json(),
        "state_bytes": _state_bytes(run),
        "device_memory_bytes": _device_memory(run),
        "collectives": [
            {"axes": axes, "kind": kind, "calls": total.calls, "bytes": total.nbytes}
            for (axes, kind), total in ledger.totals().items()
        ],
        "pipeline": _pipeline(run),
    }


def write_program(folder: RunFolder, run: Run) -> None:
    """Write ``program.json``.

    Raises:
      OutputPathError: [T504] the folder cannot be written.
    """
    folder.check()
    try:
        write_durably(folder.program, [json.dumps(program_facts(run), indent=1), "\n"])
    except OSError as error:
        raise cannot_write(folder.program, error) from error


def _state_bytes(run: Run) -> dict[str, int]:
    state = run.abstract_state
    trees = {"parameters": state.params}
    if not run.config.training.eval_only:
        trees["optimizer"] = state.optimizer
    return {name: inspect(tree).local_nbytes for name, tree in trees.items()}


def _device_memory(run: Run) -> int | None:
    """What the device may allocate, else what its model has."""
    if run.mesh.is_abstract:
        return None
    device: jax.Device = run.mesh.jax.devices.flat[0]
    with suppress(jax.errors.JaxRuntimeError, AttributeError):
        if device in jax.local_devices() and (stats := device.memory_stats()):
            return stats.get("bytes_limit")
    machine = machine_of_kind(device.device_kind)
    return None if machine is None else machine.memory_bytes


def _pipeline(run: Run) -> dict[str, Any] | None:
    if (schedule := run.schedule) is None:
        return None
    rows = schedule.as_text().splitlines()[1:]
    text = "\n".join(row[:_WIDEST] for row in rows)
    return {"summary": schedule.summary(), "table": text}
