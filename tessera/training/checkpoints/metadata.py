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
from tessera.training.data.cursor import Cursor
from tessera.training.outputs import write_durably
from tessera.untrusted import count_of, parse_json, printable, text_of

# Raised when what is stored, or how, changes; older ones stay readable.
SCHEMA: Final = 1
# Of a model of thousands of arrays it is a few MiB.
_LONGEST: Final = 2**28


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
    write_durably(path, (text, "\n"))


def read_metadata(path: Path) -> Metadata:
    """Read a checkpoint's ``metadata.json``.

    Raises:
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
      OSError: It cannot be read.
      ValueError: It is not what Tessera writes, or of another step than its folder's
        name says.
    """
    with path.open("rb") as file:
        read = parse_json(file.read(_LONGEST + 1), longest=_LONGEST)
    try:
        schema = count_of(read["schema"])
        if schema <= SCHEMA:
            metadata = _metadata(read)
            _check_step(metadata.step, path.parent.name)
            return metadata
        written_by = printable(text_of(read["versions"]["tessera"]), longest=40)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    raise CheckpointMismatchError(
        f"a newer Tessera wrote the checkpoint {path.parent}",
        got=f"schema {schema}, and this Tessera reads up to {SCHEMA}",
        fix=f"install Tessera {written_by} or newer",
    )


def _metadata(read: dict[str, Any]) -> Metadata:
    stages, is_validated = read["stages"], read.get("is_validated", True)
    if type(is_validated) is not bool:
        raise ValueError("is_validated is neither true nor false")
    cursor = read["cursor"]
    return Metadata(
        step=count_of(read["step"]),
        arrays={
            name: Stored(
                shape=tuple(map(count_of, _list(array["shape"]))),
                dtype=text_of(array["dtype"]),
                layout=_axes_of(array["layout"]),
            )
            for name, array in read["arrays"].items()
        },
        mesh={axis: count_of(size) for axis, size in read["mesh"].items()},
        processes=count_of(read["processes"]),
        stages=None
        if stages is None
        else (count_of(stages[0]), tuple(_run(*run) for run in _list(stages[1]))),
        cursor=Cursor(count_of(cursor["rows"]), _plain(cursor["order"])),
        random=_plain(read["random"]),
        config=text_of(read["config"]),
        versions=_texts(read["versions"]),
        is_validated=is_validated,
        schema=count_of(read["schema"]),
    )


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one dim."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _run(start: Any, stop: Any) -> tuple[int, int]:
    return count_of(start), count_of(stop)


def _check_step(step: int, folder: str) -> None:
    """See that a checkpoint is of the step that its folder is called after, if any."""
    if folder.isdecimal() and int(folder) != step:
        raise ValueError(f"step {step}, in the folder of step {folder}")


def _texts(values: Any) -> dict[str, str]:
    return {name: text_of(value) for name, value in values.items()}


def _axes_of(layout: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(text_of, _list(axes))) for axes in _list(layout))


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a {type(value).__name__} is no list")
    return value


def _plain(values: Any) -> dict[str, str | int]:
    """Numbers and texts by name."""
    if not all(type(value) in (str, int) for value in values.values()):
        raise ValueError("neither numbers nor texts")
    return dict(values)
