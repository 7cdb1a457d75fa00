# SPDX-License-Identifier: Apache-2.0
"""A family of published models, as data: a configuration and a table of tensors.

family = family_of(values)               # of a config.json
config = family.config(values)           # DecoderConfig, or an error by key
values = family.values(config)           # and back
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tessera.errors import ModelFolderError
from tessera.train.models.decoder.config import DecoderConfig
from tessera.train.models.families.config_keys import ConfigKeys

# From how many numbers a parameter has along a dim to where a tensor has them.
Part: TypeAlias = Callable[[int], slice]


@dataclass(frozen=True)
class Tensor:
    """A parameter of the decoder, and the tensors of a folder that hold it.

    Attributes:
      path: The parameter, ``decoder.attention.query.kernel``.
      name: The tensor, ``model.layers.{layer}.self_attn.q_proj.weight``. A parameter
        with a tensor for each layer or expert has ``{layer}`` and ``{expert}``, in the
        order of its leading dims.
      inputs: How many of the other dims a matmul contracts. They come first in the
        parameter and last in the tensor, ``[outputs, inputs]``, each merged to one dim;
        without any, as in a bias, the tensor has one dim. None: the same shape.
      part: Of a tensor that holds several parameters, side by side along its first dim
        (the last, if ``inputs`` is None): which of its numbers are this one's, by how
        many there are. All of them together hold the whole tensor.

    Example:
      >>> row = Tensor("a.kernel", "{layer}.q_proj.weight", inputs=1)
      >>> row.shape((18, 640, 4, 256)), row.tensor_name((3,))
      ((1024, 640), '3.q_proj.weight')
    """

    path: str
    name: str
    inputs: int | None = None
    part: Part | None = None

    @property
    def num_stacked(self) -> int:
        """How many leading dims of the parameter count tensors."""
        return self.name.count("{")

    def tensor_name(self, index: tuple[int, ...]) -> str:
        """The tensor at an index of these dims."""
        return self.name.format(**dict(zip(("layer", "expert"), index, strict=False)))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor or of this part of it, from the parameter's."""
        dims = shape[self.num_stacked :]
        if self.inputs is None:
            return dims
        merged = math.prod(dims[self.inputs :]), math.prod(dims[: self.inputs])
        return merged if self.inputs else merged[:1]

    def to_parameter(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as the parameter has it, without its stacked dims; a view.

        Args:
          tensor: As in the folder.
          shape: The parameter's, stacked dims included.
        """
        dims, inputs = shape[self.num_stacked :], self.inputs
        tensor = tensor[self.within(self.shape(shape))]
        if inputs is None:
            return tensor
        split = tensor.reshape(*dims[inputs:], *dims[:inputs])
        return split.transpose(np.roll(range(split.ndim), inputs))

    def to_tensor(self, parameter: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
        """The tensor, or this part of it, at an index of a parameter's stacked dims."""
        part = parameter[index]
        if self.inputs is None:
            return part
        order = np.roll(range(part.ndim), -self.inputs)
        return part.transpose(order).reshape(self.shape(parameter.shape))

    @property
    def axis(self) -> int:
        """The dim along which other parameters share the tensor."""
        return -1 if self.inputs is None else 0

    def within(self, shape: tuple[int, ...]) -> Any:
        """The index in the tensor of this part of it, whose shape is given."""
        if self.part is None:
            return ...
        numbers = self.part(shape[self.axis])
        return numbers if self.axis == 0 else (..., numbers)


@dataclass
class StoredTensor:
    """A tensor of a folder, and what it is made of.

    Attributes:
      shape: Of the whole tensor.
      pieces: The rows of its parameters, and an index of each one's stacked dims.
    """

    shape: tuple[int, ...]
    pieces: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)

    @classmethod
    def all_of(
        cls, rows: Iterable[Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, "StoredTensor"]:
        """The tensors of some parameters, by name, from the parameters' shapes."""
        tensors: dict[str, StoredTensor] = {}
        for row in rows:
            own = row.shape(shapes[row.path])
            for index in np.ndindex(shapes[row.path][: row.num_stacked]):
                name = row.tensor_name(index)
                tensor = tensors.setdefault(name, cls(own))
                if tensor.pieces:
                    sizes = [*tensor.shape]
                    sizes[row.axis] += own[row.axis]
                    tensor.shape = tuple(sizes)
                tensor.pieces.append((row, index))
        return tensors

    def joined(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The tensor; ``read`` returns a parameter by its path."""
        pieces = [(row, row.to_tensor(read(row.path), i)) for row, i in self.pieces]
        if len(pieces) == 1:
            return pieces[0][1]
        out = np.empty(self.shape, pieces[0][1].dtype)
        for row, piece in pieces:
            out[row.within(piece.shape)] = piece
        return out


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that one architecture of Hugging Face Transformers computes.

    Attributes:
      name: What Tessera calls it.
      model_types: The values of ``model_type`` in ``config.json``; the first is
        written. The others are those of a model that contains one of the first type.
      architecture: The class that loads what is exported.
      read_config: Reads all keys of a ``config.json`` that change the computation; the
        fields of a DecoderConfig.
      write_config: The keys of a ``config.json``, without those of all families.
      tensors: A row for each parameter that a model of the family may have.
      ignored: Patterns of names of tensors that are not parameters of the text model.
      renamed: Prefixes of names in other folders, and what the table has for them.
      outer_keys: Keys without effect beside ``text_config``.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    read_config: Callable[[ConfigKeys], dict[str, Any]]
    write_config: Callable[[DecoderConfig], dict[str, Any]]
    tensors: tuple[Tensor, ...]
    # Older versions of Transformers stored what the base of the rotation gives.
    ignored: tuple[str, ...] = ("*rotary_emb.inv_freq",)
    renamed: tuple[tuple[str, str], ...] = (
        # A folder of the model without its head.
        ("embed_tokens.", "model.embed_tokens."),
        ("layers.", "model.layers."),
        ("norm.", "model.norm."),
    )
    outer_keys: frozenset[str] = frozenset()

    def config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The configuration that the values of a ``config.json`` describe.

        Raises:
          ModelFolderError: [T806] a key is unknown, or has an unsupported value;
            lists all of them.
          ModelShapeError: [T405] the sizes do not make a model.
        """
        outer = keys = ConfigKeys(values)
        if "text_config" in outer:
            keys = outer.take_part("text_config")
            keys.expect("model_type", self.model_types[0])
            outer.skip(*self.outer_keys)
            outer.expect(
                "tie_word_embeddings", keys.values.get("tie_word_embeddings", True)
            )
        sizes = self.read_config(keys)
        outer.finish()
        return DecoderConfig(**sizes)

    def values(self, config: DecoderConfig) -> dict[str, Any]:
        """The values of a ``config.json`` that describe a configuration."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_types[0],
            **self.write_config(config),
        }

    def rows(self, paths: Collection[str]) -> list[Tensor]:
        """The rows of a model's parameters.

        Raises:
          ModelFolderError: [T806] there is none for one of them.
        """
        rows = [row for row in self.tensors if row.path in paths]
        if absent := set(paths) - {row.path for row in rows}:
            raise ModelFolderError(
                f"models of the family {self.name} do not have all these parameters",
                got="\n".join(sorted(absent)),
                fix="use the folder with the model that it was written for",
            )
        return rows

    def table_name(self, name: str) -> str:
        """A tensor's name in a folder as the table has it."""
        for prefix, replacement in self.renamed:
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name
