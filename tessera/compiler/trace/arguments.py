# SPDX-License-Identifier: Apache-2.0
"""Flattens the arguments of a call into arrays, which are traced, and static values.

Arrays are traced. Python scalars, strings, callables and everything else is static, by
value: another value is another program.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from tessera import _jax
from tessera.compiler.trace.static_values import ATOMS, StaticValue, static_key
from tessera.errors import ArgumentError
from tessera.mesh import Mesh
from tessera.object_arguments import STRUCTURE, Structure
from tessera.shard import ARRAYS, DistTensor
from tessera.shard_spec import axes_of_dims, spec_of_axes
from tessera.tree import Skeleton, is_childless, named_leaves, path_name

# The mesh axis of an array that is committed to one device.
ONE_DEVICE = "device"

_ARRAYS = (*ARRAYS, jax.ShapeDtypeStruct)


class ProgramMismatch(Exception):
    """A call does not fit a program."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments.

    Attributes:
      name: Its path: the argument's name, then keys.
      value: The array.
      of_object: Whether an NNX object holds it, so that it is no batch.
    """

    name: str
    value: Any
    of_object: bool = False

    @property
    def layout(self) -> tuple[Mesh, PartitionSpec] | None:
        """The mesh and spec that the array itself carries, if it carries any.

        An array that is committed to one device lives on a mesh of that device.
        """
        if isinstance(self.value, DistTensor):
            mesh = self.value.mesh
            return None if mesh is None else (mesh, self.value.spec)
        if self.is_traced:
            return None
        sharding = getattr(self.value, "sharding", None)
        if isinstance(sharding, NamedSharding):
            axes = axes_of_dims(sharding.spec, len(self.value.shape))
            return _mesh_of(sharding.mesh), spec_of_axes(axes)
        if isinstance(sharding, SingleDeviceSharding) and self._is_committed:
            (device,) = sharding.device_set
            return Mesh((ONE_DEVICE,), devices=(device.id,)), PartitionSpec()
        return None

    @property
    def spec(self) -> PartitionSpec:
        """The spec of its layout, replicated where it has none."""
        return self.layout[1] if self.layout else PartitionSpec()

    @property
    def _is_committed(self) -> bool:
        return getattr(self.value, "committed", True)

    @property
    def aval(self) -> Any:
        """Global shape, dtype and whether the dtype is weak."""
        if isinstance(self.value, (DistTensor, jax.ShapeDtypeStruct)):
            return self.value
        return jax.typeof(self.value)

    @property
    def is_weak(self) -> bool:
        """Whether the dtype is weak, as that of a Python number is."""
        return _is_weak(self.aval)

    def key(self) -> tuple[Any, ...]:
        """What a program is specialized to in this array."""
        shape, dtype = tuple(self.aval.shape), self.aval.dtype
        # No compiled program takes a value that JAX is tracing.
        varies = _jax.varying_axes(self.value) if self.is_traced else None
        location = (self.layout, _jax.on_host(self.value), varies)
        return (shape, dtype, self.is_weak, *location)

    @property
    def is_traced(self) -> bool:
        """Whether JAX is tracing it, so that its values are unknown."""
        return isinstance(self.value, _jax.Tracer)

    @property
    def may_be_padded(self) -> bool:
        """Whether it can have an uneven layout: a tensor, or a traced value."""
        return isinstance(self.value, DistTensor) or self.is_traced

    def abstract(self) -> "Leaf":
        """The same leaf without its data, which a program must not keep alive."""
        if _is_padded(self.value):
            return Leaf(self.name, self.value.declaration())
        if not isinstance(self.value, (jax.Array, np.ndarray)):
            return self
        if self.is_traced:
            return replace(self, value=_jax.struct(self.aval))
        return self._struct(
            getattr(self.value, "sharding", None) if self.layout else None
        )

    def laid_out(self, layout: NamedSharding | None) -> "Leaf":
        """The same leaf in a layout, unless it has one of its own."""
        if layout is None or self.layout is not None:
            return self
        return self._struct(layout)

    def _struct(self, sharding: Any) -> "Leaf":
        struct = jax.ShapeDtypeStruct(
            tuple(self.aval.shape),
            self.aval.dtype,
            sharding=sharding,
            weak_type=self.is_weak,
        )
        return replace(self, value=struct)


@dataclass(frozen=True)
class Argument:
    """One argument of a call: its tree, its arrays, its static leaves by position."""

    name: str
    tree: Any
    leaves: tuple[Leaf, ...]
    statics: tuple[tuple[int, StaticValue], ...]

    @property
    def structure(self) -> Structure | None:
        """The static part of an NNX object, where the argument is one."""
        value = self.rebuilt(self.leaves)
        return value.get(STRUCTURE) if isinstance(value, dict) else None

    @property
    def paths(self) -> list[str]:
        """The paths of its leaves, and of what has none: None, or an empty dict."""
        value = self.rebuilt(self.leaves)
        return list(named_leaves(value, self.name, is_leaf=is_childless))

    def own_part(self) -> list[Any]:
        """What the compiled program takes for this argument itself."""
        return stored_arrays([leaf.value for leaf in self.leaves])

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """The argument with other arrays, such as tracers, in place of its own."""
        fixed = {index: static.value for index, static in self.statics}
        return Skeleton(self.tree, fixed).combine(arrays)

    def key(self) -> tuple[Any, ...]:
        """What a program is specialized to in this argument."""
        return (
            self.tree,
            self.statics,
            tuple(leaf.key() for leaf in self.leaves),
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function, with flattened arguments."""

    positional: int
    keywords: tuple[str, ...]
    arguments: tuple[Argument, ...]

    @property
    def has_objects(self) -> bool:
        """Whether arrays stand for an object among the arguments."""
        statics = [
            static for argument in self.arguments for _, static in argument.statics
        ]
        return any(isinstance(static.value, Structure) for static in statics)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every array of the call, in order."""
        return tuple(leaf for argument in self.arguments for leaf in argument.leaves)

    def key(self) -> tuple[Any, ...]:
        """What a program of this call is specialized to."""
        parts = tuple(argument.key() for argument in self.arguments)
        return (self.positional, self.keywords, parts)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, as they were given."""
        return self.rebuilt([leaf.value for leaf in self.leaves])[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, as they were given."""
        return self.rebuilt([leaf.value for leaf in self.leaves])[1]

    def laid_out(self, layouts: Sequence[NamedSharding | None]) -> "Call":
        """The call with its arrays in some layouts; None leaves one as it is."""
        rest = iter(layouts)
        return self._mapped(lambda leaf: leaf.laid_out(next(rest)))

    def abstract(self) -> "Call":
        """The same call without the data of its arrays."""
        return self._mapped(Leaf.abstract)

    def _mapped(self, change: Callable[[Leaf], Leaf]) -> "Call":
        arguments = [
            replace(argument, leaves=tuple(map(change, argument.leaves)))
            for argument in self.arguments
        ]
        return replace(self, arguments=tuple(arguments))

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other arrays in place."""
        rest, values = list(arrays), list[Any]()
        for argument in self.arguments:
            values.append(argument.rebuilt(rest[: len(argument.leaves)]))
            del rest[: len(argument.leaves)]
        named = zip(self.keywords, values[self.positional :], strict=True)
        return tuple(values[: self.positional]), dict(named)


def flatten_args(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """Split the arguments of one call into arrays and static values.

    Args:
      names: The function's parameter names, for messages and for the graph.
      args: Positional arguments.
      kwargs: Keyword arguments.

    Raises:
      ArgumentError: [T301] a leaf is neither an array nor hashable.
    """
    labels = [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]
    keywords = tuple(sorted(kwargs))  # in any order it is the same call
    values = [*args, *(kwargs[name] for name in keywords)]
    arguments = [
        _argument(name, value)
        for name, value in zip([*labels, *keywords], values, strict=True)
    ]
    return Call(len(args), keywords, tuple(arguments))


def leaf_signature(value: Any) -> Hashable:
    """What a program depends on in one leaf of a call, quickly.

    Leaves of one signature have equal keys, ``Leaf.key()`` or that of their static
    value. The converse does not hold: NumPy's arrays differ from JAX's here.
    """
    kind = type(value)
    if kind in ATOMS:
        return static_key(value)
    if kind is DistTensor:
        return kind, value.shape, value.dtype, value.mesh, value.spec
    try:
        return value.aval, value.sharding, value.committed
    except AttributeError:
        pass
    if isinstance(value, _ARRAYS):
        sharding = getattr(value, "sharding", None)
        return kind, tuple(value.shape), value.dtype, _is_weak(value), sharding
    return static_key(value)


def as_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """A tuple of names from one name, several or None."""
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def is_in(path: str, names: Iterable[str]) -> bool:
    """Whether an array is one of some arguments, or inside of them.

    Example:
      >>> is_in("batch/x", ["batch"]), is_in("batch/x", ["batch/x"]), is_in("b", ["bc"])
      (True, True, False)
    """
    return any(path == name or path.startswith(f"{name}/") for name in names)


def _argument(name: str, value: Any) -> Argument:
    paths, tree = jax.tree_util.tree_flatten_with_path(value)
    objects = {path[:-1] for path, leaf in paths if isinstance(leaf, Structure)}
    leaves: list[Leaf] = []
    statics: list[tuple[int, StaticValue]] = []
    for index, (path, leaf) in enumerate(paths):
        full = path_name(path, name)
        if isinstance(leaf, _ARRAYS):
            held = bool(objects) and any(path[:n] in objects for n in range(len(path)))
            leaves.append(Leaf(full, leaf, held))
        else:
            statics.append((index, _static(full, leaf)))
    return Argument(name, tree, tuple(leaves), tuple(statics))


def _static(name: str, leaf: Any) -> StaticValue:
    try:
        return StaticValue.of(leaf)
    except TypeError as error:
        if isinstance(leaf, Structure):
            raise ArgumentError(
                f"a static attribute of {name.removesuffix(f'/{STRUCTURE}')!r} cannot "
                "be told from others",
                got=f"{error}, in a {leaf.kind}",
                fix="make it a value that hashes, such as a tuple, or nnx.data(...)",
            ) from None
        raise ArgumentError(
            f"argument {name!r} can be neither traced nor held static",
            got=f"{type(leaf).__name__}, which is no array and has no hash",
            fix="pass an array, or a value that hashes: a number, a string, a tuple, "
            "a frozen dataclass, a function",
        ) from None


def stored_arrays(values: Sequence[Any]) -> list[Any]:
    """Arrays with those that devices hold in the place of tensors."""
    return [v.stored() if isinstance(v, DistTensor) else v for v in values]


def _is_padded(value: Any) -> bool:
    return isinstance(value, DistTensor) and value.is_padded


def _is_weak(value: Any) -> bool:
    return getattr(value, "weak_type", False)


def changed_statics(before: Call, after: Call) -> list[str]:
    """Names of the static leaves whose values differ; empty if anything else does.

    Example:
      >>> first = flatten_args(["x", "rate"], (np.ones(2), 0.1), {})
      >>> second = flatten_args(["x", "rate"], (np.ones(2), 0.2), {})
      >>> changed_statics(first, second)
      ['rate']
    """
    names: list[str] = []
    if (before.positional, before.keywords) != (after.positional, after.keywords):
        return []
    for old, new in zip(before.arguments, after.arguments, strict=True):
        if old.tree != new.tree or old.key()[2] != new.key()[2]:
            return []
        paths = _paths(old)
        for (index, was), (_, now) in zip(old.statics, new.statics, strict=True):
            if was != now:
                names.append(paths[index])
    return names


def _paths(argument: Argument) -> list[str]:
    total = len(argument.leaves) + len(argument.statics)
    tree = jax.tree.unflatten(argument.tree, range(total))
    return list(named_leaves(tree, argument.name))


_mesh_of = functools.lru_cache(maxsize=64)(Mesh.of)
