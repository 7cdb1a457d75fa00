# SPDX-License-Identifier: Apache-2.0
"""Export a model's parameters to a safetensors file, and import them again.

An array's name is its path with dots, ``decoder.mlp.up.kernel``. Its shape is that of
``DecoderModel.init`` without pipeline stages, whatever mesh the parameters are on.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera.dtypes import as_dtype
from tessera.errors import WeightFileError
from tessera.mesh import Mesh
from tessera.models.decoder.model import DecoderModel
from tessera.models.safetensors import Index, SafetensorsFile, write_file
from tessera.tree import Tree, path_name

__all__ = ("check_weights", "export_weights", "import_weights", "write_weights")

# float32 represents every number of these exactly.
_READABLE: Final = ("F32", "BF16", "F16")


def export_weights(
    params: Tree,
    path: str | Path,
    *,
    model: DecoderModel | None = None,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write parameters to a safetensors file.

    Args:
      params: A tree of arrays, as from ``DecoderModel.init``; whole in this process.
      path: The file; an existing one is replaced once the new one is complete.
      model: The model of the parameters, if they are stored by pipeline stage.
      dtype: What to round them to, such as ``"bf16"``; None keeps their dtype.
      metadata: Text for the file's header.

    Returns:
      Bytes of the file.

    Raises:
      OSError: It cannot be written.
    """
    arrays = _by_name(params if model is None else model.plain(params))
    layouts = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return write_weights(
        path,
        layouts,
        lambda name: np.asarray(arrays[name]),
        dtype=dtype,
        metadata=metadata,
    )


def write_weights(
    path: str | Path,
    layouts: Mapping[str, tuple[Any, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    *,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write parameters that ``read`` returns one by one; see ``export_weights``."""
    rounded_to = None if dtype is None else np.dtype(as_dtype(dtype))
    layouts = {
        name: (rounded_to or np.dtype(stored), tuple(shape))
        for name, (stored, shape) in layouts.items()
    }

    def read_rounded(name: str) -> np.ndarray:
        return read(name).astype(layouts[name][0], copy=False)

    return write_file(path, layouts, read_rounded, metadata)


def import_weights(
    path: str | Path,
    model: DecoderModel,
    mesh: Mesh | None = None,
    *,
    layouts: Tree = None,
) -> Tree:
    """Read parameters from a safetensors file; each device reads only its own slices.

    Narrower dtypes are widened to the parameters' float32, which is exact.

    Args:
      path: The file.
      model: The model that it has to fit.
      mesh: Where to put the parameters; None is the default device.
      layouts: PartitionSpecs other than ``model.layouts(mesh)``.

    Returns:
      A tree as from ``model.init``.

    Raises:
      WeightFileError: [T805] the file is malformed, or does not hold the parameters of
        the model; lists every difference.
      AbstractMeshError: [T105] this machine lacks some of the mesh's devices.
    """
    file = check_weights(path, model)
    plain = jax.eval_shape(model.plain, model.abstract())
    if mesh is None:

        def read_whole(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return file.read(name).astype(leaf.dtype)

        return jax.jit(model.stored)(_map_named(read_whole, plain))
    layouts = model.layouts(mesh) if layouts is None else layouts

    def read(name: str, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        def read_slice(index: Index | None) -> np.ndarray:
            return file.read(name, index or ()).astype(leaf.dtype)

        # The layout of a staged array has two more dims: [chunks, stages, layers, ...].
        if model.split is not None and name.startswith("decoder."):
            spec = PartitionSpec(None, *spec[3:])
        sharding = NamedSharding(mesh.jax, spec)
        return jax.make_array_from_callback(leaf.shape, sharding, read_slice)

    params = _map_named(read, plain, layouts)
    if model.split is None:
        return params
    shardings = jax.tree.map(partial(NamedSharding, mesh.jax), layouts)
    return jax.jit(model.stored, out_shardings=shardings)(params)


def check_weights(path: str | Path, model: DecoderModel) -> SafetensorsFile:
    """Check that a file holds the parameters of a model; reads only its header.

    Raises:
      WeightFileError: [T805] it is malformed or does not; lists every difference.
    """
    file = SafetensorsFile(path)
    expected = _by_name(jax.eval_shape(model.plain, model.abstract()))
    lines: list[str] = []
    for name in sorted(expected.keys() | file.arrays.keys()):
        leaf = expected.get(name)
        needs = "nothing" if leaf is None else f"F32{[*leaf.shape]}"
        if name not in file.arrays:
            lines.append(f"{name}: the file has nothing, the model {needs}")
            continue
        dtype, shape = file.arrays[name]
        if leaf is None or shape != leaf.shape or dtype not in _READABLE:
            lines.append(f"{name}: the file has {dtype}{[*shape]}, the model {needs}")
    if lines:
        raise WeightFileError(
            f"{file.path} does not hold the parameters of this model",
            got="\n".join(lines),
            fix="use the model that it was written for, or compare with "
            "model.abstract()",
        )
    return file


def _by_name(tree: Tree) -> dict[str, Any]:
    return {
        path_name(path, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _map_named(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """A tree of ``function(name, leaf, …)``."""

    def call(path: Any, leaf: Any, *rest: Any) -> Any:
        return function(path_name(path, separator="."), leaf, *rest)

    return jax.tree_util.tree_map_with_path(call, tree, *others)
