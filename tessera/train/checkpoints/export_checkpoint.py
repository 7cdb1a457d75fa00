# SPDX-License-Identifier: Apache-2.0
"""Exports the parameters of a checkpoint to a file or folder (``tessera export``)."""

from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ModelFolderError,
    UnknownModelError,
)
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints import storage
from tessera.train.checkpoints.checkpoint_folder import (
    Checkpoint,
    find_newest,
    read_checkpoint,
)
from tessera.train.checkpoints.restore_arrays import plain_shape, split_of
from tessera.train.checkpoints.tokenizer_files import tokenizer_files
from tessera.train.config.config_schema import settings_of_text
from tessera.train.config.layout_checks import build_model
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.files.hub import local_path
from tessera.train.models.definition import ModelOptions
from tessera.train.models.families.published_files import GENERATION_FILE, Published
from tessera.train.models.families.registry import (
    CONFIG_FILE,
    family_of,
    read_config_file,
)
from tessera.train.models.merge_adapters import adapters_of, merge_adapters
from tessera.train.models.model import Model
from tessera.train.models.safetensors import write_file
from tessera.train.models.weights import rounded
from tessera.train.models.write_folder import write_adapters, write_folder

_PARAMS: Final = "params/"


def export_checkpoint(
    path: str | Path,
    file: str | Path,
    *,
    dtype: Any = None,
    kind: Literal["safetensors", "hf", "peft"] = "safetensors",
) -> int:
    """Write the parameters of a checkpoint to a safetensors file, or to a folder.

    Every byte of the checkpoint is first compared with its manifest. Parameters are
    read and written one at a time: only the largest of them has to fit in memory.

    Args:
      path: The folder of a run, of its checkpoints, or of one of them.
      file: The file; an existing one is replaced once the new one is complete. As a
        folder, it must not exist, or be empty.
      dtype: What to round the parameters to, such as ``"bf16"``; None keeps float32,
        but ``hf`` has the dtype of the folder that the run began with, if it did.
      kind: ``hf`` writes a folder that Hugging Face Transformers loads, with the run's
        tokenizer; ``peft`` one with the adapters alone. Otherwise they are added to
        their weights.

    Returns:
      Bytes of the file, or of the folder's weights.

    Raises:
      CheckpointNotFoundError: [T801] there is none, or the newest is damaged.
      CheckpointMismatchError: [T802] a newer Tessera wrote it, or it holds other
        parameters than its model has.
      ModelFolderError: [T806] no family of Transformers computes the run's model, or
        adapters alone are not what the run has trained.
      TokenizerError: [T605] the run's tokenizer is not there any more.
      OutputPathError: [T504] the folder exists and is not empty.
      OSError: The file cannot be written.
    """
    checkpoint = open_checkpoint(path)
    metadata = checkpoint.metadata
    params = CheckpointParams(checkpoint)
    header = {"format": "tessera", "step": str(metadata.step)}
    if kind == "hf" and dtype is None:
        dtype = Published.parse(metadata.published).dtype
    layouts, read = rounded(params.layouts, dtype), params.read
    try:
        config = settings_of_checkpoint(checkpoint)
    except (UnknownModelError, CheckpointMismatchError) as error:
        # Adapters of a registered model are its own.
        is_registered = isinstance(error, UnknownModelError)
        if kind == "safetensors" and (is_registered or not adapters_of(params.layouts)):
            return write_file(file, layouts, read, header)
        if not is_registered:
            raise
        raise ModelFolderError(
            "no family of Transformers computes a registered model",
            got=error.got,
            fix="export its parameters by their own names: --format=safetensors",
        ) from error
    decoder = config.model.config
    params.check(config.model.kind.build(decoder, ModelOptions(), None))
    if kind == "peft":
        _check_adapters(config)
        kind_of_base = Published.parse(metadata.published).model_type
        base = config.training.init_from
        return write_adapters(
            file, decoder, layouts, read, base=base, model_type=kind_of_base
        )
    layouts, read = merge_adapters(decoder, layouts, read)
    if kind == "safetensors":
        return write_file(file, layouts, read, header)
    tokens, files = tokenizer_files(config.data)
    published = Published.parse(metadata.published)
    if generation := published.generation_values(tokens):
        files = {GENERATION_FILE: generation, **files}
    values = published.config_values(
        decoder, tokens, length=config.training.sequence_length
    )
    return write_folder(file, decoder, layouts, read, values=values, files=files)


def _check_adapters(config: Config) -> None:
    """Check that a run's adapters, and the weights that it began with, are its model.

    Raises:
      ModelFolderError: [T806] it has trained other parameters, too, or began with a
        part of a larger model, in which the adapters' modules have other names.
    """
    model = build_model(config, mesh_of_shape(((1,), ("fsdp",))))
    trained = named_leaves(model.abstract()).keys() - model.frozen - model.adapters
    if model.adapters and trained:
        raise ModelFolderError(
            "the run has trained more than its adapters",
            got=", ".join(sorted(trained)),
            fix="use --format=hf, which writes all weights with the adapters in them",
        )
    base = Path(local_path(config.training.init_from or ""))
    if not (base / CONFIG_FILE).is_file():
        return
    values = read_config_file(base)
    if values["model_type"] != (text := family_of(values).model_types[0]):
        raise ModelFolderError(
            "the adapters are for the text model of a folder with a larger one",
            got=f"{base} has model_type = {values['model_type']!r}, not {text!r}",
            fix="use --format=hf, or begin with the weights of the text model",
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

    def check(self, model: Model) -> None:
        """Check that they are those of a model.

        Raises:
          CheckpointMismatchError: [T802] they are not; lists every difference.
        """
        expected = {
            name.replace("/", "."): (np.dtype(leaf.dtype), tuple(leaf.shape))
            for name, leaf in named_leaves(model.abstract()).items()
        }
        lines = [
            f"{name}: saved {_shown(self.layouts.get(name))}, the model "
            f"{_shown(expected.get(name))}"
            for name in sorted(expected.keys() | self.layouts.keys())
            if self.layouts.get(name) != expected.get(name)
        ]
        if lines:
            raise CheckpointMismatchError(
                "the checkpoint does not hold the parameters of its own model",
                got="\n".join(lines),
                fix="use another checkpoint of the run: this one was changed",
            )

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


def _shown(layout: tuple[np.dtype[Any], tuple[int, ...]] | None) -> str:
    return "has none" if layout is None else f"{layout[0].name}{[*layout[1]]}"
