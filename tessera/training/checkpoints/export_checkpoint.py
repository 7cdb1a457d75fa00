# SPDX-License-Identifier: Apache-2.0
"""Exports the parameters of a checkpoint to a file or folder (``tessera.export``)."""

from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tessera.dtypes import as_dtype
from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ModelFolderError,
    UnknownModelError,
)
from tessera.models.weights import write_weights
from tessera.models.write_folder import write_folder
from tessera.training.checkpoints import storage
from tessera.training.checkpoints.checkpoint_folder import (
    Checkpoint,
    find_newest,
    read_checkpoint,
)
from tessera.training.checkpoints.restore_arrays import plain_shape, split_of
from tessera.training.checkpoints.tokenizer_files import tokenizer_files
from tessera.training.config import Config
from tessera.training.config_schema import settings_of_text

_PARAMS: Final = "params/"


def export_checkpoint(
    path: str | Path, file: str | Path, *, dtype: Any = None, as_folder: bool = False
) -> int:
    """Write the parameters of a checkpoint to a safetensors file, or to a folder.

    Every byte of the checkpoint is first compared with its manifest. Parameters are
    read and written one at a time: only the largest of them has to fit in memory.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.
      file: The file; an existing one is replaced once the new one is complete. As a
        folder, it must not exist, or be empty.
      dtype: What to round the parameters to, such as ``"bf16"``; None keeps float32.
      as_folder: Write a folder that Hugging Face Transformers loads, with the run's
        tokenizer.

    Returns:
      Bytes of the file, or of the folder's weights.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or the newest is damaged.
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
      ModelFolderError: [T806] no family of Transformers computes the run's model.
      TokenizerError: [T605] the run's tokenizer is not there any more.
      OutputPathError: [T504] the folder exists and is not empty.
      OSError: The file cannot be written.
    """
    checkpoint = open_checkpoint(path)
    metadata = checkpoint.metadata
    params = CheckpointParams(checkpoint)
    if not as_folder:
        header = {"format": "tessera", "step": str(metadata.step)}
        layouts = params.layouts
        return write_weights(file, layouts, params.read, dtype=dtype, metadata=header)
    try:
        config = settings_of_checkpoint(checkpoint)
    except UnknownModelError as error:
        raise ModelFolderError(
            "no family of Transformers computes a registered model",
            got=error.got,
            fix="export its parameters by their own names: --format=safetensors",
        ) from error
    tokens, files = tokenizer_files(config.data)
    to = np.dtype(as_dtype(dtype or "f32"))
    return write_folder(
        file,
        config.model.config,
        {name: (to, shape) for name, (_, shape) in params.layouts.items()},
        params.read,
        tokens=tokens,
        files=files,
    )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The newest checkpoint at a path, whose bytes agree with its manifest.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or the newest is damaged.
      CheckpointMismatchError: [T802] a newer Tessera wrote it.
    """
    newest = find_newest(Path(path))
    checkpoint = read_checkpoint(newest)
    if not isinstance(checkpoint, Checkpoint):
        raise CheckpointNotFoundError(
            f"the checkpoint {newest} is damaged",
            got=checkpoint,
            fix="name the folder of the checkpoint before it",
        )
    return checkpoint


def settings_of_checkpoint(checkpoint: Checkpoint) -> Config:
    """The settings of the run that saved it.

    Raises:
      UnknownModelError: [T403] no module that was imported registers its model.
      CheckpointMismatchError: [T802] this Tessera does not understand them.
    """
    try:
        return settings_of_text(checkpoint.metadata.config)
    except UnknownModelError:
        raise
    except ValueError as error:
        raise CheckpointMismatchError(
            "this Tessera does not understand the configuration of the checkpoint",
            got=str(error),
            fix="use the version of Tessera that wrote it",
        ) from error


class CheckpointParams:
    """The parameters of a checkpoint, without pipeline stages."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._state, self._split = checkpoint.state, split_of(checkpoint.metadata)
        self._device = SingleDeviceSharding(jax.local_devices()[0])
        self._stored = {
            name.removeprefix(_PARAMS).replace("/", "."): (name, array)
            for name, array in checkpoint.metadata.arrays.items()
            if name.startswith(_PARAMS)
        }
        self.layouts = {
            name: (np.dtype(array.dtype), plain_shape(self._split, path, array.shape))
            for name, (path, array) in self._stored.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One of them."""
        path, array = self._stored[name]
        target = jax.ShapeDtypeStruct(
            array.shape, np.dtype(array.dtype), sharding=self._device
        )
        value = storage.read(self._state, {path: target})[path]
        if self.layouts[name][1] != array.shape and self._split is not None:
            value = self._split.unstack(value)
        return np.asarray(value)
