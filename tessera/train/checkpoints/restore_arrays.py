# SPDX-License-Identifier: Apache-2.0
"""Restores a checkpoint on the mesh of this run, whichever mesh saved it.

Arrays are stored whole, so their old sharding does not matter: each device reads the
block that it holds now. A pipeline stores layers by stage: they are read in the stored
shape and regrouped, one array at a time.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import CheckpointMismatchError
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints import storage
from tessera.train.checkpoints.checkpoint_folder import Checkpoint
from tessera.train.checkpoints.metadata import Metadata, Stored
from tessera.train.config.config_schema import settings_of_text
from tessera.train.data import Corpus
from tessera.train.data.cursor import Cursor
from tessera.train.loop.build_run import Run
from tessera.train.loop.train_state import TrainState
from tessera.train.models.pipeline_stages import StageSplit

# Parts of the state that a setting adds or removes.
_OPTIONAL: Final = {
    "loss_scale": "training.mixed_precision",
    "spikes": "training.on_spike",
}


@dataclass(frozen=True)
class Restoration:
    """Restores one checkpoint in one run; only ``restore`` allocates anything.

    Attributes:
      metadata: The checkpoint's description.
      run: The run; its mesh may be abstract if ``restore`` is not called.
    """

    metadata: Metadata
    run: Run

    @cached_property
    def arrays(self) -> Mapping[str, tuple[jax.ShapeDtypeStruct, bool]]:
        """How each array is read that the checkpoint has as this run needs it.

        Its stored shape and the sharding to read it with, and whether its layers are
        regrouped into other stages then.
        """
        return {
            name: self._source(name, stored, self._targets[name])
            for name, stored in self.metadata.arrays.items()
            if self._saved_form(name) == self._target_form(name)
        }

    @cached_property
    def _targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        return named_leaves(self.run.abstract_state)

    @cached_property
    def _saved_split(self) -> StageSplit | None:
        return split_of(self.metadata)

    @property
    def _optional(self) -> dict[str, str]:
        optional = {**_OPTIONAL}
        if self.run.config.training.eval_only:
            optional |= {"optimizer": "training.eval_only"}
        if not self.run.step_config.keeps_reference:
            optional |= {"reference": "training.objective"}
        return optional

    def cursor(self, corpus: Corpus) -> Cursor:
        """Where the run continues in its data; an evaluation may have other data.

        Raises:
          DataChangedError: [T803] the order of the data differs.
        """
        training = self.run.config.training
        how = "restart" if training.eval_only else training.resume_data
        return self.metadata.cursor.resumed(corpus, how)

    def differences(self) -> list[str]:
        """Every array whose dtype or shape differs, or that only one side has.

        And settings by which equal arrays would make another model.
        """
        saved, targets = self.metadata.arrays, self._targets
        lines: list[str] = []
        for name in sorted(saved.keys() | targets.keys()):
            is_in_both = name in saved and name in targets
            if _part(name) in self._optional and not is_in_both:
                continue
            before, now = self._saved_form(name), self._target_form(name)
            if before != now:
                lines.append(f"{name}: saved {before}, this run {now}")
        return [*self._objective_differences(), *lines, *self._adapter_differences()]

    def _objective_differences(self) -> Iterator[str]:
        """What the checkpoint's run learned, where this one goes on with its state."""
        objective = self.run.config.training.objective
        with suppress(ValueError):
            saved = settings_of_text(self.metadata.config).training.objective
            if saved != objective and not self.run.config.training.eval_only:
                yield f"training.objective: saved {saved}, this run {objective}"

    def _saved_form(self, name: str) -> str:
        return _described(self._saved_split, name, self.metadata.arrays.get(name))

    def _target_form(self, name: str) -> str:
        target = self._targets.get(name)
        stored = None if target is None else Stored.of(target)
        return _described(self.run.model.split, name, stored)

    def _adapter_differences(self) -> Iterator[str]:
        """What adapters of the same shapes are multiplied with."""
        model = self.run.config.model
        if not self.run.model.adapters:
            return
        with suppress(ValueError):
            # A configuration that is not understood is that of other arrays.
            saved = settings_of_text(self.metadata.config).model
            if saved.definition == model.definition:
                yield from model.kind.incompatibilities(model.config, saved.config)

    def notes(self) -> list[str]:
        """What is initialized or dropped because of a setting of this run."""
        saved = set(map(_part, self.metadata.arrays))
        targets = set(map(_part, self._targets))
        return [
            f"the checkpoint has no {part}, which {setting} needs: it is initialized"
            if part in targets
            else f"{setting} does not use the checkpoint's {part}: it is dropped"
            for part, setting in self._optional.items()
            if (part in saved) != (part in targets)
        ]

    def check(self) -> None:
        """Check that the checkpoint has the arrays of this run.

        Raises:
          CheckpointMismatchError: [T802] it has not; lists every difference.
        """
        if lines := self.differences():
            fix = "use the model and the optimizer of the checkpoint, which its "
            fix += "metadata.json names"
            if lines[0].startswith(("training.objective", "reference/")):
                fix = "begin with its weights: tessera export RUN weights.safetensors, "
                fix += "and training.init_from=weights.safetensors training.resume=none"
            if lines[0].startswith("reference/"):
                fix = f"preference.reference=precomputed, if its run had it; or {fix}"
            raise CheckpointMismatchError(
                f"the checkpoint of step {self.metadata.step} does not hold what this "
                "run needs",
                got="\n".join(lines),
                fix=fix,
            )

    def restore(self, checkpoint: Checkpoint) -> TrainState:
        """Read the state; each device reads the blocks that it holds."""
        sources = {name: source for name, (source, _) in self.arrays.items()}
        arrays = storage.read(checkpoint.state, sources)
        for name, (_, regroups) in self.arrays.items():
            if regroups:
                # One at a time: only one array is in memory twice.
                arrays[name] = self._regrouped(arrays.pop(name), self._targets[name])
        if missing := self._targets.keys() - arrays.keys():
            fresh = named_leaves(self.run.fresh_parts())
            arrays |= {name: fresh[name] for name in missing}
        treedef = jax.tree.structure(self.run.abstract_state)
        return jax.tree.unflatten(treedef, [arrays[name] for name in self._targets])

    def _regrouped(self, array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        split, out = self.run.model.split, target.sharding
        regroup = jax.jit(_regroup, static_argnums=(1, 2), out_shardings=out)
        return regroup(array, self._saved_split, split)

    def _source(
        self, name: str, stored: Stored, target: jax.ShapeDtypeStruct
    ) -> tuple[jax.ShapeDtypeStruct, bool]:
        split, shape = self.run.model.split, stored.shape
        sharding = target.sharding
        was_staged = _has_stage_dims(self._saved_split, name, shape)
        is_staged = _has_stage_dims(split, name, target.shape)
        regroups = (was_staged or is_staged) and self._saved_split != split
        if regroups:
            spec = tuple(getattr(sharding, "spec", ()))
            spec += (None,) * (len(target.shape) - len(spec))
            whole = (None,) * (3 if was_staged else 1)
            spec = (*whole, *spec[3 if is_staged else 1 :])
            mesh = self.run.mesh.compile_mesh
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
        dtype = jnp.dtype(stored.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), regroups


def _part(name: str) -> str:
    """The field of the state that an array is in, such as ``params``."""
    return name.partition("/")[0]


def _has_stage_dims(
    split: StageSplit | None, name: str, shape: tuple[int, ...]
) -> bool:
    """Whether an array has the three leading dims of layers stored by stage."""
    if split is None or f"/{split.blocks}/" not in name:
        return False
    return shape[:3] == (split.chunks, split.stages, split.depth)


def split_of(metadata: Metadata) -> StageSplit | None:
    """The stages by which layer arrays are stored; None without a pipeline."""
    if metadata.stages is None:
        return None
    stages, runs = metadata.stages
    return StageSplit(stages, tuple(range(*run) for run in runs), metadata.blocks)


def plain_shape(
    split: StageSplit | None, name: str, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape that an array has without stages: ``[layers, ...]``."""
    if split is None or not _has_stage_dims(split, name, shape):
        return shape
    return (split.num_layers, *shape[3:])


def _described(split: StageSplit | None, name: str, stored: Stored | None) -> str:
    """Dtype and shape of an array as both sides of a comparison show them."""
    if stored is None:
        return "has none"
    sizes = list(map(str, plain_shape(split, name, stored.shape)))
    return f"{stored.dtype}[{','.join(sizes)}]"


def _regroup(
    array: jax.Array, before: StageSplit | None, now: StageSplit | None
) -> jax.Array:
    plain = array if before is None else before.unstack(array)
    return plain if now is None else now.stack(plain)
