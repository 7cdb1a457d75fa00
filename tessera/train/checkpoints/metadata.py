# SPDX-License-Identifier: Apache-2.0
"""Reads and writes ``metadata.json``, which describes the arrays of a checkpoint.

It is plain data: numbers, names and the text of a configuration. Reading it constructs
only the dataclasses below, whatever the file contains.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import CheckpointMismatchError, printable
from tessera.shard_spec import axes_of_dims
from tessera.train.data.cursor import Cursor
from tessera.train.files.regular_files import read_regular
from tessera.train.files.untrusted_json import Count, decode_json, parse_json
from tessera.train.loop.run_folder import write_durably
from tessera.version import __version__

# Incremented when the format changes; older versions stay readable.
SCHEMA: Final = 1
_VERSIONED: Final = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# For a model with ten thousand arrays the file has a few MiB.
_MAX_BYTES: Final = 2**25


@dataclass(frozen=True)
class Stored:
    """How one array of a checkpoint is stored.

    Attributes:
      shape: Its global shape.
      dtype: ``float32``, ``bfloat16``, …
      layout: The axes of the saving run's mesh that sharded each dim.
      weak: Whether its dtype is weak, as of ``jnp.asarray(0.1)``: other arrays do not
        take it over.
    """

    shape: tuple[Count, ...]
    dtype: str
    layout: tuple[tuple[str, ...], ...]
    weak: bool = False

    @classmethod
    def of(cls, leaf: jax.ShapeDtypeStruct | jax.Array | np.ndarray) -> "Stored":
        """The description of an array; without a mesh no dim has an axis."""
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        layout = axes_of_dims(PartitionSpec(*spec), len(leaf.shape))
        weak = bool(getattr(leaf, "weak_type", False))
        return cls(tuple(leaf.shape), leaf.dtype.name, layout, weak)


@dataclass(frozen=True)
class Metadata:
    """The contents of ``metadata.json``.

    Attributes:
      step: Optimizer steps done.
      arrays: Every array, by its path in the state: ``params/decoder/mlp/up/kernel``.
      mesh: Axes and sizes of the saving run's mesh, outermost first.
      processes: Number of processes that saved it.
      stages: Devices along the pipeline, and the layers ``(start, stop)`` of each
        virtual stage, in the order in which layer arrays are stored; None without a
        pipeline.
      cursor: Position in the data.
      random: Seed and implementation of the random keys; of a loop's state, the
        implementation of each.
      config: The run's configuration, YAML.
      versions: Versions of Tessera, JAX and other libraries that wrote it.
      published: The text of the files of the folder that the model came from, by name,
        which an export writes again; none if it came from no folder.
      blocks: The entry of the parameters that is stored by stage.
      values: Leaves of a loop's state that are no arrays, as JSON.
      is_validated: Whether the evaluation that is due after the step has run.
      schema: Version of the checkpoint format.
    """

    step: Count
    arrays: Mapping[str, Stored]
    mesh: Mapping[str, Count]
    processes: Count
    stages: tuple[Count, tuple[tuple[Count, Count], ...]] | None
    cursor: Cursor
    random: Mapping[str, str | int]
    config: str
    versions: Mapping[str, str]
    published: Mapping[str, str] = field(default_factory=dict)
    blocks: str = "decoder"
    values: Mapping[str, str] = field(default_factory=dict)
    is_validated: bool = True
    schema: Count = SCHEMA


def library_versions() -> dict[str, str]:
    """Versions of Tessera and of the libraries that a checkpoint depends on."""
    return {"tessera": __version__} | {name: version(name) for name in _VERSIONED}


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
      ValueError: Tessera did not write it, or its step is not the one in the name of
        its directory.
    """
    values = parse_json(read_regular(path, _MAX_BYTES), longest=_MAX_BYTES)
    written = decode_json(_Written, values)
    if written.schema > SCHEMA:
        written_by = written.versions.get("tessera", "")
        raise CheckpointMismatchError(
            f"a newer Tessera wrote the checkpoint {path.parent}",
            got=f"schema {written.schema}, and this Tessera reads up to {SCHEMA}",
            fix=f"install Tessera {printable(written_by, longest=40)} or newer",
        )
    metadata: Metadata = decode_json(Metadata, values)
    for array in metadata.arrays.items():
        _check_array(*array, metadata.mesh)
    if metadata.stages is not None:
        _check_stages(*metadata.stages)
    name = path.parent.name
    if name.isdecimal() and int(name) != metadata.step:
        raise ValueError(f"step {metadata.step}, in the folder of step {name}")
    return metadata


def _check_array(name: str, array: Stored, mesh: Mapping[str, int]) -> None:
    """Raise ValueError unless an array has numbers and axes that can be its own."""
    try:
        dtype = jnp.dtype(array.dtype)
    except TypeError:
        dtype = jnp.dtype(object)
    if dtype.name != array.dtype or dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"{name} is of no dtype of numbers: {array.dtype[:40]!r}")
    axes = [axis for axes in array.layout for axis in axes]
    if len(array.layout) != len(array.shape) or not set(axes) <= mesh.keys():
        raise ValueError(f"the layout of {name} is not one of its dims on its mesh")


def _check_stages(stages: int, runs: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError unless virtual stages share the layers from 0 on."""
    starts, stops = zip(*sorted(runs), strict=True) if runs else ((), ())
    ends = [0, *stops]
    are_all = [*starts] == ends[:-1] and ends == sorted(ends)
    if stages < 1 or not runs or len(runs) % stages or not are_all:
        raise ValueError(f"layers {[*runs]} are not those of {stages} stages")


@dataclass(frozen=True)
class _Written:
    """The format, and the versions that wrote it; of a newer format nothing else."""

    schema: Count
    versions: Mapping[str, str]
