# SPDX-License-Identifier: Apache-2.0
"""Drawn slices of drawn parameters are those of NumPy, whatever tensors hold them.

A parameter has a tensor for each layer, for each expert of each layer, or one for all,
or a part of one that holds other parameters, too.
The tensors have its shape, or are transposed with heads merged, in any float dtype. A
slice is of the whole parameter, of its layers by pipeline stage with padding, or what
the devices of a drawn layout hold.
"""

import math
from itertools import pairwise

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from tessera.mesh import Mesh
from tessera.train.models.families.family import StoredTensor, Tensor
from tessera.train.models.parameter_slices import ParameterSlices, assemble
from tessera.train.models.pipeline_stages import StageSplit
from tessera.train.models.safetensors import SafetensorsFile

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
PARTS = (
    lambda n: slice(n, 2 * n),
    lambda n: slice(-n, None),
    lambda n: slice(2, None, 3),
)
NAMES = ("all.weight", "{layer}.weight", "{layer}.x.{expert}.weight")


def drawn(seed, folder):
    """A row, the parameter, and the file of its tensors, written with NumPy alone."""
    rng = np.random.default_rng(seed)
    name = NAMES[rng.integers(len(NAMES))]
    stacked = name.count("{")
    dims = tuple(rng.integers(1, 5, rng.integers(1, 5)).tolist())
    inputs = rng.choice([None, *range(len(dims) + 1)])
    shape = (*rng.integers(1, 6, stacked).tolist(), *dims)
    stored = DTYPES[rng.integers(len(DTYPES))]
    parameter = rng.standard_normal(shape).astype(stored)
    tensors = {}
    for index in np.ndindex(shape[:stacked]):
        part = parameter[index]
        if inputs is not None:
            part = part.reshape(math.prod(dims[:inputs]), math.prod(dims[inputs:])).T
            part = part if inputs else part[:, 0]
        numbers = dict(zip(("layer", "expert"), index, strict=False))
        tensors[name.format(**numbers)] = np.ascontiguousarray(part)
    part = None
    if inputs != 0 and dims and rng.random() < 0.4:
        axis, part = -1 if inputs is None else 0, PARTS[rng.integers(len(PARTS))]
        tensors = {key: beside(rng, x, axis, part) for key, x in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "file.safetensors")
    return rng, Tensor("a", name, inputs, part), parameter, tensors


def beside(rng, tensor, axis, part):
    """A tensor in one of three times its size, whose other numbers are drawn."""
    shape = [*tensor.shape]
    shape[axis] *= 3
    whole = rng.standard_normal(shape).astype(tensor.dtype)
    np.moveaxis(whole, axis, 0)[part(tensor.shape[axis])] = np.moveaxis(tensor, axis, 0)
    return whole


def drawn_slice(rng, size):
    begin, end = sorted(rng.integers(0, size + 1, 2).tolist())
    return slice(None) if rng.random() < 0.3 else slice(begin, end)


def drawn_split(rng, num_layers):
    """Stages of layers, some of which have fewer than others, or none."""
    stages, chunks = rng.integers(1, 4, 2).tolist()
    cuts = sorted(rng.integers(0, num_layers + 1, stages * chunks - 1).tolist())
    bounds = [0, *cuts, num_layers]
    return StageSplit(stages, tuple(range(*pair) for pair in pairwise(bounds)))


@pytest.mark.fuzz(sample=60, whole=3000)
def test_slices_are_those_of_numpy(seed, tmp_path):
    rng, row, parameter, tensors = drawn(seed, tmp_path)
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    source = SafetensorsFile(tmp_path / "file.safetensors")
    split = drawn_split(rng, len(parameter))
    slices = ParameterSlices(source, row, parameter.shape, dtype, split)
    rounded = parameter.astype(dtype)
    for name, stored in StoredTensor.all_of([row], {"a": parameter.shape}).items():
        own = tensors[name][row.within(stored.shape)]
        assert own.shape == stored.shape
        assert stored.joined({"a": parameter}.get).tobytes() == own.tobytes()
    for _ in range(5):
        index = tuple(drawn_slice(rng, size) for size in parameter.shape)
        assert_same(slices.read(index), rounded[index])
    staged = np.zeros((*split.numbers.shape, *parameter.shape[1:]), dtype)
    for place, number in np.ndenumerate(split.numbers):
        if number < len(parameter):
            staged[place] = rounded[number]
    for _ in range(5):
        index = tuple(drawn_slice(rng, size) for size in staged.shape)
        assert_same(slices.read_staged(index), staged[index])


def assert_same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.fuzz(sample=20, whole=500)
def test_devices_hold_their_slices(seed, tmp_path):
    rng, row, parameter, _ = drawn(seed, tmp_path)
    mesh = Mesh(["a", "b"], range(8), [(2, 4), (4, 2), (8, 1)][rng.integers(3)])
    free = ["a", "b"]
    entries = []
    for size in parameter.shape:
        axes = [axis for axis in free if size % mesh.shape[axis] == 0]
        axis = axes[0] if axes and rng.random() < 0.7 else None
        free = [one for one in free if one != axis]
        entries.append(axis)
    sharding = NamedSharding(mesh.jax, PartitionSpec(*entries))
    source = SafetensorsFile(tmp_path / "file.safetensors")
    slices = ParameterSlices(source, row, parameter.shape, parameter.dtype, None)
    array = assemble(parameter.shape, sharding, slices.read)
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        assert_same(np.asarray(shard.data), parameter[shard.index])
    jax.block_until_ready(array)
