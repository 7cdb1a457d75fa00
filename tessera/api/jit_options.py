# SPDX-License-Identifier: Apache-2.0
"""The options of ``jax.jit``, as those of a function: by the names of arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tessera.annotations import argument_names
from tessera.compiler.trace.leaves import mesh_of_one_device
from tessera.compiler.trace.static_values import StaticArgument
from tessera.errors import SettingConflictError, SpecFormError, did_you_mean
from tessera.mesh import Mesh

_UNCONSTRAINED: Final = PartitionSpec.UNCONSTRAINED
_VARIADIC: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class StaticArguments:
    """The arguments that a function takes as static values, whatever they are.

    Attributes:
      names: Their names.
      positions: Their positions, where they have one.
    """

    names: frozenset[str] = frozenset()
    positions: frozenset[int] = frozenset()

    @classmethod
    def of(cls, signature: Signature, argnums: Any, argnames: Any) -> "StaticArguments":
        """Those that ``static_argnums`` and ``static_argnames`` select.

        Raises:
          SpecFormError: [T204] there is no such argument.
        """
        names = selected(signature, argnums, argnames, "static")
        count = max([len(signature.parameters), *(i + 1 for i in _listed(argnums))])
        known = enumerate(argument_names(signature, count))
        return cls(names, frozenset(i for i, name in known if name in names))

    def __or__(self, other: "StaticArguments") -> "StaticArguments":
        return StaticArguments(
            self.names | other.names, self.positions | other.positions
        )

    def marked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with the static ones as leaves."""
        positional = [
            StaticArgument(value) if index in self.positions else value
            for index, value in enumerate(args)
        ]
        named = {
            name: StaticArgument(value) if name in self.names else value
            for name, value in kwargs.items()
        }
        return tuple(positional), named


NO_ARGUMENTS: Final = StaticArguments()


@dataclass(frozen=True)
class JitOptions:
    """What the options of ``jax.jit`` declare about a function.

    Attributes:
      mesh: The mesh of its shardings, if they name one.
      in_specs: The layouts of its arguments by name.
      in_spec: The layout of all others.
      out_specs: The layouts of its result.
      static: Its static arguments.
      donate: The names of its donated arguments.
    """

    mesh: Mesh | None
    in_specs: dict[str, Any]
    in_spec: Any
    out_specs: Any
    static: StaticArguments
    donate: frozenset[str]

    @classmethod
    def of(
        cls,
        signature: Signature,
        *,
        in_shardings: Any,
        out_shardings: Any,
        static: tuple[Any, Any],
        donated: tuple[Any, Any],
    ) -> "JitOptions":
        """The options for a function, ``static`` and ``donated`` by number and name.

        Raises:
          SpecFormError: [T204] there is no such argument, or no such layout.
          SettingConflictError: [T507] an argument is static and donated, or shardings
            are of several meshes.
        """
        in_specs, of_arguments = _specs_of(in_shardings, "in_shardings")
        out_specs, of_results = _specs_of(out_shardings, "out_shardings")
        held = StaticArguments.of(signature, *static)
        donate = selected(signature, *donated, "donated")
        if both := sorted(held.names & donate):
            raise SettingConflictError(
                "an argument is both static and donated",
                got=", ".join(map(repr, both)),
                fix="donate arguments that are arrays",
            )
        by_name: dict[str, Any] = {}
        if isinstance(in_specs, (tuple, list)) and not _is_layout(in_specs):
            names = argument_names(signature, len(in_specs))
            by_name, in_specs = dict(zip(names, in_specs, strict=True)), None
        mesh = one_of("mesh", of_arguments, of_results)
        return cls(mesh, by_name, in_specs, out_specs, held, donate)


def one_of(what: str, first: Any, second: Any) -> Any:
    """What either of two options declares.

    Raises:
      SettingConflictError: [T507] both do, and not the same.
    """
    if second is None or first == second:
        return first
    if first is None:
        return second
    raise declared_twice(what, first, second)


def declared_twice(what: str, first: Any, second: Any) -> SettingConflictError:
    """The error for two options that declare the same."""
    return SettingConflictError(
        f"{what} is declared in two ways",
        got=f"{first}, {second}",
        fix="declare it once, by the options of Tessera or by those of jax.jit",
    )


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, (int, str)) else list(value)


def selected(
    signature: Signature, argnums: Any, argnames: Any, what: str
) -> frozenset[str]:
    """The names of arguments by position and by name.

    Args:
      signature: Of the function.
      argnums: One position or several; negative ones count from the end.
      argnames: One name or several.
      what: What the arguments are declared to be, for messages.

    Raises:
      SpecFormError: [T204] there is no such argument.
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    known = [n for n in argument_names(signature, len(kinds)) if "[" not in n]
    takes_more = Parameter.VAR_POSITIONAL in kinds
    names = set(_listed(argnames))
    every = [n for n, p in signature.parameters.items() if p.kind not in _VARIADIC]
    unknown = sorted(names.difference(every))
    if unknown and Parameter.VAR_KEYWORD not in kinds:
        raise SpecFormError(
            f"there is no argument {unknown[0]!r} to be {what}",
            fix=did_you_mean(unknown[0], every),
        )
    for position in _listed(argnums):
        index = position + len(known) if position < 0 else position
        if not 0 <= index < len(known) and not (takes_more and position >= 0):
            raise SpecFormError(
                f"there is no argument {position} to be {what}",
                got=f"arguments {', '.join(known) or 'none'}",
                fix="give the position or the name of one of them",
            )
        names.add(argument_names(signature, index + 1)[index])
    return frozenset(names)


def _specs_of(shardings: Any, what: str) -> tuple[Any, Mesh | None]:
    """The specs in a tree of shardings, and their mesh."""
    meshes: dict[Mesh, None] = {}

    def spec_of(sharding: Any) -> Any:
        spec = getattr(sharding, "spec", sharding)
        if isinstance(spec, PartitionSpec) and _UNCONSTRAINED in spec.partitions:
            raise SpecFormError(
                f"{what} has a dim that is unconstrained",
                got=repr(sharding),
                fix="leave the whole layout out, and constrain the array inside: "
                "jax.lax.with_sharding_constraint",
            )
        if sharding is None or isinstance(sharding, PartitionSpec):
            return sharding
        if isinstance(sharding, SingleDeviceSharding):
            spec, mesh = PartitionSpec(), mesh_of_one_device(sharding)
        elif isinstance(sharding, NamedSharding):
            spec, mesh = sharding.spec, Mesh.of(sharding.mesh)
        else:
            spec, mesh = None, None
        if mesh is None or sharding.memory_kind not in (None, "device"):
            raise SpecFormError(
                f"{what} takes shardings of a mesh or of one device",
                got=repr(sharding),
                fix="give a NamedSharding, a PartitionSpec or a SingleDeviceSharding, "
                "and pass an array of another layout where it lies",
            )
        meshes[mesh] = None
        return spec

    specs = jax.tree.map(spec_of, shardings, is_leaf=_is_layout)
    if len(meshes) > 1:
        raise SettingConflictError(
            f"{what} has shardings of several meshes",
            got=", ".join(mesh.topology for mesh in meshes),
            fix="lay all of them out on one mesh",
        )
    return specs, next(iter(meshes), None)


def _is_layout(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, jax.sharding.Sharding))
