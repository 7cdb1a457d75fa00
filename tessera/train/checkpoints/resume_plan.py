# SPDX-License-Identifier: Apache-2.0
"""``tessera.resume_plan``: what resuming from a checkpoint would read and move.

The plan is made from metadata and layouts alone, without reading an array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tessera.analysis.tables import aligned
from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    TesseraError,
)
from tessera.mesh import Mesh
from tessera.train.checkpoints import manifest
from tessera.train.checkpoints.checkpoint_folder import find_newest
from tessera.train.checkpoints.metadata import Metadata, Stored, read_metadata
from tessera.train.checkpoints.restore_arrays import ArrayRestore, Restoration
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.layout_checks import layout_problems
from tessera.train.config.run_config import Config
from tessera.train.config.settings_checks import check
from tessera.train.loop.build_run import Run

__all__ = ("Move", "ResumePlan", "resume_plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One array, as it was sharded and as it would be.

    Attributes:
      name: Its path in the state.
      form: Dtype and shape as stored: ``float32[6,128,512]``.
      before: The mesh axes that sharded each dim when it was saved, with their sizes:
        ``(-, fsdp 4, tp 2)``.
      now: The same on the new mesh.
      change: ``none``, or ``regroup`` into other stages.
    """

    name: str
    form: str
    before: str
    now: str
    change: str

    @property
    def moves(self) -> bool:
        """Whether it would be sharded differently than it was."""
        return self.change != "none" or self.before != self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What resuming from a checkpoint would do; ``print`` shows it.

    Attributes:
      path: The checkpoint.
      step: Its optimizer steps.
      before: The mesh that it was saved on.
      now: The mesh that the run would resume on.
      data: The row at which the data continues.
      moves: Every array that would be read.
      problems: What does not divide or does not fit; with any, a run is refused.
      notes: What would be initialized, or dropped.
    """

    path: Path
    step: int
    before: str
    now: str
    data: str
    moves: tuple[Move, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def as_text(self) -> str:
        """Meshes, a table of arrays, notes and problems."""
        header = ("array", "form", "was split", "is split")
        rows = [(move.name, move.form, move.before, move.now) for move in self.moves]
        moved = sum(move.moves for move in self.moves)
        regrouped = sum(move.change == "regroup" for move in self.moves)
        parts = [
            f"resume plan: step {self.step}, {self.path}\n"
            f"from  {self.before}\n"
            f"onto  {self.now}\n"
            f"data  {self.data}"
        ]
        if rows:
            parts.append(aligned(header, rows))
            parts.append(
                f"moves          {moved} of {len(self.moves)} arrays"
                + (f"; {regrouped} regrouped by stage" if regrouped else "")
            )
        parts += ["\n".join(f"note           {note}" for note in self.notes)]
        parts += ["\n".join(f"in the way     {text}" for text in self.problems)]
        return "\n\n".join(filter(None, parts))

    __str__ = as_text


def resume_plan(
    path: str | Path, onto: Mesh | Sequence[Any] | Config | None = None
) -> ResumePlan:
    """Plan resuming from a checkpoint on another mesh; nothing is allocated.

    No array is read, and the mesh need not exist. Checksums are not verified: the run
    does that when it reads every byte.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.
      onto: A mesh, or a mesh shape such as ``[[4, 2], ["fsdp", "tp"]]``, for the
        configuration of the checkpoint; or complete settings. None is the mesh that it
        was saved on.

    Returns:
      A plan that prints how each array is and was sharded, and everything that does not
      divide or does not fit.

    Raises:
      CheckpointMismatchError: [T802] another version of Tessera wrote it.
      CheckpointNotFoundError: [T801] there is no complete checkpoint.
      MeshShapeError: [T101] the mesh shape is malformed.
    """
    path, metadata = _newest(Path(path))
    settings, mesh = _onto(metadata, onto)
    moves: tuple[Move, ...] = ()
    notes: list[str] = []
    errors = check(settings) or layout_problems(settings)
    problems = [_in_one_line(error) for error in errors]
    try:
        restoration = Restoration(metadata, Run(settings, mesh))
        problems += restoration.differences()
        moves = tuple(
            _move(name, metadata, restore, mesh)
            for name, restore in restoration.arrays.items()
        )
        notes = restoration.notes()
    except TesseraError as error:
        if not problems:
            problems = [_in_one_line(error)]
    return ResumePlan(
        path=path,
        step=metadata.step,
        before=_saved_mesh(metadata).topology,
        now=mesh.topology,
        data=_data(metadata, settings, mesh),
        moves=moves,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _newest(path: Path) -> tuple[Path, Metadata]:
    path = find_newest(path)
    try:
        return path, read_metadata(path / manifest.LAST)
    except CheckpointMismatchError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"the checkpoint {path} cannot be read",
            got=f"{manifest.LAST}: {error}",
            fix="use the checkpoint before it",
        ) from error


def _onto(
    metadata: Metadata, onto: Mesh | Sequence[Any] | Config | None
) -> tuple[Config, Mesh]:
    if isinstance(onto, Config):
        return onto, Mesh.from_shape(onto.model.mesh_shape)
    saved = _saved_settings(metadata)
    if onto is None:
        mesh = _saved_mesh(metadata)
    else:
        mesh = onto if isinstance(onto, Mesh) else Mesh.from_shape(onto)
    shape = tuple(mesh.shape[axis] for axis in mesh.axes), mesh.axes
    return replace(saved, model=replace(saved.model, mesh_shape=shape)), mesh


def _saved_settings(metadata: Metadata) -> Config:
    try:
        return settings_of_text(metadata.config)
    except CheckpointMismatchError:
        raise
    except ValueError as error:
        raise CheckpointMismatchError(
            "another version of Tessera wrote the configuration of the checkpoint",
            got=str(error),
            fix="pass the settings of the new run to resume_plan",
        ) from error


def _saved_mesh(metadata: Metadata) -> Mesh:
    return Mesh.from_shape([list(metadata.mesh.values()), list(metadata.mesh)])


def _data(metadata: Metadata, settings: Config, mesh: Mesh) -> str:
    now = settings.rows_per_step(mesh)
    before = _saved_settings(metadata).rows_per_step(_saved_mesh(metadata))
    row = f"continues at row {metadata.cursor.rows:,}"
    if now == before:
        return f"{row}, in steps of {now} rows"
    return f"{row}; a step takes {now} rows, and took {before}"


def _move(name: str, metadata: Metadata, restore: ArrayRestore, mesh: Mesh) -> Move:
    stored = metadata.arrays[name]
    return Move(
        name=name,
        form=f"{stored.dtype}[{','.join(map(str, stored.shape))}]",
        before=_split(stored, metadata.mesh),
        now=_split(Stored.of(restore.target), mesh.shape),
        change="regroup" if restore.regroups else "none",
    )


def _split(stored: Stored, sizes: Mapping[str, int]) -> str:
    dims = [
        "×".join(f"{axis} {sizes[axis]}" for axis in axes if sizes[axis] > 1) or "-"
        for axes in stored.layout
    ]
    return f"({', '.join(dims)})" if set(dims) - {"-"} else "whole"


def _in_one_line(error: TesseraError) -> str:
    return f"[{error.code}] {error.what}: {'; '.join(error.got.splitlines())}"
