# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model to a safetensors file and back.

An array is called by its path with dots, ``decoder.mlp.up.kernel``, and has the shape
of ``Model.init`` without stages, whatever mesh it lies on.
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
from tessera.models.model import Model
from tessera.models.safetensors import (
    DTYPES,
    Index,
    SafetensorsFile,
    open_file,
    write_file,
)
from tessera.tree import Tree

# Every number of these is one of float32, so nothing is lost by reading it as such.
_READABLE: Final = ("F32", "BF16", "F16")


def export_weights(
    params: Tree,
    path: str | Path,
    *,
    model: Model | None = None,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write parameters to a safetensors file.

    Args:
      params: A tree of arrays, as from ``Model.init``; whole in this process.
      path: The file; one that is there is replaced once the new one is whole.
      model: Whose parameters they are, where they are stored by stage.
      dtype: What to round them to, such as ``"bf16"``; None leaves them as they are.
      metadata: Text for the file's header.

    Returns:
      Bytes of the file.

    Raises:
      OSError: It cannot be written.
    """
    arrays = _named(params if model is None else model.plain(params))
    forms = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return write_weights(
        path,
        forms,
        lambda name: np.asarray(arrays[name]),
        dtype=dtype,
        metadata=metadata,
    )


def write_weights(
    path: str | Path,
    forms: Mapping[str, tuple[Any, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    *,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write parameters that are read one after the other; see ``export_weights``."""
    wanted = None if dtype is None else np.dtype(as_dtype(dtype))
    forms = {name: (wanted or np.dtype(d), tuple(s)) for name, (d, s) in forms.items()}

    def rounded(name: str) -> np.ndarray:
        return read(name).astype(forms[name][0], copy=False)

    return write_file(path, forms, rounded, metadata)


def import_weights(
    path: str | Path, model: Model, mesh: Mesh | None = None, *, layouts: Tree = None
) -> Tree:
    """Read parameters from a safetensors file, each device its own part.

    Numbers of fewer bits are widened to the parameters' float32, which is exact.

    Args:
      path: The file.
      model: What it has to fit.
      mesh: Where the parameters will lie; None is the default device.
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

        def whole(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return file.read(name).astype(leaf.dtype)

        return jax.jit(model.stored)(_mapped(whole, plain))
    layouts = model.layouts(mesh) if layouts is None else layouts

    def read(name: str, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        def part(index: Index | None) -> np.ndarray:
            return file.read(name, index or ()).astype(leaf.dtype)

        # Where a layout is of stages, without its first dims: chunks, stages, layers.
        extra = model.split is not None and name.startswith("decoder.")
        place = PartitionSpec(None, *spec[3:]) if extra else spec
        sharding = NamedSharding(mesh.jax, place)
        return jax.make_array_from_callback(leaf.shape, sharding, part)

    params = _mapped(read, plain, layouts)
    if model.split is None:
        return params
    placed = jax.tree.map(partial(NamedSharding, mesh.jax), layouts)
    return jax.jit(model.stored, out_shardings=placed)(params)


def check_weights(path: str | Path, model: Model) -> SafetensorsFile:
    """See that a file has the parameters of a model; reads no more than its header.

    Raises:
      WeightFileError: [T805] it is malformed, or has others; lists every difference.
    """
    file = open_file(path)
    wanted = _named(jax.eval_shape(model.plain, model.abstract()))
    names = {dtype: name for name, dtype in DTYPES.items()}
    lines: list[str] = []
    for name in sorted(wanted.keys() | file.entries.keys()):
        entry, leaf = file.entries.get(name), wanted.get(name)
        wants = "nothing" if leaf is None else f"F32{[*leaf.shape]}"
        if entry is None:
            lines.append(f"{name}: the file has nothing, the model {wants}")
            continue
        kind = names[entry.dtype]
        if leaf is None or entry.shape != leaf.shape or kind not in _READABLE:
            has = f"{kind}{[*entry.shape]}"
            lines.append(f"{name}: the file has {has}, the model {wants}")
    if lines:
        raise WeightFileError(
            f"{file.path} does not hold the parameters of this model",
            got="\n".join(lines),
            fix="use the model that it was written for, or compare with "
            "model.abstract()",
        )
    return file


def _named(tree: Tree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """A tree of ``function(name, leaf, …)``."""

    def call(path: Any, leaf: Any, *rest: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return function(name, leaf, *rest)

    return jax.tree_util.tree_map_with_path(call, tree, *others)
