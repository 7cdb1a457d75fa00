# SPDX-License-Identifier: Apache-2.0
"""``model.mesh_shape=auto``: a layout for the devices of a run, chosen at its start.

What is chosen becomes part of the command line, so ``config.yaml`` has it as if it had
been written. A run that goes on from a folder keeps the layout of that folder.

``python -m tessera.planner.auto_mesh`` does it in a process of its own: planning starts
JAX, and the trainer decides how JAX starts in its process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tessera.errors import TargetError, TesseraError
from tessera.planner.answer import Answer, describe
from tessera.planner.plan_run import plan_run
from tessera.planner.search import Candidate
from tessera.runtime.cluster import detect
from tessera.targets.machine import machine_names, machine_of_kind

AUTO: Final = "model.mesh_shape=auto"
_TARGET: Final = "runtime.target="
_KEPT: Final = (
    "model.mesh_shape",
    "model.sequence_parallel",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
    "training.remat",
    "training.zero_stage",
    "training.offload_optimizer",
    "training.loss_chunk",
    "training.pipeline_schedule",
    "training.pipeline_chunks",
)
# A process of its own: JAX's devices can be simulated only before it has started.
_PROBE: Final = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps([d[0].platform, d[0].device_kind, len(d), "
    "[list(getattr(x, 'coords', ())) for x in d]]))"
)


def with_mesh(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with a layout in the place of ``model.mesh_shape=auto``.

    Args:
      words: Of ``tessera train``. Without ``runtime.target`` the layout is for the
        devices of this machine.

    Returns:
      The command line, and lines that say what was chosen and why.

    Raises:
      TargetError: [T711] there is no file for this machine's devices, or the run has
        several processes and names no target.
      PlanError: [T714] no layout is legal, or none fits.
    """
    kept = [word for word in words if word != AUTO]
    if (recorded := _recorded(kept)) is not None:
        folder, overrides = recorded
        return [*kept, *overrides], [f"the layout is that of the run in {folder}"]
    target = next((word for word in kept if word.startswith(_TARGET)), None)
    if target is None:
        _check_is_alone(kept)
        target = f"{_TARGET}{_devices_here()}"
    asked = [word for word in kept if not word.startswith(_TARGET)]
    answer = plan_run([*asked, target], verified=0)
    best, reason = _safest(answer)
    overrides = best.layout.overrides()
    has_batch = any(word.startswith("training.global_batch_size=") for word in asked)
    if not has_batch:
        overrides.append(f"training.global_batch_size={answer.space.global_batch_size}")
    set_here = {word.partition("=")[0] for word in overrides}
    line = [word for word in kept if word.partition("=")[0] not in set_here]
    if "training.dry_run=true" not in line:  # it runs on what is here
        line = [word for word in line if not word.startswith(_TARGET)]
    text = answer.as_text(rows=3).rpartition("\n\n")[0]
    chosen = f"model.mesh_shape=auto chose {describe(best.layout)}, {reason}"
    return [*line, *overrides], [chosen, *text.splitlines()]


def _safest(answer: Answer) -> tuple[Candidate, str]:
    """The fastest layout whose memory is safe, or the smallest; and which of them."""
    for each in answer.ranked:
        if each.is_safe:
            return each, "the fastest that surely fits"
    smallest = min(answer.ranked, key=lambda each: each.prediction.memory_bytes)
    return smallest, "the smallest, as none surely fits"


def _check_is_alone(words: Sequence[str]) -> None:
    """Refuse to plan for the devices that one process of several has."""
    cluster = detect(os.environ)
    asked = [word for word in words if word.startswith("runtime.num_processes=")]
    if cluster.world_size > 1 or asked:
        raise TargetError(
            "the devices of the other processes cannot be seen before a run starts",
            got=f"{AUTO} without runtime.target; {', '.join(asked) or cluster}",
            fix=_FIX,
        )


def _recorded(words: Sequence[str]) -> tuple[Path, list[str]] | None:
    """The layout of the run that this one goes on from, if it does."""
    values = dict(word.split("=", 1) for word in words if "=" in word)
    resume = values.get("training.resume", "none")
    if resume == "none":
        return None
    folders = [values.get("hydra.run.dir"), resume]
    for folder in (Path(each) for each in folders if each):
        for place in (folder, folder.parent, folder.parent.parent):
            file = place / "config.yaml"
            if file.is_file():
                return place, _layout_words(yaml.safe_load(file.read_text()))
    return None


def _layout_words(settings: dict[str, Any]) -> list[str]:
    """The words of a command line that give a run the layout of these settings."""
    words = []
    for path in _KEPT:
        group, _, name = path.partition(".")
        value = settings.get(group, {}).get(name)
        if value is not None:
            words.append(f"{path}={json.dumps(value, separators=(',', ':'))}")
    return [word.replace('"', "") for word in words]


def _devices_here() -> str:
    """This machine as a target."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = [*done.stderr.splitlines(), "no output"][-1]
        raise TargetError(
            "the devices of this machine cannot be seen", got=last, fix=_FIX
        )
    platform, kind, count, coordinates = json.loads(lines[-1])
    if platform == "cpu":
        return f"cpu:{os.environ.get('JAX_NUM_CPU_DEVICES', '1')}"
    found = machine_of_kind(kind)
    if found is None:
        known = ", ".join(machine_names())
        raise TargetError(
            f"no target has devices of the kind {kind!r}", got=known, fix=_FIX
        )
    if found.is_torus:
        sizes = [max(each) + 1 for each in zip(*coordinates, strict=True)]
        dims = len(found.largest_torus)
        return f"{found.name}:{'x'.join(map(str, sizes[:dims]))}"
    return f"{found.name}:1x{count}"


_FIX: Final = (
    "name the machine: runtime.target=h100:2x8, or measure it with tessera calibrate"
)


def main() -> int:
    """Read the words of a command line as JSON, and write them with a layout."""
    from tessera.runtime.devices import prepare_devices

    words = json.loads(sys.stdin.read())
    prepare_devices(1, "cpu")
    try:
        found = with_mesh(words)
    except TesseraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
