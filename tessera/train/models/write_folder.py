# SPDX-License-Identifier: Apache-2.0
"""Writes a folder that Transformers or PEFT loads, one parameter at a time."""

import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.errors import ModelFolderError, OutputPathError
from tessera.train.files.hub import HubName
from tessera.train.models.families.family import StoredTensor, Tensor
from tessera.train.models.families.published_files import Published
from tessera.train.models.families.registry import CONFIG_FILE, family_for
from tessera.train.models.merge_adapters import Layouts, Read, adapters_of
from tessera.train.models.model_folder import INDEX, WEIGHTS
from tessera.train.models.safetensors import write_file

# What Hugging Face's own writers take, in bytes.
SHARD_BYTES: Final = 5 * 10**9
# What PEFT calls its files, and what it puts before the names of modules.
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_PEFT_PREFIX: Final = "base_model.model."


def write_folder(
    folder: str | Path,
    config: Any,
    layouts: Layouts,
    read: Read,
    *,
    values: Mapping[str, Any] | None = None,
    files: Mapping[str, Path | Mapping[str, Any]] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a model's configuration and weights in the form of its family.

    Args:
      folder: Must not exist, or be empty; it appears once everything is written.
      config: The configuration; one of another kind than a decoder's is refused.
      layouts: The parameters, and the dtype that each is written in; without adapters.
      read: Returns a parameter by name; called once for each, in order.
      values: The ``config.json``, without the dtype of the weights, if they have one;
        None has what describes the configuration alone.
      files: Other files by name: each a file to copy, or the values of a JSON object.
      shard_bytes: A file of weights holds no more than this, or one tensor.

    Returns:
      Bytes of the weights.

    Raises:
      ModelFolderError: [T806] no family of Transformers computes this model.
      OutputPathError: [T504] the folder exists and is not empty.
      OSError: It cannot be written.
    """
    values = dict(values or Published().config_values(config, {}))
    if len(dtypes := {dtype.name for dtype, _ in layouts.values()}) == 1:
        names = "dtype", *({"torch_dtype"} & {*values})
        values |= dict.fromkeys(names, dtypes.pop())
    writer = _Writer(layouts, read)
    family = family_for(config, values["model_type"])
    tensors = writer.tensors(family.rows(layouts))
    with _complete_folder(Path(folder)) as partial:
        size = writer.write_shards(partial, tensors, shard_bytes)
        for name, content in {**(files or {}), CONFIG_FILE: values}.items():
            (partial / name).parent.mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, partial / name)
            else:
                _write_json(partial / name, content)
    return size


def write_adapters(
    folder: str | Path,
    config: Any,
    layouts: Layouts,
    read: Read,
    *,
    base: str | None,
    model_type: str | None = None,
) -> int:
    """Write the adapters alone in PEFT's format, for a model of Transformers.

    Args:
      folder: See ``write_folder``.
      config: See ``write_folder``.
      layouts: The parameters, and the dtype that each is written in.
      read: See ``write_folder``.
      base: The weights that the adapters are for, if that is known: a folder, or
        ``hf://…``, of which the repository and the revision are written.
      model_type: Of these weights.

    Returns:
      Bytes of the adapters.

    Raises:
      ModelFolderError: [T806] there are no adapters, no family of Transformers
        computes this model, or it has one matmul for several of the adapters.
      OutputPathError: [T504] the folder exists and is not empty.
      OSError: It cannot be written.
    """
    family = family_for(config, model_type)
    pairs = adapters_of(layouts)
    rows: list[Tensor] = []
    for row in family.rows(pairs):
        if row.part is not None:
            raise ModelFolderError(
                f"Transformers has no module of its own for each adapter of a "
                f"{family.name}",
                got=f"{row.path} is a part of {row.name}",
                fix="use --format=hf, which writes all weights with the adapters in "
                "them, or model.lora.targets without it",
            )
        module = row.name.removesuffix(".weight")
        a, b = pairs[row.path]
        for path, part, inputs in ((a, "lora_A", row.inputs), (b, "lora_B", 1)):
            rows.append(Tensor(path, f"{_PEFT_PREFIX}{module}.{part}.weight", inputs))
    if not rows:
        raise ModelFolderError(
            "the model has no adapters to write",
            got="model.lora.rank=0",
            fix="use --format=hf, which writes all weights",
        )
    lora, name = config.lora, HubName.parse(base or "")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.repo if name else base,
        "revision": name and name.revision,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": [*config.lora_targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    writer = _Writer(layouts, read)
    with _complete_folder(Path(folder)) as partial:
        tensors = writer.tensors(rows)
        size = writer.write_shards(partial, tensors, sys.maxsize, ADAPTER_WEIGHTS)
        _write_json(partial / ADAPTER_CONFIG, values)
    return size


@dataclass
class _Writer:
    """Writes tensors, and holds the parameters of the last one."""

    layouts: Layouts
    read: Read
    held: dict[str, np.ndarray] = field(default_factory=dict)

    def tensors(self, rows: Iterable[Tensor]) -> dict[str, StoredTensor]:
        """What each tensor is made of, by its name."""
        shapes = {path: shape for path, (_, shape) in self.layouts.items()}
        return StoredTensor.all_of(rows, shapes)

    def write_shards(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        shard_bytes: int,
        weights: str = WEIGHTS,
    ) -> int:
        """Write all tensors to the file ``weights``, or to several with an index."""
        shapes = {
            name: (self.layouts[tensor.pieces[0][0].path][0], tensor.shape)
            for name, tensor in tensors.items()
        }
        sizes = {
            name: math.prod(shape) * dtype.itemsize
            for name, (dtype, shape) in shapes.items()
        }
        shards: list[list[str]] = [[]]
        room = shard_bytes
        for name, size in sizes.items():
            if shards[-1] and size > room:
                shards.append([])
                room = shard_bytes
            shards[-1].append(name)
            room -= size
        files: dict[str, str] = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            file = weights if len(shards) == 1 else file
            part = {name: shapes[name] for name in names}
            write_file(
                folder / file,
                part,
                lambda name: self.tensor(tensors[name]),
                {"format": "pt"},
            )
            files |= dict.fromkeys(names, file)
        total = sum(sizes.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": files}
            _write_json(folder / INDEX, index)
        return total

    def tensor(self, tensor: StoredTensor) -> np.ndarray:
        """A tensor, of which those parameters are read that the last one had not."""
        paths = [row.path for row, _ in tensor.pieces]
        for path in self.held.keys() - paths:
            del self.held[path]  # before the next one is read
        for path in paths:
            if path not in self.held:
                self.held[path] = self.read(path)
        return tensor.joined(self.held.__getitem__)


@contextmanager
def _complete_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, which takes its name once everything is written."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputPathError(
            "the folder of the export is not empty",
            got=str(path),
            fix="name a folder that does not exist",
        )
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        partial.replace(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
