# SPDX-License-Identifier: Apache-2.0
"""The parameters of a checkpoint as a safetensors file: ``tessera.export``."""

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
from tessera.training.checkpoints.restoring import plain_shape, split_of

_PARAMS = "params/"


def export_checkpoint(path: str | Path, file: str | Path, *, dtype: Any = None) -> int:
    """Write the parameters of a checkpoint to a safetensors file.

    Every byte of the checkpoint is compared with its manifest first. Parameters are
    read and written one after the other: the largest of them has to fit in memory.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.
      file: Where to; one that is there is replaced once the new one is whole.
      dtype: What to round the parameters to, such as ``"bf16"``; None leaves float32.

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
            fix="export the one before it",
        )
    metadata = checkpoint.metadata
    split = split_of(metadata)
    stored = {
        name.removeprefix(_PARAMS).replace("/", "."): (name, array)
        for name, array in metadata.arrays.items()
        if name.startswith(_PARAMS)
    }
    here = SingleDeviceSharding(jax.local_devices()[0])

    def read(name: str) -> np.ndarray:
        path, array = stored[name]
        target = jax.ShapeDtypeStruct(array.shape, np.dtype(array.dtype), sharding=here)
        value = storage.read(checkpoint.state, {path: target})[path]
        if plain_shape(split, path, array.shape) != array.shape and split is not None:
            value = split.unstack(value)
        return np.asarray(value)

    forms = {
        name: (array.dtype, plain_shape(split, path, array.shape))
        for name, (path, array) in stored.items()
    }
    said = {"format": "tessera", "step": str(metadata.step)}
    return write_weights(file, forms, read, dtype=dtype, metadata=said)
