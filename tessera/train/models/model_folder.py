# SPDX-License-Identifier: Apache-2.0
"""A folder of a published model: its configuration, and the tensors of all its files.

config.json                       the family and its sizes
model.safetensors                 all tensors; or
model.safetensors.index.json      {"weight_map": {tensor: file}}, and these files
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.errors import ModelFolderError, WeightFileError, printable
from tessera.train.files.regular_files import read_regular
from tessera.train.files.untrusted_json import parse_json
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.registry import (
    differences,
    family_of,
    read_config_file,
)
from tessera.train.models.safetensors import SafetensorsFile

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
# A tensor takes a hundred bytes in the index; the largest models have 100,000.
_LONGEST: Final = 2**25
# Tensors that a folder may have besides, each equal to another.
_TIED: Final = {"lm_head.weight": "model.embed_tokens.weight"}
# Bytes of two tensors that are compared at a time.
_COMPARED: Final = 2**26


class ModelFolder:
    """The configuration and the mapped tensors of a folder.

    Args:
      path: The folder.

    Raises:
      ModelFolderError: [T806] its ``config.json`` is absent or cannot be used.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.values = read_config_file(path)
        self.family = family_of(self.values)
        self.config = self.family.config(self.values)

    def check_config(self, config: Any) -> None:
        """Check that the folder is of a model with this configuration.

        Args:
          config: Of a decoder; one of another kind of model is refused.

        Raises:
          ModelFolderError: [T806] it is not; lists the fields.
        """
        lines = [f"a {type(config).__name__}"]
        if isinstance(config, DecoderConfig):
            lines = differences(config, self.config)
        if lines:
            raise ModelFolderError(
                f"{self.path} is of another model than this one",
                got="\n".join(f"this model has {line}" for line in lines),
                fix=f"use the configuration of the folder: model={self.path}",
            )

    @cached_property
    def arrays(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor, by its name in the family's table."""
        return {
            name: file.arrays[stored] for name, (file, stored) in self._tensors.items()
        }

    def view(self, name: str) -> np.ndarray:
        """A tensor, mapped: only what is copied from it is read."""
        file, stored = self._tensors[name]
        return file.view(stored)

    @cached_property
    def problems(self) -> list[str]:
        """Tensors that are there twice."""
        lines: list[str] = []
        for name, table_name, file in self._listed:
            first, stored = self._tensors[table_name]
            if (first, stored) != (file, name):
                lines.append(
                    f"{name}: in {file.path.name}, and in {first.path.name} as {stored}"
                )
        return lines

    def untied(self, name: str) -> Iterator[str]:
        """The problem with a tensor that no parameter has, if it is one."""
        dtype, shape = self.arrays[name]
        other = _TIED.get(name)
        if other not in self.arrays:
            yield f"{name}: the folder has {dtype}{[*shape]}, the model nothing"
        elif self.arrays[other] != (dtype, shape) or not _are_equal(
            self.view(name), self.view(other)
        ):
            yield f"{name}: differs from {other}, to which it is tied"

    @cached_property
    def _tensors(self) -> dict[str, tuple[SafetensorsFile, str]]:
        tensors: dict[str, tuple[SafetensorsFile, str]] = {}
        for name, table_name, file in self._listed:
            tensors.setdefault(table_name, (file, name))
        return tensors

    @cached_property
    def _listed(self) -> list[tuple[str, str, SafetensorsFile]]:
        """Each tensor's name, its name in the family's table, and its file."""
        names = sorted({WEIGHTS} if self._index is None else {*self._index.values()})
        return [
            (name, self.family.table_name(name), file)
            for file in (SafetensorsFile(self.path / name) for name in names)
            for name in file.arrays
            if not any(fnmatchcase(name, each) for each in self.family.ignored)
        ]

    @cached_property
    def _index(self) -> dict[str, str] | None:
        """The file of each tensor; None if there is one file."""
        path, has_one = self.path / INDEX, (self.path / WEIGHTS).exists()
        if has_one and not path.exists():
            return None
        try:
            if has_one:
                raise ValueError(f"{WEIGHTS} is there, too")
            content = read_regular(path, _LONGEST)
            files = parse_json(content, longest=_LONGEST)["weight_map"]
            for name in {*files.values()}:
                if type(name) is not str or name in ("", ".", "..") or "/" in name:
                    raise ValueError(f"{name!r} is no name of a file")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = getattr(error, "strerror", None) or repr(error)
            raise WeightFileError(
                f"{self.path} has no usable {WEIGHTS} or {INDEX}",
                got=printable(why, longest=200),
                fix="put the safetensors files there that the model was published "
                "with; files of PyTorch (.bin) are not read",
            ) from error
        return files


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays of one dtype and shape have the same bytes."""
    one, other = (x.reshape(-1).view(np.uint8) for x in (first, second))
    return all(
        np.array_equal(one[i : i + _COMPARED], other[i : i + _COMPARED])
        for i in range(0, one.size, _COMPARED)
    )
