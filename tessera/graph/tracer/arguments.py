# SPDX-License-Identifier: Apache-2.0
"""Flattens the arguments of a call into arrays, which are traced, and static values.

Arrays are traced. Python scalars, strings, callables and everything else is static, by
value: another value is another program.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import jax
from jax.sharding import (
    NamedSharding,
)

from tessera.annotations import Binding, bind, check_call, hints_of
from tessera.errors import ArgumentError
from tessera.foundations.tree import Skeleton, is_childless, path_name
from tessera.graph.tracer.argument_leaves import TRACED, Leaf, stored_arrays
from tessera.graph.tracer.static_values import (
    StaticArgument,
    StaticValue,
)
from tessera.jax_compat import jaxprs, traces
from tessera.mesh import Mesh
from tessera.tracing.object_arguments import STRUCTURE, Structure


class ProgramMismatch(Exception):
    """A call does not fit a program."""


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

    @property
    def static_argument(self) -> StaticArgument | None:
        """The argument as it was declared to be static, if it was."""
        for _, static in self.statics:
            if static.is_argument:
                return StaticArgument(static.value)
        return None

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
          ArgumentError: [T301] one is a shape, or was donated.
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
                raise traces.escaped_tracer_error(leaf.value)
            if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
                raise ArgumentError(
                    f"argument {leaf.name!r} is deleted: an earlier call took over its "
                    "memory",
                    got="donate=, donate_argnums= or x.delete()",
                    fix="pass what that call returned: state = step(state, batch)",
                )

    def with_static_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of another call, with this one's static arguments."""
        rest, positional = iter(args), list[Any]()
        for argument in self.arguments[: self.positional]:
            static = argument.static_argument
            positional += itertools.islice(rest, 1) if static is None else [static]
        named = {a.name: a.static_argument for a in self.arguments[self.positional :]}
        named = {name: static for name, static in named.items() if static is not None}
        return (*positional, *rest), named | dict(kwargs)

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

    def on_mesh(self, mesh: Mesh | None) -> "Call":
        """The call with its layouts by the axes of a mesh."""
        return self._mapped(lambda leaf: leaf.on_mesh(mesh))

    def abstract(self) -> "Call":
        """The same call without the data of its arrays."""
        return self._mapped(Leaf.abstract)

    def _mapped(self, change: Callable[[Leaf], Leaf]) -> "Call":
        arguments = [
            replace(argument, leaves=tuple(map(change, argument.leaves)))
            for argument in self.arguments
        ]
        return replace(self, arguments=tuple(arguments))

    def by_argument(self, entries: Iterable[Any]) -> list[list[Any]]:
        """What there is for each array of the call, in one part for each argument."""
        rest = iter(entries)
        return [[*itertools.islice(rest, len(a.leaves))] for a in self.arguments]

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other arrays in place."""
        parts = zip(self.arguments, self.by_argument(arrays), strict=True)
        values = [argument.rebuilt(part) for argument, part in parts]
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
    before, now = _forms(expected), _forms(call)
    for name in before | now:
        if before.get(name) != now.get(name):
            was, here = _text(before.get(name)), _text(now.get(name))
            raise ArgumentError(
                "a compiled program is called with other arguments",
                got=f"{name}: {here}, compiled for {was}",
                fix="call the function itself, which compiles for what it is given",
            )


def _forms(call: Call) -> dict[str, Any]:
    """Trees of arguments, types of arrays and static values of a call, by name."""
    found: dict[str, Any] = {"arguments": (call.positional, call.keywords)}
    for argument in call.arguments:
        found[argument.name] = argument.tree
        for leaf in argument.leaves:
            shape = ",".join(map(str, leaf.aval.shape))
            found[leaf.name] = f"{leaf.aval.dtype}[{shape}]"
        for index, static in argument.statics:
            found[argument.leaf_names[index]] = static
    return found


def _text(form: Any) -> str:
    return repr(form.value) if isinstance(form, StaticValue) else str(form)


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
            leaf = jaxprs.struct(leaf)
        if isinstance(leaf, TRACED):
            held = bool(objects) and any(path[:n] in objects for n in range(len(path)))
            reference = jax.typeof(leaf) if isinstance(leaf, jax.Ref) else None
            of_trace = isinstance(leaf, jaxprs.Tracer)
            leaves.append(Leaf(full, leaf, held, of_trace, reference))
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
            "a frozen dataclass, a function"
            + "\nor register it, so that its arrays are traced: "
            "jax.tree_util.register_dataclass" * is_dataclass(leaf),
        ) from None


def _kind_of(leaf: Any) -> str:
    value = leaf.value if isinstance(leaf, StaticArgument) else leaf
    return type(value).__name__
