# SPDX-License-Identifier: Apache-2.0
"""``model.mesh_shape=auto`` and ``training.remat=auto``, chosen at the start of a run.

What is chosen becomes part of the command line, so ``config.yaml`` has it as if it had
been written. A run that goes on from a folder keeps the layout of that folder, and on
another number of devices its global batch.

``main`` does it in a process of its own: planning starts JAX, and the trainer decides
how JAX starts in its process.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from tessera.analysis.memory import format_bytes
from tessera.errors import TargetError
from tessera.foundations.config_files import configs_dir
from tessera.foundations.device_grid import inferred
from tessera.targets.machine import machine_names, machine_of_kind
from tessera.targets.target import Target
from tessera.train.config.batch_sizes import with_batch_sizes
from tessera.train.config.command_line import compose, read_flags
from tessera.train.config.recorded_run import recorded_run
from tessera.train.config.run_config import Config, data_parallel_groups
from tessera.train.planner.answer import describe
from tessera.train.planner.layout import SETTINGS, Layout, override, without
from tessera.train.planner.memory_model import is_safe
from tessera.train.planner.plan_run import plan_run
from tessera.train.planner.search_space import REMAT
from tessera.train.planner.step_time import StepModel
from tessera.train.runtime.accelerators import assign_devices
from tessera.train.runtime.cluster import Cluster, detect
from tessera.train.runtime.exit_codes import shows_errors
from tessera.train.runtime.python_process import python_command

AUTO: Final = "model.mesh_shape=auto"
AUTO_REMAT: Final = "training.remat=auto"
_OF_TARGET: Final = ("runtime.target", "runtime.target_compiler")
_BATCH: Final = "training.global_batch_size"
_KEPT: Final = ("model.mesh_shape", *SETTINGS.values(), _BATCH)
# A process of its own: JAX's devices can be simulated only before it has started.
_PROBE: Final = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps([d[0].platform, d[0].device_kind, len(d), "
    "[list(getattr(x, 'coords', ())) for x in d]]))"
)


def with_layout(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with settings in the place of ``auto``.

    Args:
      words: Of ``tessera train``, with ``training.remat=auto`` for the policy alone, or
        with ``model.mesh_shape=auto`` for every setting of the layout that is not set.
        Without ``runtime.target`` they are for the devices of this machine.

    Returns:
      The command line, and lines that say what was chosen and why.

    Raises:
      TargetError: [T711] there is no file for this machine's devices, or the run has
        several processes whose devices cannot be told, and names no target.
      PlanError: [T714] no layout is legal, or none fits.
    """
    if AUTO in words:
        return _with_mesh([word for word in words if word not in (AUTO, AUTO_REMAT)])
    asked = without(words, "training.remat", *_OF_TARGET)
    policy, note = choose_remat(asked, Target.parse(_target(words)))
    line = [
        f"training.remat={policy}" if word == AUTO_REMAT else word
        for word in _to_run(words)
    ]
    return line, [note]


def _with_mesh(given: Sequence[str]) -> tuple[list[str], list[str]]:
    target, run = _target(given), _RecordedRun.find(given)
    line = _to_run(given)
    if run is not None and run.fits(Target.parse(target)):
        layout = without(run.overrides(), *map(_key, given))
        return [*line, *layout], [f"the layout is that of the run in {run.folder}"]
    asked = [*without(given, "runtime.target"), f"runtime.target={target}"]
    if run is not None and _BATCH not in map(_key, given):
        asked.append(f"{_BATCH}={run.global_batch_size}")
    answer = plan_run(asked)
    best = answer.best
    is_safe = "the fastest that surely fits"
    reason = is_safe if best.is_safe else "the smallest, as none surely fits"
    overrides = best.layout.overrides()
    overrides.append(f"{_BATCH}={answer.space.global_batch_size}")
    line = without(line, *map(_key, overrides))
    text = answer.as_text(rows=3).rpartition("\n\n")[0]
    chosen = f"{AUTO} chose {describe(best.layout)}, {reason}"
    return [*line, *overrides], [chosen, *text.splitlines()]


def choose_remat(words: Sequence[str], target: Target) -> tuple[str, str]:
    """The first of the policies that surely fits, from the one that keeps most.

    Args:
      words: Of ``tessera train``, without a policy.
      target: The machine. Nothing is compiled for it.

    Returns:
      The policy, and a line that says what was predicted of each.

    Raises:
      TesseraError: Any code of ``command_line.compose`` and of a run's own checks.
    """
    dry = [*words, f"runtime.target={target.name}", "training.dry_run=true"]
    config = _on_mesh(compose(dry, configs_dir()).config, target)
    model, layout = StepModel.of(config, target), Layout.of(config)
    found = {
        policy: model.memory(replace(layout, remat=policy)).total for policy in REMAT
    }
    safe = [each for each in REMAT if is_safe(found[each], target.machine)]
    chosen = safe[0] if safe else min(REMAT, key=found.__getitem__)
    reason = "keeps most of those that surely fit"
    if not safe:
        reason = "keeps least, and does not surely fit"
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.items())
    capacity = format_bytes(target.machine.memory_bytes)
    return chosen, f"{AUTO_REMAT} chose {chosen}, which {reason} {capacity}: {sizes}"


def _on_mesh(config: Config, target: Target) -> Config:
    """The configuration with a mesh of known sizes, and the microbatches on it."""
    sizes, names = config.model.mesh_shape
    if -1 in sizes:
        sizes = inferred(names, sizes, target.num_devices)
    model = replace(config.model, mesh_shape=(sizes, names))
    known = replace(config, model=model)
    return with_batch_sizes(known, dict(zip(names, sizes, strict=True)))


def _to_run(words: Sequence[str]) -> list[str]:
    """The words of a run: it is on what is here, and a dry run keeps its target."""
    is_dry = "training.dry_run=true" in words
    return list(words) if is_dry else without(words, *_OF_TARGET)


def _key(word: str) -> str:
    """The setting of a word such as ``training.steps=2``."""
    return word.partition("=")[0]


def _target(words: Sequence[str]) -> str:
    """The ``runtime.target`` of a command line, or this machine."""
    for word in reversed(words):
        if _key(word) == "runtime.target":
            return word.partition("=")[2]
    return _devices_of(detect(os.environ))


@dataclass(frozen=True)
class _RecordedRun:
    """The run that a command line goes on from.

    Attributes:
      folder: Of the run.
      settings: Its ``config.yaml``.
    """

    folder: Path
    settings: Mapping[str, Any]

    @classmethod
    def find(cls, words: Sequence[str]) -> Self | None:
        """The run that ``training.resume`` names; None if there is no record of it."""
        values = dict(word.split("=", 1) for word in words if "=" in word)
        resume = values.get("training.resume", "none")
        found = recorded_run(resume, values.get("hydra.run.dir"))
        return None if found is None else cls(*found)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, by name."""
        sizes, names = self.settings["model"]["mesh_shape"]
        return dict(zip(names, sizes, strict=True))

    def fits(self, target: Target) -> bool:
        """Whether its mesh has the devices of a target."""
        num_devices = math.prod(self.sizes.values())
        return num_devices == target.num_devices or -1 in self.sizes.values()

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        training = self.settings["training"]
        each = training["micro_batch_size"] * training["gradient_accumulation_steps"]
        total = training["global_batch_size"]
        return total or each * data_parallel_groups(self.sizes)

    def overrides(self) -> Iterator[str]:
        """The words of a command line that give a run this layout."""
        for path in _KEPT:
            group, _, name = path.partition(".")
            value = self.settings[group].get(name)
            if value is not None:
                yield override(path, value)


def _devices_of(cluster: Cluster) -> str:
    """The machines of a run as a target: each has the devices that this one has.

    A rank of other devices plans otherwise, and then the ranks do not agree (T707).
    """
    done = subprocess.run(
        python_command(_PROBE),
        # Other ranks look at the same devices, whose memory nobody is to take.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = [*done.stderr.splitlines(), "no output"][-1]
        raise TargetError(
            "the devices of this machine cannot be seen", got=last, fix=_FIX
        )
    platform, kind, count, coordinates = json.loads(lines[-1])
    if platform == "cpu":
        each = int(os.environ.get("JAX_NUM_CPU_DEVICES", "1"))
        return f"cpu:{each * cluster.world_size}"
    found = machine_of_kind(kind)
    if found is None:
        known = ", ".join(machine_names())
        raise TargetError(
            f"no target has devices of the kind {kind!r}", got=known, fix=_FIX
        )
    if found.is_torus:
        if cluster.world_size > 1:
            raise _unseen(str(cluster))
        sizes = [max(each) + 1 for each in zip(*coordinates, strict=True)]
        dims = len(found.largest_torus)
        return f"{found.name}:{'x'.join(map(str, sizes[:dims]))}"
    own = assign_devices(cluster.local_rank, cluster.local_size, count)
    hosts, left = divmod(cluster.world_size, cluster.local_size)
    if left:
        raise _unseen(str(cluster))
    return f"{found.name}:{hosts}x{cluster.local_size * len(own or range(count))}"


def _unseen(found: str) -> TargetError:
    return TargetError(
        "the devices of the other processes cannot be seen before a run starts",
        got=f"{AUTO} without runtime.target; {found}",
        fix=_FIX,
    )


_FIX: Final = (
    "name the machine, runtime.target=h100:2x8, or a target file of your own, "
    "runtime.target=./cluster.toml:2x8"
)


@shows_errors
def main() -> int:
    """Read the words of a command line as JSON, and write them with a layout."""
    from tessera.train.runtime.devices import prepare_devices

    words = json.loads(sys.stdin.read())
    prepare_devices(1, "cpu")
    found = with_layout(read_flags(words).overrides)  # and imports its modules
    sys.stdout.write(json.dumps(found) + "\n")
    return 0
