# SPDX-License-Identifier: Apache-2.0
"""Exports the parameters of a checkpoint to a safetensors file (``tessera.export``)."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tessera.errors import CheckpointNotFoundError
from tessera.models.weights import write_weights
from tessera.training.checkpoints import storage
from tessera.training.checkpoints.checkpoint_folder import (
    Checkpoint,
    find_newest,
    read_checkpoint,
)
from tessera.training.checkpoints.restore_arrays import plain_shape, split_of

_PARAMS = "params/"


def export_checkpoint(path: str | Path, file: str | Path, *, dtype: Any = None) -> int:
    """Write the parameters of a checkpoint to a safetensors file.

    Every byte of the checkpoint is first compared with its manifest. Parameters are
    read and written one at a time: only the largest of them has to fit in memory.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.
      file: The file; an existing one is replaced once the new one is complete.
      dtype: What to round the parameters to, such as ``"bf16"``; None keeps float32.

    Returns:
      Bytes of the file.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or the newest is damaged.
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
      OSError: The file cannot be written.
    """
    newest = find_newest(Path(path))
    checkpoint = read_checkpoint(newest)
    if not isinstance(checkpoint, Checkpoint):
        raise CheckpointNotFoundError(
            f"the checkpoint {newest} is damaged",
            got=checkpoint,
            fix="export the checkpoint before it",
        )
    metadata = checkpoint.metadata
    split = split_of(metadata)
    stored = {
        name.removeprefix(_PARAMS).replace("/", "."): (name, array)
        for name, array in metadata.arrays.items()
        if name.startswith(_PARAMS)
    }
    device = SingleDeviceSharding(jax.local_devices()[0])

    def read(name: str) -> np.ndarray:
        path, array = stored[name]
        target = jax.ShapeDtypeStruct(
            array.shape, np.dtype(array.dtype), sharding=device
        )
        value = storage.read(checkpoint.state, {path: target})[path]
        if plain_shape(split, path, array.shape) != array.shape and split is not None:
            value = split.unstack(value)
        return np.asarray(value)

    layouts = {
        name: (array.dtype, plain_shape(split, path, array.shape))
        for name, (path, array) in stored.items()
    }
    header = {"format": "tessera", "step": str(metadata.step)}
    return write_weights(file, layouts, read, dtype=dtype, metadata=header)
