# SPDX-License-Identifier: Apache-2.0
"""Saves and restores the state of a loop of the user's own, on any mesh.

The folder has the form of a run's: arrays by Orbax, ``metadata.json``, and the
``manifest.sha256`` that makes a checkpoint complete.
"""

import json
import operator
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    SettingValueError,
    TesseraWarning,
)
from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.train.checkpoints import checkpoint_folder, manifest
from tessera.train.checkpoints.checkpoint_folder import STATE, Checkpoint
from tessera.train.checkpoints.first_process import (
    broadcast_from_first,
    expecting_all,
)
from tessera.train.checkpoints.loop_leaves import (
    StateLeaves,
    form_of,
    is_number_of,
    named_parts,
    restored_leaf,
    saved_forms,
    sharding_of,
)
from tessera.train.checkpoints.metadata import (
    Metadata,
    Stored,
    library_versions,
    write_metadata,
)
from tessera.train.data.cursor import Cursor

_MOST_LINES = 20


def save_checkpoint(
    folder: str | Path,
    state: Tree,
    *,
    step: int,
    keep: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Save the state of a loop as ``folder/<step>``; returns once it is complete.

    Every process calls it, with the same arguments; each writes its own shards. A
    process that is killed meanwhile leaves the checkpoints that were complete before.

    Args:
      folder: The folder of the checkpoints, on a file system that all processes share;
        created if it does not exist.
      state: A pytree of arrays, typed PRNG keys, Python numbers and strings; dicts,
        NamedTuples of optax, NNX objects. What is no global array has to be the same
        in every process.
      step: Number of the checkpoint, from 0 on.
      keep: How many of the newest checkpoints stay; None keeps all.
      overwrite: Rename the checkpoints of this step and of later ones, which are then
        not restored: ``<step>.replaced``.

    Returns:
      The folder of the checkpoint.

    Raises:
      StateLeafError: [T807] a leaf cannot be stored, or differs by process.
      CheckpointWriteError: [T804] it cannot be written, or there is one of this step or
        of a later one.
      SettingValueError: [T502] the step is no whole number from 0 on, ``keep`` is not
        at least 1, or the folder is an address.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> folder = tempfile.mkdtemp()
      >>> path = save_checkpoint(folder, {"w": jnp.ones(3), "step": 2}, step=2)
      >>> restore_checkpoint(folder, like={"w": jnp.zeros(3), "step": 0})
      {'step': 2, 'w': Array([1., 1., 1.], dtype=float32)}
    """
    # Here, because it imports Orbax, which takes seconds.
    from tessera.train.checkpoints import storage

    root, step = _root_of(folder), _whole("step", step, 0)
    if keep is not None:
        _whole("keep", keep, 1)
    path = root / str(step)
    with expecting_all("save_checkpoint"):
        leaves = StateLeaves.of(state)
        nbytes = sum(array.nbytes for array in leaves.arrays.values())
        lines = broadcast_from_first(lambda: _prepare(root, step, nbytes, overwrite))
    _warn(lines["notes"], stacklevel=3)
    try:
        if leaves.arrays:
            storage.ArrayWrite(path / STATE, leaves.arrays).finish()
    except OSError as error:
        if jax.process_index() == 0:
            checkpoint_folder.remove_failed(path)
        raise _cannot_write(path, error) from error
    broadcast_from_first(lambda: _complete(path, _described(leaves, step), keep))
    return path


def restore_checkpoint(
    folder: str | Path,
    like: Tree,
    *,
    step: int | None = None,
    mesh: Mesh | JaxMesh | None = None,
) -> Tree:
    """The state that ``save_checkpoint`` saved, in the layout of another one.

    Each device reads the blocks that it holds, whichever mesh saved them. The newest
    checkpoint is used whose bytes agree with its manifest; a damaged one is renamed to
    ``<step>.damaged``, with a warning. Every process calls it.

    Args:
      folder: What ``save_checkpoint`` wrote to.
      like: A state of the same tree, shapes and dtypes, with arrays or
        ``jax.ShapeDtypeStruct``. An array is restored with the sharding that it has
        here, a NumPy array or a Python number as one; a number that a step has made an
        array of stays one. Nothing in it changes. Without JAX's x64 an array of 64 bits
        is one of NumPy.
      step: Which checkpoint; by default the newest.
      mesh: Where arrays go whose place ``like`` leaves open: those without a sharding,
        and those that are on one device by default. They have the axes that they were
        saved with, as far as the mesh has them.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or it is damaged.
      CheckpointMismatchError: [T802] its tree, shapes or dtypes are not those of
        ``like``; nothing is read then.
      ShardDivisibilityError: [T201] the mesh does not divide an array as it was saved.
      MeshConflictError: [T308] an array of ``like`` is on another mesh than ``mesh``.
      StateLeafError: [T807] ``like`` has a leaf that is never stored.
    """
    from tessera.train.checkpoints import storage

    root = _root_of(folder)
    checkpoint = _open(root, None if step is None else _whole("step", step, 0))
    metadata = checkpoint.metadata
    targets, rebuild = named_parts(like)
    _check(checkpoint, targets)
    if isinstance(mesh, JaxMesh):
        mesh = Mesh.of(mesh)
    structs = {
        name: jax.ShapeDtypeStruct(
            stored.shape,
            jnp.dtype(stored.dtype),
            sharding=sharding_of(name, targets[name], stored, mesh),
        )
        for name, stored in metadata.arrays.items()
    }
    arrays = storage.read(checkpoint.state, structs) if structs else {}
    leaves = [
        json.loads(metadata.values[name])
        if name in metadata.values
        else restored_leaf(
            leaf, arrays[name], metadata.arrays[name], metadata.random.get(name)
        )
        for name, leaf in targets.items()
    ]
    return rebuild(leaves)


def latest_step(folder: str | Path) -> int | None:
    """The newest complete checkpoint of a folder, or None; in every process the same.

    Example:
      >>> latest_step("/no/such/folder") is None
      True
    """
    root = _root_of(folder)
    return broadcast_from_first(
        lambda: {"step": next(iter(checkpoint_folder.complete_steps(root)), None)}
    )["step"]


def _warn(notes: list[str], stacklevel: int) -> None:
    for note in notes if jax.process_index() == 0 else ():
        warnings.warn(TesseraWarning(note), stacklevel=stacklevel)


def _root_of(folder: str | Path) -> Path:
    if "://" in str(folder):
        raise SettingValueError(
            "checkpoints are saved in a folder of the file system",
            got=str(folder),
            fix="mount the bucket, and name a folder in it",
        )
    return Path(folder).expanduser().absolute()


def _whole(name: str, value: Any, least: int) -> int:
    try:
        if isinstance(value, bool) or (number := operator.index(value)) < least:
            raise TypeError
    except TypeError:
        raise SettingValueError(
            f"{name} is a whole number from {least} on", got=f"{name}={value!r}"
        ) from None
    return number


def _prepare(root: Path, step: int, nbytes: int, overwrite: bool) -> dict[str, Any]:
    """Check that a checkpoint can be written, and rename those that it replaces."""
    later = [other for other in checkpoint_folder.complete_steps(root) if other >= step]
    if later and not overwrite:
        raise CheckpointWriteError(
            f"step {step} is not after the checkpoints that are there",
            got=f"{root} has steps {sorted(later)}",
            fix="save each step once, in ascending order; overwrite=True renames the "
            "checkpoints of this step and of later ones",
        )
    try:
        notes = checkpoint_folder.prepare_root(root, step - 1, nbytes)
        (root / str(step)).mkdir()
    except (OSError, CheckpointWriteError) as error:
        raise _cannot_write(root, error) from error
    return {"notes": notes}


def _complete(path: Path, metadata: Metadata, keep: int | None) -> dict[str, Any]:
    """Make a checkpoint count whose arrays are written, and remove old ones."""
    try:
        write_metadata(path / manifest.LAST, metadata)
        manifest.write_manifest(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    for step in checkpoint_folder.complete_steps(path.parent)[keep:] if keep else ():
        with suppress(OSError):  # one that stays does no harm
            checkpoint_folder.remove(path.parent / str(step))
    return {}


def _cannot_write(path: Path, error: Exception) -> CheckpointWriteError:
    if not isinstance(error, CheckpointWriteError):
        error = checkpoint_folder.cannot_write(path, error)
    fix = "make room or allow writing there, or use another folder"
    return CheckpointWriteError(error.what, got=error.got, fix=fix)


def _described(leaves: StateLeaves, step: int) -> Metadata:
    meshes = [
        sharding.mesh.shape
        for array in leaves.arrays.values()
        if isinstance(sharding := getattr(array, "sharding", None), NamedSharding)
    ]
    return Metadata(
        step=step,
        arrays={name: Stored.of(array) for name, array in leaves.arrays.items()},
        mesh={axis: size for shape in meshes for axis, size in shape.items()},
        processes=jax.process_count(),
        stages=None,
        cursor=Cursor(0, {}),
        random=leaves.keys,
        config="",
        versions=library_versions(),
        values=leaves.values,
    )


def _open(root: Path, step: int | None) -> Checkpoint:
    """The checkpoint to restore, which the first process verifies."""

    def find() -> dict[str, Any]:
        notes: list[str] = []
        path = root if step is None else root / str(step)
        found: Checkpoint | str | None = None
        if checkpoint_folder.is_complete(path):
            found = checkpoint_folder.read_checkpoint(path)
        elif step is None:
            found = checkpoint_folder.newest_intact(root, notes, is_own=True)
        if not isinstance(found, Checkpoint):
            steps = checkpoint_folder.complete_steps(root)
            damaged = checkpoint_folder.damaged_checkpoints(root)
            raise CheckpointNotFoundError(
                f"there is no checkpoint to restore in {path}",
                got="\n".join([found or f"steps there: {steps}", *map(str, damaged)]),
                fix="name the folder that save_checkpoint wrote to, and a step of it",
            )
        return {"path": str(found.path), "notes": notes}

    found = broadcast_from_first(find)
    _warn(found["notes"], stacklevel=4)
    return checkpoint_folder.read_found(Path(found["path"]))


def _check(checkpoint: Checkpoint, targets: dict[str, Any]) -> None:
    """Raise [T802] for each leaf that only one side has, or that differs."""
    saved = saved_forms(checkpoint.metadata)
    stored = checkpoint.metadata.arrays
    wanted = {
        name: saved[name] if is_number_of(leaf, stored.get(name)) else form_of(leaf)
        for name, leaf in targets.items()
    }
    lines = [
        f"{name}: saved {saved.get(name, 'has none')}, `like` "
        f"{wanted.get(name, 'has none')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if lines:
        more = [f"and {len(lines) - _MOST_LINES} more"] if lines[_MOST_LINES:] else []
        raise CheckpointMismatchError(
            f"the checkpoint {checkpoint.path} does not hold a state like this one",
            got="\n".join(lines[:_MOST_LINES] + more),
            fix="build `like` with the model and the optimizer that were saved, and "
            "with numbers of Python where such were saved",
        )
