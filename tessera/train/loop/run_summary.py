# SPDX-License-Identifier: Apache-2.0
"""Describes a run in a table before its first step, and prints a dry run."""

import math
from collections.abc import Sequence

import jax

from tessera.analysis.inspection import inspect
from tessera.analysis.memory import format_bytes
from tessera.mesh import Mesh
from tessera.train.loop.build_run import Run
from tessera.train.loop.console import Console, log
from tessera.train.models.model import Model
from tessera.train.runtime.compile_cache import make_compile_cache


def run_rows(run: Run) -> list[tuple[str, str]]:
    """Mesh, parameters, batch and memory per device; compiles, allocates nothing."""
    settings, mesh = run.config, run.mesh
    memory, ledger = run.compiled.memory, run.compiled.collectives
    training = settings.training
    rows, unit = settings.rows_per_step(mesh), "step"
    tokens = f"{training.sequence_length:,} tokens"
    if training.eval_only:
        rows, unit = settings.rows_per_evaluation(mesh), "batch"
    else:
        tokens += f" in {training.gradient_accumulation_steps} microbatches"
    state = inspect(run.abstract_state)
    sent = [
        f"{'×'.join(axes)}: {total.calls} calls, {format_bytes(total.nbytes)}"
        for axes, total in ledger.by_axis().items()
    ]
    if ledger.unplanned:
        size = sum(row.total_bytes for row in ledger.unplanned)
        found = f"{len(ledger.unplanned)} collectives, {format_bytes(size)}"
        sent.append(f"of these unplanned: {found}")
    return [
        ("mesh", f"{mesh.topology}{_place(mesh)}"),
        ("model", settings.model.name),
        ("parameters", _parameters(run.model)),
        *(("layout", note) for note in run.layout_notes()),
        (
            "state",
            f"{format_bytes(state.nbytes)}, {format_bytes(state.local_nbytes)} per "
            "device",
        ),
        ("stored per device", _stored(run)),
        *(("recomputed", text) for text in run.model.remat_notes()),
        ("batch", f"{rows:,} sequences of {tokens}"),
        (
            "memory per device",
            f"{format_bytes(memory.peak)}: state and batch "
            f"{format_bytes(memory.arguments)}, temporaries "
            f"{format_bytes(memory.temporaries)}",
        ),
        (f"sent per {unit}", "; ".join(sent) or "nothing: one device"),
    ]


def _place(mesh: Mesh) -> str:
    """Where a mesh is that is not here."""
    if mesh.target is not None:
        other = ", compiled for the CPU instead" if mesh.target.is_stand_in else ""
        return f", of target {mesh.target}{other}"
    return ", abstract" if mesh.is_abstract else ""


def _parameters(model: Model) -> str:
    total, active = model.num_params, model.num_active_params
    text = f"{total:,}" + (f", {active:,} for each token" if active < total else "")
    leaves = jax.tree.leaves(model.trained(model.abstract()))
    trained = sum(math.prod(leaf.shape) for leaf in leaves)
    return text + (f", {trained:,} of them trained" if model.frozen else "")


def _stored(run: Run) -> str:
    """What of the state and of the gradients one device holds.

    Gradients in a fixed order of sums are whole on every device.
    """
    state, zero = run.abstract_state, run.step_config.zero
    trees = {"parameters": state.params}
    if not run.config.training.eval_only:
        trees["gradients"] = zero.abstract_gradients
        trees["optimizer"] = state.optimizer
    held = {name: inspect(tree).local_nbytes for name, tree in trees.items()}
    if "gradients" in held and run.step_config.fixed_order is not None:
        held["gradients"] = inspect(trees["gradients"]).nbytes
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
    return f"{text} on the host" if run.step_config.offload_optimizer else text


def dry_run(run: Run, notes: Sequence[str]) -> None:
    """Compile the step of a run and print what it will do; train nothing."""
    make_compile_cache()
    with Console(None) as console:
        for line in notes:
            log.info("%s", line)
        console.show_run_table(run_rows(run))
        log.info("%s", dry_run_text(run))


def dry_run_text(run: Run) -> str:
    """Memory per device, every collective of the compiled step, and its time.

    The time is predicted, and only where the mesh has a target.
    """
    compiled = run.compiled
    parts = [compiled.memory.as_text(), compiled.collectives.as_text()]
    if run.mesh.target is not None:
        parts.append(compiled.timeline.as_text())
    return "\n\n".join(parts)
