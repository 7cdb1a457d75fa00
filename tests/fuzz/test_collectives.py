# SPDX-License-Identifier: Apache-2.0
"""Drawn collectives give what their definition, written in NumPy, gives.

The axes of a collective come in any order, alone or together, on meshes of one to three
axes whose devices need not be in order. The operand is split by all, some or none of
them, in any order.
"""

import itertools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts
from tessera import dist, op
from tessera.errors import TesseraError
from tessera.mesh import Mesh
from tessera.shard_spec import spec_of_axes

SIZES = [
    sizes
    for count in (1, 2, 3)
    for sizes in itertools.product(range(1, 9), repeat=count)
    if 1 < math.prod(sizes) <= 8
]
DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"]
REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
# Collectives whose result every device along the axes has alike.
ALIKE = ("all_reduce", "all_gather", "broadcast")


@dataclass
class Case:
    """One call of a collective."""

    name: str
    mesh: Mesh
    where: str
    x: np.ndarray
    spec: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...]
    settings: dict = field(default_factory=dict)

    @property
    def count(self):
        """Devices along the axes of the collective."""
        return self.mesh.axis_size(self.axes)

    def call(self, x):
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        return getattr(dist, self.name)(x, axis, **self.settings)


def drawn(seed):
    rng = np.random.default_rng(seed)
    sizes = SIZES[rng.integers(len(SIZES))]
    names = [str(n) for n in rng.permutation(["dp", "tp", "x", "a"])[: len(sizes)]]
    ids = rng.permutation(8)[: math.prod(sizes)] if rng.random() < 0.3 else None
    ids = range(math.prod(sizes)) if ids is None else [int(i) for i in ids]
    mesh = Mesh(names, devices=ids, shape=sizes)
    count = rng.integers(1, len(names) + 1)
    axes = tuple(str(n) for n in rng.permutation(names)[:count])
    rank = int(rng.choice([0, 1, 1, 2, 2, 2, 3]))
    spec = [[] for _ in range(rank)]
    for axis in rng.permutation(names):
        place = rng.integers(-1, rank)
        if place >= 0:
            spec[place].append(str(axis))
    spec = tuple(map(tuple, spec))
    n = mesh.axis_size(axes)
    local = [int(rng.choice([1, 2, 3, n, n, n, 2 * n, 0], p=BLOCKS)) for _ in spec]
    shape = [size * mesh.axis_size(a) for size, a in zip(local, spec, strict=True)]
    dtype = jnp.dtype(str(rng.choice(DTYPES, p=(0.4, *(0.1,) * 6))))
    low = 0 if dtype in (jnp.uint8, jnp.bool_) else -3
    x = rng.integers(low, 4, shape).astype(dtype)
    where = str(rng.choice(["eager", "eager", "function", "kernel", "shard_map"]))
    case = Case("", mesh, where, np.asarray(x), spec, axes)
    draw_settings(rng, case)
    return case


BLOCKS = (0.15, 0.15, 0.1, 0.15, 0.15, 0.15, 0.13, 0.02)


def draw_settings(rng, case):
    """Choose the collective and what it is told."""
    rank, n = case.x.ndim, case.count
    case.name = str(rng.choice(list(REFERENCES)))
    dim = int(rng.integers(-rank, rank)) if rank else 0
    match case.name:
        case "all_reduce":
            case.settings = {"op": str(rng.choice(list(REDUCTIONS)))}
        case "reduce_scatter":
            case.settings = {"op": str(rng.choice(["sum", "sum", "mean"]))}
        case "all_to_all":
            other = int(rng.integers(-rank, rank)) if rank else 0
            case.settings = {"split_dim": dim, "concat_dim": other}
        case "broadcast" | "scatter" | "gather":
            case.settings = {"root": int(rng.integers(n))}
        case "send" | "recv":
            pairs = int(rng.integers(1, n + 1))
            ends = [rng.permutation(n)[:pairs].tolist() for _ in range(2)]
            case.settings = dict(zip(("source", "destination"), ends, strict=True))
    optional = case.name in ("reduce_scatter", "all_gather", "scatter", "gather")
    if optional and rng.random() < 0.7:
        case.settings["dim"] = dim


# --- the reference: lists of blocks, in the order of ranks


def reduced(blocks, op="sum"):
    if op == "mean":
        total = np.sum(np.stack(blocks), axis=0, dtype=blocks[0].dtype)
        return (total / np.asarray(len(blocks), total.dtype)).astype(total.dtype)
    return REDUCTIONS[op](np.stack(blocks), axis=0).astype(blocks[0].dtype)


def all_reduce(blocks, op):
    return [reduced(blocks, op)] * len(blocks)


def reduce_scatter(blocks, dim, op):
    return np.split(reduced(blocks, op), len(blocks), axis=dim)


def all_gather(blocks, dim):
    return [np.concatenate(blocks, axis=dim)] * len(blocks)


def all_to_all(blocks, split_dim, concat_dim):
    parts = [np.split(block, len(blocks), axis=split_dim) for block in blocks]
    return [
        np.concatenate([part[rank] for part in parts], axis=concat_dim)
        for rank in range(len(blocks))
    ]


def broadcast(blocks, root):
    return [blocks[root]] * len(blocks)


def scatter(blocks, root, dim=0):
    return np.split(blocks[root], len(blocks), axis=dim)


def gather(blocks, root, dim=0):
    whole = np.concatenate(blocks, axis=dim)
    return [whole if r == root else np.zeros_like(whole) for r in range(len(blocks))]


def send(blocks, source, destination):
    results = [np.zeros_like(block) for block in blocks]
    for start, end in zip(source, destination, strict=True):
        results[end] = blocks[start]
    return results


def recv(blocks, source, destination):
    results = list(blocks)
    for start, end in zip(source, destination, strict=True):
        results[end] = blocks[start]
    return results


REFERENCES = {
    f.__name__: f
    for f in (
        *(all_reduce, reduce_scatter, all_gather, all_to_all, broadcast),
        *(scatter, gather, send, recv),
    )
}


# --- from a global array to blocks and back


def places(mesh):
    return [mesh.coordinates(position) for position in range(mesh.size)]


def index_along(place, axes, mesh):
    """Rank of a device along some axes, outer first."""
    rank = 0
    for axis in axes:
        rank = rank * mesh.shape[axis] + place[axis]
    return rank


def slices(place, spec, mesh, sizes):
    starts = [index_along(place, a, mesh) * n for a, n in zip(spec, sizes, strict=True)]
    return tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))


def blocks_of(case):
    mesh = case.mesh
    sizes = [
        n // mesh.axis_size(a) for n, a in zip(case.x.shape, case.spec, strict=True)
    ]
    return [case.x[slices(p, case.spec, mesh, sizes)] for p in places(mesh)]


def results_of(case, settings):
    """The result of every device, in the order of the mesh."""
    mesh, blocks = case.mesh, blocks_of(case)
    results = [None] * mesh.size
    others = [axis for axis in mesh.axes if axis not in case.axes]
    groups = {}
    for position, place in enumerate(places(mesh)):
        group = groups.setdefault(tuple(place[axis] for axis in others), {})
        group[index_along(place, case.axes, mesh)] = position
    for group in groups.values():
        positions = [group[rank] for rank in range(case.count)]
        made = REFERENCES[case.name]([blocks[p] for p in positions], **settings)
        for position, result in zip(positions, made, strict=True):
            results[position] = result
    return results


def assembled(results, spec, mesh):
    """The global array of which the devices hold these blocks."""
    sizes = results[0].shape
    shape = [n * mesh.axis_size(a) for n, a in zip(sizes, spec, strict=True)]
    whole = np.empty(shape, results[0].dtype)
    for place, result in zip(places(mesh), results, strict=True):
        whole[slices(place, spec, mesh, sizes)] = result
    for place, result in zip(places(mesh), results, strict=True):
        held = whole[slices(place, spec, mesh, sizes)]
        np.testing.assert_array_equal(held, result, "copies that differ")
    return whole


# --- what a call has to give


def full_settings(case):
    """The settings with the default dim in its place, or the code of an error."""
    settings, is_global = dict(case.settings), case.where in ("eager", "function")
    dtype, rank = case.x.dtype, case.x.ndim
    how = settings.get("op")
    if how in ("sum", "mean") and dtype == np.bool_:
        return "T206"
    if how == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        return "T206"
    if case.name in ("reduce_scatter", "all_gather") and "dim" not in settings:
        holding = [d for d, a in enumerate(case.spec) if set(case.axes) <= set(a)]
        if is_global and holding:
            settings["dim"] = holding[0]
        elif is_global and case.name == "all_gather":
            return "T206"
        else:
            settings["dim"] = -1
    if not rank and case.name not in ("all_reduce", "broadcast", "send", "recv"):
        return "T203"
    if not rank and is_global and case.name in ("send", "recv"):
        return "T206"
    cut = settings.get("split_dim", settings.get("dim", 0))
    if case.name in ("reduce_scatter", "scatter", "all_to_all"):
        block = case.x.shape[cut] // case.mesh.axis_size(case.spec[cut])
        if block % case.count:
            return "T201"
    return settings


def spec_after(case, settings):
    """The layout of the global result, as the documentation has it."""
    if case.name in ("send", "recv"):
        missing = [a for a in case.axes if not any(a in axes for axes in case.spec)]
        return ((*case.spec[0], *missing), *case.spec[1:])
    spec = [tuple(a for a in axes if a not in case.axes) for axes in case.spec]
    if case.name not in ALIKE:
        dim = settings.get("split_dim", settings.get("dim", 0))
        spec[dim] += case.axes
    return tuple(spec)


def kernel_result(case, results):
    """What a kernel makes of its devices' results: joined where they may differ."""
    split = {axis for axes in case.spec for axis in axes}
    along = set(case.axes)
    over = split - along if case.name in ALIKE else split | along
    axes = tuple(axis for axis in case.mesh.axes if axis in over)
    if not results[0].ndim and axes:
        results = [result[None] for result in results]
    spec = (axes, *[()] * (results[0].ndim - 1)) if results[0].ndim else ()
    return assembled(results, spec, case.mesh)


def expected(case, settings):
    results = results_of(case, settings)
    if case.where == "kernel":
        return kernel_result(case, results)
    if case.where == "shard_map":
        return np.stack(results)
    return assembled(results, spec_after(case, settings), case.mesh)


def actual(case):
    spec = spec_of_axes(case.spec)
    x = jax.device_put(case.x, NamedSharding(case.mesh.jax, spec))
    match case.where:
        case "function":
            return ts.function(lambda x: case.call(x))(x)
        case "kernel":
            return op.kernel(lambda x: case.call(x))(x)
        case "shard_map":
            region = jax.shard_map(
                lambda block: case.call(block)[None],
                mesh=case.mesh.jax,
                in_specs=spec,
                out_specs=PartitionSpec(case.mesh.axes),
            )
            return jax.jit(region)(x)
    return case.call(x)


@pytest.mark.fuzz(sample=60, whole=1000)
def test_collectives_give_what_their_definition_gives(seed):
    case = drawn(seed)
    print(f"seed {seed}: {case}")  # noqa: T201
    settings = full_settings(case)
    if isinstance(settings, str):
        with pytest.raises(TesseraError) as caught:
            actual(case)
        assert caught.value.code == settings
        return
    found, wanted = np.asarray(actual(case)), expected(case, settings)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    if settings.get("op") == "mean":
        tolerance = float(jnp.finfo(wanted.dtype).eps)
        np.testing.assert_allclose(
            found.astype(np.float32), wanted.astype(np.float32), rtol=tolerance
        )
    else:
        np.testing.assert_array_equal(found, wanted)
