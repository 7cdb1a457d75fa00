# SPDX-License-Identifier: Apache-2.0
"""Reads each device's slice of a parameter from the files that hold it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from tessera.train.models.decoder.lora import BLOCK
from tessera.train.models.decoder.quantized_kernel import quantize
from tessera.train.models.families.family import Tensor
from tessera.train.models.model_folder import ModelFolder
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.models.safetensors import SafetensorsFile

Index: TypeAlias = tuple[slice, ...]

_COLUMNS: Final = 64


def assemble(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    read: Callable[[Index], np.ndarray],
) -> jax.Array:
    """An array from slices, one of which is on the host at a time.

    ``jax.make_array_from_callback`` would read those of all devices first.

    Args:
      shape: Of the whole array.
      sharding: Of which only this process's devices are read for; devices with equal
        slices share one read.
      read: A slice by its index.
    """
    devices = sharding.addressable_devices_indices_map(shape)
    slices: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
    for device, index in devices.items():
        parts = zip(index or (), shape, strict=True)
        key = tuple(part.indices(size) for part, size in parts)
        slices.setdefault(key, []).append(device)
    shards: dict[jax.Device, jax.Array] = {}
    for key, owners in slices.items():
        values = read(tuple(slice(*part) for part in key))
        for owner in owners:
            shards[owner] = jax.device_put(values, owner).block_until_ready()
        del values  # before the next one is read
    arrays = [shards[device] for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@dataclass(frozen=True)
class ParameterSlices:
    """Copies slices of one parameter from mapped tensors.

    Attributes:
      source: The files.
      row: The tensors of the parameter.
      shape: The parameter's shape without pipeline stages.
      dtype: What its values are rounded to.
      split: The stages of ``read_staged``.
    """

    source: SafetensorsFile | ModelFolder
    row: Tensor
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    split: StageSplit | None

    def read(self, index: Index) -> np.ndarray:
        """A slice of the parameter without pipeline stages."""
        ranges = [range(n)[part] for n, part in zip(self.shape, index, strict=True)]
        out = np.empty([len(numbers) for numbers in ranges], self.dtype)
        stacked = self.row.num_stacked
        for position in np.ndindex(out.shape[:stacked]):
            number = tuple(r[i] for r, i in zip(ranges, position, strict=False))
            tensor = self.source.view(self.row.tensor_name(number))
            part = self.row.to_parameter(tensor, self.shape)[index[stacked:]]
            _copy(part, out[position] if part.ndim else out, self.row.inputs or 0)
        return out

    def read_staged(self, index: Index) -> np.ndarray:
        """A slice of ``[chunks, stages, depth, ...]``; zero where that has padding."""
        assert self.split is not None
        numbers = self.split.numbers[index[:3]]
        dims = zip(self.shape[1:], index[3:], strict=True)
        rest = [len(range(n)[part]) for n, part in dims]
        out = np.zeros([*numbers.shape, *rest], self.dtype)
        for position, number in np.ndenumerate(numbers):
            if number < self.split.num_layers:
                layer = slice(int(number), int(number) + 1)
                out[position] = self.read((layer, *index[3:]))[0]
        return out


@dataclass(frozen=True)
class QuantizedSlices(ParameterSlices):
    """Quantizes slices of one parameter, whole blocks of one layer at a time.

    Attributes:
      kind: See ``quantize``.
      part: 0 for the codes, 1 for the scales.
    """

    kind: str
    part: int

    def read(self, index: Index) -> np.ndarray:
        """A slice of the codes or of the scales, by its index in all of them."""
        layers, blocks, *rest = index
        of_block, outputs = rest[: 1 - self.part], rest[1 - self.part :]
        inputs = self.shape[1 : len(self.shape) - len(outputs)]
        rows, inner = range(0, math.prod(inputs), BLOCK)[blocks], math.prod(inputs[1:])
        # Heads are rows of several numbers, and may end within a block.
        heads = slice(rows.start // inner, -(-rows.stop // inner))
        of_layer = (heads, *[slice(None)] * (len(inputs) - 1), *outputs)
        result: list[np.ndarray] = []
        for layer in range(self.shape[0])[layers]:
            weight = super().read((slice(layer, layer + 1), *of_layer))
            weight = weight.reshape(-1, *weight.shape[1 + len(inputs) :])
            offset = rows.start - heads.start * inner
            weight = weight[offset : offset + len(rows) * BLOCK]
            part = np.asarray(_quantize(weight, self.kind)[self.part])
            result.append(part[:, *of_block])
        return np.stack(result)


_quantize = jax.jit(quantize, static_argnums=1)


def _copy(part: np.ndarray, out: np.ndarray, inputs: int) -> None:
    """Copy a slice of a tensor, of which the contracted dims come first.

    A transposed copy misses the cache at each number. By strips of neighboring columns
    of the file, it takes a fifth of the time.
    """
    if part.ndim == 0:
        out[...] = part
        return
    step = max(1, _COLUMNS // (math.prod(part.shape[1:inputs]) or 1))
    for i in range(0, len(part), step):
        out[i : i + step] = np.ascontiguousarray(part[i : i + step])
