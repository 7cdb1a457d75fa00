# SPDX-License-Identifier: Apache-2.0
"""Export a model's parameters to a safetensors file, and import them again.

An array's name is its path with dots, ``decoder.mlp.up.kernel``. Its shape is that of
``Model.init`` without pipeline stages, whatever mesh the parameters are on. A
folder of published weights has the names and shapes of its family instead. Both are
described by a table, and read by one mechanism: files are mapped, and each device's
slice is copied from them.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from tessera.errors import WeightFileError
from tessera.foundations.dtypes import as_dtype
from tessera.foundations.tree import Tree, named_leaves, nest
from tessera.mesh import AnyMesh, as_mesh
from tessera.train.files.hub import WEIGHT_FILES, local_path
from tessera.train.models.decoder.decoder_model import DecoderModel
from tessera.train.models.families.family import StoredTensor, Tensor
from tessera.train.models.families.published_files import (
    GENERATION_FILE,
    Published,
    read_published,
)
from tessera.train.models.merge_adapters import Layouts, Read, merge_adapters
from tessera.train.models.model import Model
from tessera.train.models.model_folder import ModelFolder
from tessera.train.models.parameter_slices import (
    ParameterSlices,
    QuantizedSlices,
    assemble,
)
from tessera.train.models.safetensors import SafetensorsFile, write_file
from tessera.train.models.write_folder import SHARD_BYTES, write_folder

__all__ = (
    "check_weights",
    "export_weights",
    "from_pretrained",
    "import_weights",
    "rounded",
    "save_pretrained",
    "stored_parameters",
)

# float32 represents every number of these exactly.
_READABLE: Final = ("F32", "BF16", "F16")
_F32: Final = np.dtype(np.float32)


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
      path: The file; an existing one is replaced once the new one is complete.
      model: The model of the parameters, if they are stored by pipeline stage or have
        adapters, which are added to their weights.
      dtype: What to round them to, such as ``"bf16"``; None keeps their dtype.
      metadata: Text for the file's header.

    Returns:
      Bytes of the file.

    Raises:
      OSError: It cannot be written.
    """
    layouts, read = _parameters(params, model, dtype)
    return write_file(path, layouts, read, metadata)


def save_pretrained(
    params: Tree,
    folder: str | Path,
    *,
    model: DecoderModel,
    dtype: Any = None,
    published: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

    Args:
      params: A tree of arrays, as from ``model.init``; whole in this process. Adapters
        are added to their weights.
      folder: Must not exist, or be empty; it appears once everything is written.
      model: The model of the parameters.
      dtype: What to round them to, such as ``"bf16"``; None keeps their dtype.
      published: The folder that the model came from: what it says beside the model,
        such as its context length, is written again.
      shard_bytes: A file holds no more than this, or one tensor.

    Returns:
      Bytes of the weights.

    Raises:
      ModelFolderError: [T806] no family of Transformers computes this model, or
        ``published`` cannot be read.
      OutputPathError: [T504] the folder exists and is not empty.
      OSError: It cannot be written.
    """
    layouts, read = _parameters(params, model, dtype)
    source = Published() if published is None else read_published(published)
    generation = {GENERATION_FILE: source.generation} if source.generation else {}
    return write_folder(
        folder,
        model.config,
        layouts,
        read,
        values=source.config_values(model.config, {}),
        files=generation,
        shard_bytes=shard_bytes,
    )


def _parameters(params: Tree, model: Model | None, dtype: Any) -> tuple[Layouts, Read]:
    """What is written of parameters: without stages, adapters in their weights."""
    layouts, read = stored_parameters(params, model)
    config = None if model is None else model.config
    return merge_adapters(config, rounded(layouts, dtype), read)


def stored_parameters(params: Tree, model: Model | None) -> tuple[Layouts, Read]:
    """Parameters by name, as ``write_folder`` takes them: without stages."""
    arrays = _by_name(params if model is None else model.plain(params))
    layouts = {
        name: (np.dtype(array.dtype), array.shape) for name, array in arrays.items()
    }
    return layouts, lambda name: np.asarray(arrays[name])


def rounded(layouts: Layouts, dtype: Any) -> Layouts:
    """Dtype and shape of parameters that are rounded to a dtype; None keeps theirs."""
    if dtype is None:
        return layouts
    to = np.dtype(as_dtype(dtype))
    return {name: (to, shape) for name, (_, shape) in layouts.items()}


def from_pretrained(
    folder: str | Path, mesh: AnyMesh | None = None, *, dtype: Any = None
) -> tuple[DecoderModel, Tree]:
    """The model of a Hugging Face folder, and its parameters on a mesh.

    Args:
      folder: Has ``config.json``, and one or many safetensors files. Without such a
        folder, ``organization/name[@revision]`` is downloaded from the Hub.
      mesh: Where to put the parameters; None is the default device.
      dtype: What to round them to, such as ``"bf16"``; None is float32.

    Raises:
      ModelFolderError: [T806] its ``config.json`` cannot be used.
      WeightFileError: [T805] its tensors are not those of the model.
      AbstractMeshError: [T105] this machine lacks some of the mesh's devices.
      HubError: [T719] the Hub does not give it.
    """
    folder = local_path(folder, WEIGHT_FILES, bare=True)
    model = DecoderModel(ModelFolder(folder).config)
    return model, import_weights(folder, model, mesh, dtype=dtype)


def import_weights(
    path: str | Path | ModelFolder,
    model: Model,
    mesh: AnyMesh | None = None,
    *,
    layouts: Tree = None,
    dtype: Any = None,
    adapters: Tree = None,
) -> Tree:
    """Read parameters from files; each device reads only its own slices.

    Narrower dtypes are widened to the parameters' float32, which is exact.

    Args:
      path: A safetensors file that ``export_weights`` wrote, or the folder of a
        published model, which may be open.
      model: The model that it has to fit.
      mesh: Where to put the parameters; None is the default device.
      layouts: PartitionSpecs other than ``model.layouts(mesh)``.
      dtype: What to round them to, such as ``"bf16"``; None is float32. Quantized ones
        are not rounded before.
      adapters: A tree as from ``model.init``, for the adapters of a model that has
        some: no file has them.

    Returns:
      A tree as from ``model.init``.

    Raises:
      WeightFileError: [T805] a file is malformed, or does not hold the parameters of
        the model; lists every difference.
      ModelFolderError: [T806] the folder's ``config.json`` is of another model.
      AbstractMeshError: [T105] this machine lacks some of the mesh's devices.
    """
    source, mesh = check_weights(path, model), as_mesh(mesh)
    rounded_to = None if dtype is None else np.dtype(as_dtype(dtype))
    plain = _without_adapters(model)
    initial = _by_name(adapters)
    rows = {row.path: row for row in _table(source, plain)}

    specs: dict[str, Any] = {}
    if mesh is not None:
        specs = named_leaves(model.layouts(mesh) if layouts is None else layouts)

    def read(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name, to = path.replace("/", "."), rounded_to or np.dtype(leaf.dtype)
        if path in model.adapters:
            return initial[name].astype(to)
        is_quantized, (module, _, part) = path in model.quantized, name.rpartition(".")
        name = f"{module}.kernel" if is_quantized else name
        row, shape = rows[name], plain[name].shape
        if is_quantized:
            kind, number = model.config.lora.quantize_base, int(part == "scales")
            copy = QuantizedSlices(source, row, shape, _F32, None, kind, number).read
        else:
            slices = ParameterSlices(source, row, shape, to, model.split)
            copy = slices.read if leaf.shape == shape else slices.read_staged
        if mesh is None:
            return jax.device_put(copy((slice(None),) * len(leaf.shape)))
        return assemble(leaf.shape, NamedSharding(mesh.jax, specs[path]), copy)

    leaves = named_leaves(model.abstract())
    return nest({path: read(path, leaf) for path, leaf in leaves.items()})


def check_weights(
    path: str | Path | ModelFolder, model: Model
) -> SafetensorsFile | ModelFolder:
    """Check that a file or folder holds the parameters of a model but its adapters.

    Reads only headers, and both of two tensors that have to be equal.

    Raises:
      WeightFileError: [T805] it is malformed or does not; lists every difference.
      ModelFolderError: [T806] the folder's ``config.json`` is of another model.
      HubError: [T719] the Hub does not give what ``hf://…`` names.
    """
    source: SafetensorsFile | ModelFolder
    path = path if isinstance(path, ModelFolder) else local_path(path, WEIGHT_FILES)
    if isinstance(path, ModelFolder) or os.path.isdir(path):
        source = path if isinstance(path, ModelFolder) else ModelFolder(path)
        source.check_config(model.config)
    else:
        source = SafetensorsFile(path)
    plain = _without_adapters(model)
    lines = sorted([*source.problems, *_differences(source, plain)])
    if lines:
        raise WeightFileError(
            f"{source.path} does not hold the parameters of this model",
            got="\n".join(lines),
            fix="use the model that it was written for, or compare with "
            "model.abstract()",
        )
    return source


def _without_adapters(model: Model) -> dict[str, Any]:
    """The abstract parameters that files hold, by name."""
    plain = _by_name(model.dequantized().without_stages().abstract())
    for name in model.adapters:
        del plain[name.replace("/", ".")]
    return plain


def _table(
    source: SafetensorsFile | ModelFolder, plain: Mapping[str, Any]
) -> list[Tensor]:
    """The rows of the parameters; in Tessera's own files, each is one array."""
    if isinstance(source, SafetensorsFile):
        return [Tensor(name, name) for name in plain]
    return source.family.rows(plain)


def _differences(
    source: SafetensorsFile | ModelFolder, plain: Mapping[str, Any]
) -> Iterator[str]:
    """Every tensor that is missing, left over, or of another shape or dtype."""
    shapes = {name: leaf.shape for name, leaf in plain.items()}
    tensors = StoredTensor.all_of(_table(source, plain), shapes)
    expected = {name: tensor.shape for name, tensor in tensors.items()}
    what = "file" if isinstance(source, SafetensorsFile) else "folder"
    for name in expected.keys() | source.arrays.keys():
        shape = expected.get(name)
        needs = "nothing" if shape is None else f"F32{[*shape]}"
        if name not in source.arrays:
            yield f"{name}: the {what} has nothing, the model {needs}"
            continue
        dtype, stored = source.arrays[name]
        if shape is None and not isinstance(source, SafetensorsFile):
            yield from source.untied(name)
        elif stored != shape or dtype not in _READABLE:
            yield f"{name}: the {what} has {dtype}{[*stored]}, the model {needs}"


def _by_name(tree: Tree) -> dict[str, Any]:
    return {path.replace("/", "."): leaf for path, leaf in named_leaves(tree).items()}
