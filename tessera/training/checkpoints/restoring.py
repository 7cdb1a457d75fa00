# SPDX-License-Identifier: Apache-2.0
"""The arrays of a checkpoint on the mesh of this run, whatever mesh they came from.

Arrays are stored whole, so how they were split does not matter: each device reads the
part that it holds now. Two things depend on the mesh by their shape. A pipeline stores
layers by stage: they are read as they were stored and regrouped, one array after the
other. And compression keeps what each device along ``dp`` has not sent: where their
number changes, what they owe together is spread evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import CheckpointMismatchError
from tessera.models.pipeline_stages import StageSplit
from tessera.training.checkpoints import storage
from tessera.training.checkpoints.checkpoint_folder import Checkpoint
from tessera.training.checkpoints.metadata import Metadata, Stored
from tessera.training.checkpoints.saving import named
from tessera.training.run import Run
from tessera.training.train_state import TrainState

# Parts of a state that a setting of this run may add or leave out, and what then.
_OPTIONAL: Final = {
    "loss_scale": "training.mixed_precision",
    "residual": "training.gradient_compression",
}


@dataclass(frozen=True)
class Reading:
    """How one array comes from its files to its place.

    Attributes:
      source: Its shape as it is stored, and the sharding to read it with.
      target: Its shape and sharding in this run.
      change: What happens in between: nothing, layers are regrouped into other stages,
        or what copies along ``dp`` owe is spread over another number of them.
    """

    source: jax.ShapeDtypeStruct
    target: jax.ShapeDtypeStruct
    change: Literal["none", "regroup", "spread"] = "none"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array as it is stored."""
        return prod(self.source.shape) * self.source.dtype.itemsize


@dataclass(frozen=True)
class Restoration:
    """One checkpoint in one run; allocates nothing but in ``run``.

    Attributes:
      metadata: What the checkpoint says of itself.
      job: The run; its mesh may be abstract as long as nothing is restored.
    """

    metadata: Metadata
    job: Run

    @cached_property
    def readings(self) -> Mapping[str, Reading]:
        """How each array of the checkpoint that this run has is read."""
        targets = self._targets
        return {
            name: self._reading(name, stored, targets[name])
            for name, stored in self.metadata.arrays.items()
            if name in targets
        }

    @cached_property
    def _targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        return named(self.job.abstract_state)

    @cached_property
    def _saved_split(self) -> StageSplit | None:
        return split_of(self.metadata)

    def differences(self) -> list[str]:
        """Every array that does not fit, with both sides; optional parts aside."""
        saved, targets = self.metadata.arrays, self._targets
        lines: list[str] = []
        for name in sorted(saved.keys() | targets.keys()):
            if name.partition("/")[0] in _OPTIONAL and not (
                name in saved and name in targets
            ):
                continue
            before = self._saved_form(name, saved.get(name))
            now = self._plain_form(name, targets.get(name))
            if before != now:
                lines.append(f"{name}: saved {before}, this run {now}")
        return lines

    def notes(self) -> list[str]:
        """What begins fresh, or is given up, because of a setting of this run."""
        saved = {name.partition("/")[0] for name in self.metadata.arrays}
        targets = {name.partition("/")[0] for name in self._targets}
        notes = [
            f"the checkpoint has no {part}, which {setting} asks for: it begins fresh"
            if part in targets
            else f"{setting} has no use for the checkpoint's {part}: it is given up"
            for part, setting in _OPTIONAL.items()
            if (part in saved) != (part in targets)
        ]
        if any(reading.change == "spread" for reading in self.readings.values()):
            notes.append(
                "another number of devices along dp: what they owed of their gradients "
                "together is spread evenly over those of now"
            )
        return notes

    def check(self) -> None:
        """See that the checkpoint's arrays are those of this run.

        Raises:
          CheckpointMismatchError: [T802] some are not; lists all of them.
        """
        if lines := self.differences():
            raise CheckpointMismatchError(
                f"the checkpoint of step {self.metadata.step} does not hold what this "
                "run needs",
                got="\n".join(lines),
                fix="use the model and the optimizer of the checkpoint, which its "
                "metadata.json names",
            )

    def run(self, checkpoint: Checkpoint) -> TrainState:
        """Read the state, every part of it by the device that holds it."""
        sources = {name: reading.source for name, reading in self.readings.items()}
        arrays = storage.read(checkpoint.state, sources)
        for name, reading in self.readings.items():
            if reading.change != "none":
                # One after the other: a moment's copy is of one array, not of all.
                arrays[name] = self._changed(arrays.pop(name), reading)
        if missing := self._targets.keys() - arrays.keys():
            fresh = self._fresh()
            arrays |= {name: fresh[name] for name in missing}
        treedef = jax.tree.structure(self.job.abstract_state)
        return jax.tree.unflatten(treedef, [arrays[name] for name in self._targets])

    def _fresh(self) -> dict[str, jax.Array]:
        """The optional parts of this run's state as they begin."""
        # Copied: a step donates its state, and the job's is its own.
        scale = jax.tree.map(jnp.copy, self.job.loss_scale)
        scale = jax.device_put(scale, NamedSharding(self.job.mesh.jax, PartitionSpec()))
        residual = self.job.step_config.exchange.first_residual()
        return named({"loss_scale": scale, "residual": residual})

    def _changed(self, array: jax.Array, reading: Reading) -> jax.Array:
        place = reading.target.sharding
        if reading.change == "spread":
            spread = jax.jit(_spread, static_argnums=1, out_shardings=place)
            return spread(array, reading.target.shape[0])
        regroup = jax.jit(_regrouped, static_argnums=(1, 2), out_shardings=place)
        return regroup(array, self._saved_split, self.job.model.split)

    def _reading(
        self, name: str, stored: Stored, target: jax.ShapeDtypeStruct
    ) -> Reading:
        shape, dtype = stored.shape, jnp.dtype(stored.dtype)
        spec = tuple(getattr(target.sharding, "spec", ()))
        spec += (None,) * (len(target.shape) - len(spec))
        before = _stage_dims(self._saved_split, name, shape)
        now = _stage_dims(self.job.model.split, name, target.shape)
        if name.startswith("residual/") and shape[:1] != target.shape[:1]:
            # Every device of dp needs what all of them owed.
            return Reading(
                self._source(shape, dtype, (None, *spec[1:])), target, "spread"
            )
        if (before or now) and self._saved_split != self.job.model.split:
            lead = (None,) * (3 if before else 1)
            rest = spec[3 if now else 1 :]
            return Reading(
                self._source(shape, dtype, (*lead, *rest)), target, "regroup"
            )
        source = jax.ShapeDtypeStruct(shape, dtype, sharding=target.sharding)
        return Reading(source, target)

    def _source(
        self, shape: tuple[int, ...], dtype: Any, spec: tuple[Any, ...]
    ) -> jax.ShapeDtypeStruct:
        place = NamedSharding(self.job.mesh.compile_mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def _saved_form(self, name: str, stored: Stored | None) -> str:
        if stored is None:
            return "has none"
        shape = plain_shape(self._saved_split, name, stored.shape)
        return _form(name, shape, stored.dtype)

    def _plain_form(self, name: str, leaf: jax.ShapeDtypeStruct | None) -> str:
        if leaf is None:
            return "has none"
        shape = plain_shape(self.job.model.split, name, tuple(leaf.shape))
        return _form(name, shape, leaf.dtype.name)


def _stage_dims(split: StageSplit | None, name: str, shape: tuple[int, ...]) -> bool:
    """Whether an array has the three leading dims of layers in stages."""
    if split is None or "/decoder/" not in name:
        return False
    return shape[:3] == (split.chunks, split.stages, split.depth)


def split_of(metadata: Metadata) -> StageSplit | None:
    """By which stages the arrays of layers are stored; None is in their order."""
    if metadata.stages is None:
        return None
    stages, runs = metadata.stages
    return StageSplit(stages, tuple(range(*run) for run in runs))


def plain_shape(
    split: StageSplit | None, name: str, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of an array of a state without stages."""
    if split is None or not _stage_dims(split, name, shape):
        return shape
    return (split.num_layers, *shape[3:])


def _form(name: str, shape: tuple[int, ...], dtype: str) -> str:
    # How many copies along dp keep a residual is no part of its form.
    sizes = ["dp", *map(str, shape[1:])] if name.startswith("residual/") else shape
    return f"{dtype}[{','.join(map(str, sizes))}]"


def _regrouped(
    array: jax.Array, before: StageSplit | None, now: StageSplit | None
) -> jax.Array:
    plain = array if before is None else before.unstack(array)
    return plain if now is None else now.stack(plain)


def _spread(array: jax.Array, copies: int) -> jax.Array:
    share = array.sum(0) / copies
    return jnp.broadcast_to(share, (copies, *share.shape))
