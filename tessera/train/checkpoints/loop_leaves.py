# SPDX-License-Identifier: Apache-2.0
"""The leaves of a loop's state, as a checkpoint stores them, and the state from them.

Arrays are stored as they are, typed PRNG keys as their numbers, and Python numbers and
strings as JSON. Of NNX objects the variables are stored; a restored state has new ones.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding

from tessera.errors import MeshConflictError, StateLeafError
from tessera.foundations.tree import Tree, path_name
from tessera.jax_compat import jaxprs, traces
from tessera.mesh import Mesh
from tessera.shard import DistTensor
from tessera.shard_spec import check_even, spec_of_axes
from tessera.tracing.object_arguments import is_object
from tessera.train.checkpoints.metadata import Metadata, Stored

_HOST = (bool, int, float, str)
_KINDS = {bool: np.bool_, int: jnp.integer, float: jnp.floating}


@dataclass
class StateLeaves:
    """What of a state is stored, by name.

    Attributes:
      arrays: Global arrays; NumPy arrays for what each process has whole.
      values: Python numbers and strings, as JSON.
      keys: The implementation of the typed PRNG keys, whose numbers are in ``arrays``.
    """

    arrays: dict[str, jax.Array | np.ndarray] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Tree) -> "StateLeaves":
        """The leaves of a state.

        Raises:
          StateLeafError: [T807] a leaf cannot be stored, or differs by process.
        """
        found = cls()
        for name, leaf in named_parts(state)[0].items():
            found._add(name, leaf)
        found._check_processes()
        return found

    def _add(self, name: str, leaf: Any) -> None:
        _check_leaf(name, leaf)
        if isinstance(leaf, DistTensor):
            leaf = leaf.materialize()
        if type(leaf) in _HOST:
            self.values[name] = json.dumps(leaf)
            return
        if is_key(leaf):
            self.keys[name] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        is_global = isinstance(leaf, jax.Array) and (
            jax.process_count() == 1 or not leaf.is_fully_addressable
        )
        self.arrays[name] = leaf if is_global else np.asarray(leaf)

    def _check_processes(self) -> None:
        """Raise [T807] for what is not global, and of which processes have others."""
        if jax.process_count() == 1:
            return
        own = {
            name: leaf.tobytes()
            for name, leaf in self.arrays.items()
            if isinstance(leaf, np.ndarray)
        } | {name: text.encode() for name, text in self.values.items()}
        sums = np.array([zlib.crc32(own[name]) for name in own], np.uint32)
        different = np.ptp(multihost_utils.process_allgather(sums), axis=0) > 0
        if names := [
            name for name, differs in zip(own, different, strict=True) if differs
        ]:
            raise StateLeafError(
                "processes have different values, and a checkpoint stores one of them",
                got=", ".join(names),
                fix="save what is the same in every process, or a global array: "
                "jax.make_array_from_process_local_data(sharding, part)",
            )


def named_parts(state: Tree) -> tuple[dict[str, Any], Callable[[list[Any]], Tree]]:
    """The leaves of a state by name, and what makes a state of others in their order.

    Raises:
      StateLeafError: [T807] two leaves have one name.
    """
    nodes, outer = jax.tree.flatten(state, is_leaf=is_object)
    positions = [i for i, node in enumerate(nodes) if is_object(node)]
    plain, merge = _split_objects([nodes[i] for i in positions])
    parts = dict(enumerate(nodes)) | dict(zip(positions, plain, strict=True))
    tree = jax.tree.unflatten(outer, [parts[i] for i in range(len(nodes))])
    paths, inner = jax.tree_util.tree_flatten_with_path(tree)
    names = [path_name(path) or "state" for path, _ in paths]
    if len(set(names)) < len(names):
        raise StateLeafError(
            "two leaves of a state have one name",
            got=", ".join(sorted({name for name in names if names.count(name) > 1})),
            fix="leave '/' out of the keys of dicts",
        )

    def rebuild(leaves: list[Any]) -> Tree:
        parts = outer.flatten_up_to(jax.tree.unflatten(inner, leaves))
        for i, merged in zip(
            positions, merge([parts[i] for i in positions]), strict=True
        ):
            parts[i] = merged
        return jax.tree.unflatten(outer, parts)

    return dict(zip(names, (leaf for _, leaf in paths), strict=True)), rebuild


def _split_objects(
    objects: list[Any],
) -> tuple[list[Tree], Callable[[list[Tree]], Any]]:
    """The variables of NNX objects, which may share some; and what makes new ones."""
    if not objects:
        return [], lambda _: []
    from flax import nnx

    graphdef, state = nnx.split(objects)
    values: Any = nnx.to_pure_dict(state)

    def merge(parts: list[Tree]) -> Any:
        stored: Any = {i: part for i, part in enumerate(parts) if i in values}
        nnx.replace_by_pure_dict(state, stored)
        return nnx.merge(graphdef, state)

    return [values.get(i, {}) for i in range(len(objects))], merge


def _check_leaf(name: str, leaf: Any) -> None:
    """Raise [T807] for what cannot be stored."""
    is_array = isinstance(leaf, (jax.Array, DistTensor, np.generic)) or (
        type(leaf) in (np.ndarray, np.memmap)  # a masked array would lose its mask
    )
    kinds = (np.bool_, jnp.number, jax.dtypes.prng_key)
    is_numeric = is_array and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)
    if isinstance(leaf, jaxprs.Tracer):
        what, fix = "is traced", "save outside of the step"
    elif isinstance(leaf, jax.Array) and leaf.is_deleted():
        what, fix = "was donated to a step", "save the state that the step returned"
    elif is_numeric and leaf.size == 0:  # Orbax does not store it
        what, fix = "is an array without elements", "put None in its place"
    elif type(leaf) in _HOST or is_numeric:
        return
    else:
        what = f"is no array of numbers, number or string: {type(leaf).__name__}"
        fix = "leave it out of the state, or put None in its place"
    raise StateLeafError(f"{name} {what}", fix=fix)


def is_key(leaf: Any) -> bool:
    """Whether a leaf holds typed PRNG keys; it may be abstract."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def saved_forms(metadata: Metadata) -> dict[str, str]:
    """Dtype and shape of every stored leaf; the type of a Python value."""
    forms = {name: type(json.loads(t)).__name__ for name, t in metadata.values.items()}
    for name, stored in metadata.arrays.items():
        leaf: Any = jax.ShapeDtypeStruct(stored.shape, jnp.dtype(stored.dtype))
        impl: Any = metadata.random.get(name)
        if impl is not None:
            wrap = partial(jax.random.wrap_key_data, impl=impl)
            leaf = jax.eval_shape(wrap, leaf)
        forms[name] = form_of(leaf)
    return forms


def is_number_of(leaf: Any, stored: Stored | None) -> bool:
    """Whether a leaf is a Python number, and one of its kind was stored as an array.

    A step makes an array of the ``0`` that a state begins with.
    """
    kind: Any = _KINDS.get(type(leaf))
    if kind is None or stored is None or stored.shape:
        return False
    return jnp.issubdtype(jnp.dtype(stored.dtype), kind)


def form_of(leaf: Any) -> str:
    """A leaf as both sides of a comparison show it, such as ``float32[8,4]``."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"


def sharding_of(
    name: str, leaf: Any, stored: Stored, mesh: Mesh | None
) -> Sharding | None:
    """Where an array is restored to: as ``leaf``, or as it was saved, on a mesh.

    Returns:
      None for the host, or for the default device.

    Raises:
      ShardDivisibilityError: [T201] the mesh does not divide it as it was saved.
      MeshConflictError: [T308] ``leaf`` is on another mesh.
    """
    if _is_wide(stored) or isinstance(leaf, np.ndarray | np.generic):
        return None
    sharding: Any = getattr(leaf, "sharding", None)
    if isinstance(leaf, DistTensor):
        sharding = leaf.mesh and NamedSharding(leaf.mesh.jax, leaf.spec)
    if isinstance(sharding, NamedSharding):
        if mesh is not None and sharding.mesh != mesh.jax:
            raise MeshConflictError(
                f"{name} of `like` is on another mesh than `mesh`",
                got=f"{Mesh.of(sharding.mesh).topology}, mesh={mesh.topology}",
                fix="leave mesh= out, or use `like` without a sharding: "
                "jax.eval_shape(init)",
            )
        return sharding
    if getattr(leaf, "committed", False):
        return sharding
    if mesh is None:
        return sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    axes = (tuple(a for a in of_dim if a in mesh.axes) for of_dim in stored.layout)
    spec = spec_of_axes(axes)
    check_even(f"{name} cannot be split as it was saved", stored.shape, spec, mesh)
    return NamedSharding(mesh.jax, spec)


def restored_leaf(leaf: Any, array: Any, stored: Stored, impl: Any) -> Any:
    """What was read, as the leaf that it is restored for."""
    if isinstance(leaf, np.generic):
        return array[()]
    is_host = isinstance(leaf, np.ndarray) or _is_wide(stored)
    if isinstance(array, np.ndarray) and not is_host:
        array = jnp.array(array)
    if stored.weak and not is_host:
        array = traces.converted(array, array.dtype, weak=True)
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


def _is_wide(stored: Stored) -> bool:
    """Whether JAX would round an array, of 64 bits: it stays one of NumPy."""
    dtype = jnp.dtype(stored.dtype)
    return jax.dtypes.canonicalize_dtype(dtype) != dtype
