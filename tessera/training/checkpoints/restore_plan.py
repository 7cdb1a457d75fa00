# SPDX-License-Identifier: Apache-2.0
"""The plan of a restoration: from metadata and layouts, without an array."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax

from tessera.analysis.memory import format_bytes
from tessera.analysis.tables import aligned
from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MeshShapeError,
    TesseraError,
)
from tessera.mesh import Mesh
from tessera.training.checkpoints import manifest
from tessera.training.checkpoints.checkpoint_folder import find_newest
from tessera.training.checkpoints.metadata import Metadata, Stored, read_metadata
from tessera.training.checkpoints.restoring import Reading, Restoration
from tessera.training.config import Config
from tessera.training.layout_checks import layout_problems
from tessera.training.run import Run
from tessera.training.schema import settings_of_text
from tessera.training.settings_checks import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One array, from where it was to where it would be.

    Attributes:
      name: Its path in the state.
      form: Dtype and shape as stored: ``float32[6,128,512]``.
      before: The mesh axes that split each dim when it was saved, and into how many
        parts: ``(-, fsdp 4, tp 2)``.
      now: The same on the new mesh.
      change: ``none``, ``regroup`` into other stages, or ``spread`` over other copies.
      nbytes: Of the whole array.
      device_nbytes: Of what one device would hold.
    """

    name: str
    form: str
    before: str
    now: str
    change: str
    nbytes: int
    device_nbytes: int

    @property
    def moves(self) -> bool:
        """Whether it is split in another way than it was."""
        return self.change != "none" or self.before != self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What going on from a checkpoint would do; ``print`` shows it.

    Attributes:
      path: The checkpoint.
      step: Optimizer steps that it has behind it.
      before: The mesh that it was saved on, and by how many processes.
      now: The mesh that it would go on.
      data: Where the data goes on.
      moves: Every array that would be read.
      host_nbytes: What each host would read.
      problems: What does not divide or does not fit; with any, a run is refused.
      notes: What begins fresh, or is given up.
    """

    path: Path
    step: int
    before: str
    now: str
    data: str
    moves: tuple[Move, ...]
    host_nbytes: tuple[int, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def as_text(self) -> str:
        """Meshes, a table of arrays, bytes for each host, and what is in the way."""
        rows = [
            [
                *(move.name, move.form, move.before, move.now),
                *(format_bytes(move.nbytes), format_bytes(move.device_nbytes)),
            ]
            for move in self.moves
        ]
        header = ("array", "form", "was split", "is split", "bytes", "per device")
        moved = [move for move in self.moves if move.moves]
        regrouped = sum(move.change == "regroup" for move in self.moves)
        total = format_bytes(sum(move.nbytes for move in self.moves))
        held = sum(move.device_nbytes for move in self.moves)
        parts = [
            f"resume plan: step {self.step}, {self.path}\n"
            f"from  {self.before}\n"
            f"onto  {self.now}\n"
            f"data  {self.data}"
        ]
        if rows:
            parts.append(aligned(header, rows, right=("bytes", "per device")))
            parts.append(
                f"moves          {len(moved)} of {len(self.moves)} arrays, "
                f"{format_bytes(sum(move.nbytes for move in moved))} of {total}"
                + (f"; {regrouped} regrouped by stage" if regrouped else "")
                + f"\nhost reads     {self._hosts()}"
                f"\ndevice holds   {format_bytes(held)}"
            )
        parts += ["\n".join(f"note           {note}" for note in self.notes)]
        parts += ["\n".join(f"in the way     {text}" for text in self.problems)]
        return "\n\n".join(filter(None, parts))

    __str__ = as_text

    def _hosts(self) -> str:
        sizes = [format_bytes(size) for size in self.host_nbytes]
        if len(set(sizes)) == 1:
            return f"{sizes[0]} each, {len(sizes)} host{'s' * (len(sizes) > 1)}"
        return ", ".join(f"{number}: {size}" for number, size in enumerate(sizes))


def planned(
    path: Path, onto: Mesh | Sequence[Any] | Config | None, hosts: int
) -> ResumePlan:
    """See ``resume_plan``."""
    path, metadata = _newest(path)
    settings, mesh = _onto(metadata, onto)
    if hosts < 1 or mesh.size % hosts:
        raise MeshShapeError(
            "hosts have to have as many devices each",
            got=f"{mesh.size} devices / {hosts} hosts",
            fix="give a number of hosts that divides the devices",
        )
    moves: tuple[Move, ...] = ()
    reads: tuple[int, ...] = ()
    notes: list[str] = []
    found = check(settings) or layout_problems(settings)
    problems = [_in_one_line(error) for error in found]
    try:
        restoration = Restoration(metadata, Run(settings, mesh))
        problems += restoration.differences()
        readings = restoration.readings
        moves = tuple(
            _move(name, metadata, reading, mesh) for name, reading in readings.items()
        )
        each = [_read_nbytes(reading, hosts) for reading in readings.values()]
        reads = tuple(map(sum, zip(*each, strict=True)))
        notes = restoration.notes()
    except TesseraError as error:
        if not problems:
            problems = [_in_one_line(error)]
    return ResumePlan(
        path=path,
        step=metadata.step,
        before=f"{_saved_mesh(metadata).topology}, "
        f"{_counted(metadata.processes, 'process', 'processes')}",
        now=f"{mesh.topology}, {_counted(hosts, 'host', 'hosts')}",
        data=_data(metadata, settings, mesh),
        moves=moves,
        host_nbytes=reads,
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
            fix="take the one before it",
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
            "the configuration of the checkpoint is not of this version of Tessera",
            got=str(error),
            fix="give resume_plan the settings of the run that is to go on",
        ) from error


def _saved_mesh(metadata: Metadata) -> Mesh:
    return Mesh.from_shape([list(metadata.mesh.values()), list(metadata.mesh)])


def _data(metadata: Metadata, settings: Config, mesh: Mesh) -> str:
    now = settings.rows_per_step(mesh)
    before = _saved_settings(metadata).rows_per_step(_saved_mesh(metadata))
    where = f"goes on at row {metadata.cursor.rows:,}"
    if now == before:
        return f"{where}, in steps of {now} rows"
    return f"{where}; a step takes {now} rows, and took {before}"


def _move(name: str, metadata: Metadata, reading: Reading, mesh: Mesh) -> Move:
    stored = metadata.arrays[name]
    return Move(
        name=name,
        form=f"{stored.dtype}[{','.join(map(str, stored.shape))}]",
        before=_split(stored, metadata.mesh),
        now=_split(Stored.of(reading.target), mesh.shape),
        change=reading.change,
        nbytes=reading.nbytes,
        device_nbytes=_shard_nbytes(reading.target),
    )


def _read_nbytes(reading: Reading, hosts: int) -> list[int]:
    """What each host reads of one array: every part once, however many hold it."""
    sharding = reading.source.sharding
    parts = sharding.devices_indices_map(reading.source.shape)
    keys = [str(parts[device]) for device in sharding.mesh.devices.flat]
    share, size = len(keys) // hosts, _shard_nbytes(reading.source)
    return [
        size * len(set(keys[host * share : (host + 1) * share]))
        for host in range(hosts)
    ]


def _shard_nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None, "every array of a run has a place"
    return leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape))


def _split(stored: Stored, sizes: Mapping[str, int]) -> str:
    dims = [
        "×".join(f"{axis} {sizes[axis]}" for axis in axes if sizes[axis] > 1) or "-"
        for axes in stored.layout
    ]
    return f"({', '.join(dims)})" if set(dims) - {"-"} else "whole"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _in_one_line(error: TesseraError) -> str:
    return f"[{error.code}] {error.what}: {'; '.join(error.got.splitlines())}"
