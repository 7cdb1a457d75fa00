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
from tessera.annotations import Binding, bind, check_call, hints_of
from tessera.compiler.trace.static_values import (
    ATOMS,
    StaticArgument,
    StaticValue,
    static_key,
)
from tessera.errors import ArgumentError, LayoutMismatchError
from tessera.mesh import Mesh
from tessera.object_arguments import STRUCTURE, Structure
from tessera.shard import ARRAYS, DistTensor
from tessera.shard_spec import axes_of_dims, spec_of_axes
from tessera.tree import Skeleton, is_childless, path_name

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
      of_trace: Whether JAX is tracing it, so that its values are unknown.
    """

    name: str
    value: Any
    of_object: bool = False
    of_trace: bool = False

    @property
    def layout(self) -> tuple[Mesh, PartitionSpec] | None:
        """The mesh and spec that the array itself carries, if it carries any.

        An array that is committed to one device lives on a mesh of that device.
        """
        if isinstance(self.value, DistTensor):
            mesh = self.value.mesh
            return None if mesh is None else (mesh, self.value.spec)
        if isinstance(self.value, _jax.Tracer):
            return None
        sharding = getattr(self.value, "sharding", None)
        if isinstance(sharding, NamedSharding):
            spec, mesh = sharding.spec, _mesh_of(sharding.mesh)
            if spec.unreduced or spec.reduced:
                return mesh, spec
            return mesh, spec_of_axes(axes_of_dims(spec, len(self.value.shape)))
        if isinstance(sharding, SingleDeviceSharding) and self._is_committed:
            (device,) = sharding.device_set
            return Mesh((ONE_DEVICE,), devices=(device.id,)), PartitionSpec()
        if sharding is not None and len(sharding.device_set) > 1:
            raise LayoutMismatchError(
                f"{self.name!r} lies on several devices, and its layout names no mesh",
                got=str(sharding),
                fix="move it first: jax.device_put(x, NamedSharding(mesh, spec))",
            )
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
        varies = _jax.varying_axes(self.value) if self.of_trace else None
        location = (self.layout, _jax.on_host(self.value), varies)
        return (shape, dtype, self.is_weak, *location)

    @property
    def may_be_padded(self) -> bool:
        """Whether it can have an uneven layout: a tensor, or a traced value."""
        return isinstance(self.value, DistTensor) or self.of_trace

    def abstract(self) -> "Leaf":
        """The same leaf without its data, which a program must not keep alive."""
        if _is_padded(self.value):
            return Leaf(self.name, self.value.declaration())
        if isinstance(self.value, jax.ShapeDtypeStruct):
            is_of_now = _jax.canonical_dtype(self.aval.dtype) == self.aval.dtype
            return self if is_of_now else self._struct(self.value.sharding)
        if not isinstance(self.value, (jax.Array, np.ndarray)):
            return self
        if self.of_trace:
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
            _jax.canonical_dtype(self.aval.dtype),
            sharding=sharding,
            weak_type=self.is_weak,
        )
        return replace(self, value=struct)


@dataclass(frozen=True)
class Argument:
    """One argument of a call.

    Attributes:
      name: Its name.
      tree: Its tree.
      leaves: Its arrays.
      statics: Its other leaves, by position.
      leaf_names: The names of all its leaves.
      paths: These, and the names of what has no leaves: None, or an empty dict.
    """

    name: str
    tree: Any
    leaves: tuple[Leaf, ...]
    statics: tuple[tuple[int, StaticValue], ...]
    leaf_names: tuple[str, ...]
    paths: tuple[str, ...]

    @property
    def structure(self) -> Structure | None:
        """The static part of an NNX object, where the argument is one."""
        own = f"{self.name}/{STRUCTURE}"
        for index, static in self.statics:
            if self.leaf_names[index] == own and isinstance(static.value, Structure):
                return static.value
        return None

    @property
    def array_names(self) -> list[str]:
        """The last part of the names of the arrays of an object, and its structure."""
        return [name.removeprefix(f"{self.name}/") for name in self.leaf_names]

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

    def check_values(self) -> None:
        """Check that a program can run on the arrays.

        Raises:
          ArgumentError: [T301] one is a shape.
          jax.errors.UnexpectedTracerError: One was traced, and its trace has ended.
        """
        for leaf in self.leaves:
            if isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise ArgumentError(
                    f"argument {leaf.name!r} has no values",
                    got=f"{leaf.value}",
                    fix="pass an array; a shape is for trace, lower and compile",
                )
            if leaf.of_trace:
                raise _jax.escaped_tracer_error(leaf.value)

    def bound_to(
        self, function: Callable[..., Any], name: str, *, check: bool = True
    ) -> Binding:
        """The call as the annotations of a function describe it.

        Args:
          function: The function.
          name: Its name in messages.
          check: False only collects the names of dims.

        Raises:
          ArgumentError: [T301] the function does not take these arguments.
          AnnotationError: [T315] they do not fit its annotations.
        """
        check_call(function, self.positional, self.keywords, name=name)
        if not hints_of(function):  # a tree may refuse anything but its arrays
            return Binding(name)
        args, kwargs = self.rebuilt([leaf.value for leaf in self.leaves])
        return bind(function, args, kwargs, name=name, check=check)

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
      names: What the function calls its positional arguments, for messages and for
        the graph.
      args: Positional arguments.
      kwargs: Keyword arguments.

    Raises:
      ArgumentError: [T301] a leaf is neither an array nor hashable.
    """
    keywords = tuple(sorted(kwargs))  # in any order it is the same call
    named = zip((*names, *keywords), values_of(args, kwargs), strict=True)
    arguments = tuple(_argument(name, value) for name, value in named)
    return Call(len(args), keywords, arguments)


def values_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments in one list, keyword arguments sorted by name."""
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def check_same_types(expected: Call, call: Call) -> None:
    """Raise [T301] where a program for one call cannot run for another one."""

    def form(call: Call) -> dict[str, Any]:
        found: dict[str, Any] = {"": (call.positional, call.keywords)}
        for argument in call.arguments:
            found[argument.name] = argument.tree
            found |= {leaf.name: _type_text(leaf) for leaf in argument.leaves}
            for index, static in argument.statics:
                found[argument.leaf_names[index]] = static
        return found

    before, now = form(expected), form(call)
    for name in before | now:
        if before.get(name) != now.get(name):
            raise ArgumentError(
                "a compiled program is called with other arguments",
                got=f"{name or 'arguments'}: {_text(now.get(name))}, compiled for "
                f"{_text(before.get(name))}",
                fix="call the function itself, which compiles for what it is given",
            )


def _type_text(leaf: Leaf) -> str:
    shape = ",".join(map(str, leaf.aval.shape))
    return f"{leaf.aval.dtype}[{shape}]"


def _text(form: Any) -> str:
    return repr(form.value) if isinstance(form, StaticValue) else str(form)


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
    nodes = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_childless)
    objects = {path[:-1] for path, leaf in paths if isinstance(leaf, Structure)}
    leaves: list[Leaf] = []
    statics: list[tuple[int, StaticValue]] = []
    for index, (path, leaf) in enumerate(paths):
        full = path_name(path, name)
        if isinstance(leaf, jax.core.ShapedArray):
            leaf = _jax.struct(leaf)
        if isinstance(leaf, _ARRAYS):
            held = bool(objects) and any(path[:n] in objects for n in range(len(path)))
            leaves.append(Leaf(full, leaf, held, isinstance(leaf, _jax.Tracer)))
        else:
            statics.append((index, _static(full, leaf)))
    return Argument(
        name,
        tree,
        tuple(leaves),
        tuple(statics),
        leaf_names=tuple(path_name(path, name) for path, _ in paths),
        paths=tuple(path_name(path, name) for path, _ in nodes),
    )


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
            got=f"{_kind_of(leaf)}, which is no array and has no hash",
            fix="pass an array, or a value that hashes: a number, a string, a tuple, "
            "a frozen dataclass, a function",
        ) from None


def _kind_of(leaf: Any) -> str:
    value = leaf.value if isinstance(leaf, StaticArgument) else leaf
    return type(value).__name__


def is_stored(value: Any) -> bool:
    """Whether a program takes an array as it is.

    It takes the stored array of a tensor, and one of 64 bits that was made while x64
    was enabled as JAX itself does: in the dtype that it has now.
    """
    if isinstance(value, DistTensor):
        return False
    return not isinstance(value, jax.Array) or (
        value.dtype == _jax.canonical_dtype(value.dtype)
    )


def stored_arrays(values: Sequence[Any]) -> list[Any]:
    """Arrays as programs take them."""
    return [v if is_stored(v) else _stored(v) for v in values]


def _stored(value: Any) -> Any:
    if isinstance(value, DistTensor):
        return value.stored()
    return value.astype(_jax.canonical_dtype(value.dtype))


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
        for (index, was), (_, now) in zip(old.statics, new.statics, strict=True):
            if was != now:
                names.append(old.leaf_names[index])
    return names


_mesh_of = functools.lru_cache(maxsize=64)(Mesh.of)
