# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself in ``metadata.json``, beside its arrays.

It is data: numbers, names and the text of a configuration. Reading it makes nothing but
the values of these classes, whatever is in the file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax
from jax.sharding import NamedSharding

from tessera.errors import CheckpointMismatchError
from tessera.training.checkpoints.manifest import write_durably
from tessera.training.data.cursor import Cursor

# Raised when what is stored, or how, changes; older ones stay readable.
SCHEMA: Final = 1


@dataclass(frozen=True)
class Stored:
    """One array of a checkpoint.

    Attributes:
      shape: Its global shape.
      dtype: ``float32``, ``bfloat16``, …
      layout: The mesh axes that split each dim, of the mesh that it was saved on.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, leaf: jax.ShapeDtypeStruct) -> "Stored":
        """The form of an array on a mesh."""
        assert isinstance(leaf.sharding, NamedSharding), "an array of a run has a mesh"
        spec = [*leaf.sharding.spec]
        spec += [None] * (len(leaf.shape) - len(spec))
        layout = tuple(map(_axes, spec))
        return cls(tuple(leaf.shape), leaf.dtype.name, layout)


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint is of.

    Attributes:
      step: Optimizer steps done.
      arrays: Every array, by its path in the state: ``params/decoder/mlp/up/kernel``.
      mesh: Axes and sizes of the mesh it was saved on, outermost first.
      processes: How many processes saved it.
      stages: Devices along the pipeline and the run of layers ``(start, stop)`` of each
        virtual stage, by which the arrays of layers are stored; None without pipeline.
      cursor: How far the data was read.
      random: The seed and the kind of the random keys.
      config: The configuration of the run, YAML.
      versions: Of Tessera, JAX and others that wrote it.
      is_validated: Whether the evaluation that is due after the step is done.
      schema: The form of this file and of the checkpoint.
    """

    step: int
    arrays: Mapping[str, Stored]
    mesh: Mapping[str, int]
    processes: int
    stages: tuple[int, tuple[tuple[int, int], ...]] | None
    cursor: Cursor
    random: Mapping[str, str | int]
    config: str
    versions: Mapping[str, str]
    is_validated: bool = True
    schema: int = SCHEMA


def write_metadata(path: Path, metadata: Metadata) -> None:
    """Write a checkpoint's ``metadata.json``.

    Raises:
      OSError: It cannot be written.
    """
    text = json.dumps(asdict(metadata), indent=1, sort_keys=True)
    write_durably(path, text + "\n")


def read_metadata(path: Path) -> Metadata:
    """Read a checkpoint's ``metadata.json``.

    Raises:
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
      OSError: It cannot be read.
      ValueError: It is not what Tessera writes.
    """
    read = json.loads(path.read_text("utf-8"))
    try:
        schema = _int(read["schema"])
        if schema <= SCHEMA:
            return _metadata(read)
        written_by = str(read["versions"]["tessera"])
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    raise CheckpointMismatchError(
        f"a newer Tessera wrote the checkpoint {path.parent}",
        got=f"schema {schema}, and this Tessera reads up to {SCHEMA}",
        fix=f"install Tessera {written_by} or newer",
    )


def _metadata(read: dict[str, Any]) -> Metadata:
    stages = read["stages"]
    return Metadata(
        step=_int(read["step"]),
        arrays={
            str(name): Stored(
                shape=tuple(map(_int, array["shape"])),
                dtype=str(array["dtype"]),
                layout=tuple(tuple(map(str, axes)) for axes in array["layout"]),
            )
            for name, array in read["arrays"].items()
        },
        mesh={str(axis): _int(size) for axis, size in read["mesh"].items()},
        processes=_int(read["processes"]),
        stages=stages and (_int(stages[0]), tuple(_run(*run) for run in stages[1])),
        cursor=Cursor(_int(read["cursor"]["rows"]), dict(read["cursor"]["order"])),
        random=dict(read["random"]),
        config=str(read["config"]),
        versions={str(k): str(v) for k, v in read["versions"].items()},
        is_validated=bool(read.get("is_validated", True)),
        schema=_int(read["schema"]),
    )


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one dim."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _run(start: Any, stop: Any) -> tuple[int, int]:
    return _int(start), _int(stop)


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
