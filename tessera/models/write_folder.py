# SPDX-License-Identifier: Apache-2.0
"""Writes a folder that Hugging Face Transformers loads, one parameter at a time."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from tessera.errors import OutputPathError
from tessera.models.families.family import Tensor
from tessera.models.families.registry import CONFIG_FILE, family_for
from tessera.models.model_folder import INDEX, WEIGHTS
from tessera.models.safetensors import write_file

# Dtype and shape of each parameter by name, ``decoder.mlp.up.kernel``.
Layouts: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

GENERATION_FILE: Final = "generation_config.json"
# What Hugging Face's own writers take, in bytes.
SHARD_BYTES: Final = 5 * 10**9


def write_folder(
    folder: str | Path,
    config: Any,
    layouts: Layouts,
    read: Callable[[str], np.ndarray],
    *,
    tokens: Mapping[str, Any] | None = None,
    files: Mapping[str, Path | Mapping[str, Any]] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a model's configuration and weights in the form of its family.

    Args:
      folder: Must not exist, or be empty; it appears once everything is written.
      config: The configuration; one of another kind than a decoder's is refused.
      layouts: The parameters, and the dtype that each is written in.
      read: Returns a parameter by name; called once for each, in order.
      tokens: Ids of special tokens: ``bos_token_id``, ``eos_token_id``,
        ``pad_token_id``; those that are absent are null. Without any, there is no
        ``generation_config.json``.
      files: Other files by name: each a file to copy, or the values of a JSON object.
      shard_bytes: A file of weights holds no more than this, or one tensor.

    Returns:
      Bytes of the weights.

    Raises:
      ModelFolderError: [T806] no family of Transformers computes this model.
      OutputPathError: [T504] the folder exists and is not empty.
      OSError: It cannot be written.
    """
    family = family_for(config)
    writer = _Writer(layouts, read)
    tensors = {
        name: (row, index)
        for row in family.rows(layouts)
        for index in np.ndindex(layouts[row.path][1][: row.num_stacked])
        for name in [row.tensor_name(index)]
    }
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ids |= tokens or {}
    values = family.values(config) | ids
    if len(dtypes := {dtype.name for dtype, _ in layouts.values()}) == 1:
        values["dtype"] = dtypes.pop()
    with _complete_folder(Path(folder)) as partial:
        size = writer.write_shards(partial, tensors, shard_bytes)
        for name, content in {
            **({GENERATION_FILE: ids} if tokens else {}),
            **(files or {}),
            CONFIG_FILE: values,
        }.items():
            if isinstance(content, Path):
                shutil.copyfile(content, partial / name)
            else:
                _write_json(partial / name, content)
    return size


@dataclass
class _Writer:
    """Writes tensors, and holds the parameter of the last one."""

    layouts: Layouts
    read: Callable[[str], np.ndarray]
    path: str = ""
    parameter: np.ndarray | None = None

    def write_shards(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[Tensor, tuple[int, ...]]],
        shard_bytes: int,
    ) -> int:
        """Write all tensors to one file, or to several with an index."""
        shapes = {
            name: (self.layouts[row.path][0], row.shape(self.layouts[row.path][1]))
            for name, (row, _) in tensors.items()
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
            file = WEIGHTS if len(shards) == 1 else file
            part = {name: shapes[name] for name in names}
            write_file(
                folder / file,
                part,
                lambda name: self.tensor(*tensors[name]),
                {"format": "pt"},
            )
            files |= dict.fromkeys(names, file)
        total = sum(sizes.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": files}
            _write_json(folder / INDEX, index)
        return total

    def tensor(self, row: Tensor, index: tuple[int, ...]) -> np.ndarray:
        """A tensor in the dtype that it is written in."""
        if self.path != row.path or self.parameter is None:
            self.parameter = None  # before the next one is read
            self.parameter, self.path = self.read(row.path), row.path
        dtype, _ = self.layouts[row.path]
        return row.to_tensor(self.parameter, index).astype(dtype, copy=False)


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
