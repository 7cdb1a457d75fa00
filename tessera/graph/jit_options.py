# SPDX-License-Identifier: Apache-2.0
"""Options as ``ts.function`` and ``jax.jit`` take them, by the names of arguments."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tessera.annotations import argument_names
from tessera.errors import SettingConflictError, SpecFormError, did_you_mean
from tessera.graph.tracer.argument_leaves import mesh_of_one_device
from tessera.graph.tracer.declared_layouts import UNDECLARED, Options
from tessera.graph.tracer.static_values import StaticArgument
from tessera.mesh import AnyMesh, Mesh, as_mesh
from tessera.shard_spec import ShardSpec, spec_on
from tessera.tracing.object_arguments import is_object

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
        count = max([len(signature.parameters), *(i + 1 for i in listed(argnums))])
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


def declared_options(
    name: str,
    signature: Signature,
    mesh: AnyMesh | None,
    *,
    in_specs: tuple[str, Any],
    out_specs: tuple[str, Any],
    static: tuple[Any, Any] = ((), ()),
    donated: tuple[Any, Any] = ((), ()),
) -> tuple[Options, StaticArguments]:
    """The options for a function, and its static arguments.

    Args:
      name: What the function is called.
      signature: Of the function.
      mesh: The mesh to run on; None is that of the shardings, if they name one.
      in_specs: What the layouts of its arguments are declared by, and they: one for
        all, a tuple by position, or a dict by name.
      out_specs: The same of its result, a tree.
      static: Arguments that are static, by number and name.
      donated: Arguments that are donated, by number and name.

    Raises:
      SpecFormError: [T204] there is no such argument, or no such layout.
      SettingConflictError: [T507] an argument is static and donated, or shardings
        are of several meshes, or of another one than the declared one.
    """
    declared = [(what, _named(layouts)) for what, layouts in (in_specs, out_specs)]
    for what, layouts in declared:
        _check_layouts(what, layouts)
    own = _mesh_of([layouts for _, layouts in declared])
    ins, outs = (_specs_on(own, layouts) for _, layouts in declared)
    held = StaticArguments.of(signature, *static)
    donate = selected(signature, *donated, "donated")
    if both := sorted(held.names & donate):
        raise SettingConflictError(
            "an argument is both static and donated",
            got=", ".join(map(repr, both)),
            fix="donate arguments that are arrays",
        )
    by_name, in_spec = _by_name(in_specs[0], signature, ins, held.positions)
    options = Options(
        name=name,
        mesh=one_of("mesh", as_mesh(mesh), own),
        in_specs=by_name,
        in_spec=in_spec,
        out_specs=outs,
        donate=donate,
    )
    return options, held


def one_of(what: str, first: Any, second: Any) -> Any:
    """What either of two options declares.

    Raises:
      SettingConflictError: [T507] both do, and not the same.
    """
    if second is None or first == second:
        return first
    if first is None:
        return second
    raise SettingConflictError(
        f"{what} is declared in two ways",
        got=f"{first}, {second}",
        fix="declare it once, by the options of Tessera or by those of jax.jit",
    )


def by_either_name(which: str, specs: Any, shardings: Any) -> tuple[str, Any]:
    """The layouts that are declared by one of two options, and which one it is."""
    if specs is None:
        return f"{which}_shardings", shardings
    return f"{which}_specs", one_of(f"{which}_specs", specs, shardings)


def listed(value: Any) -> list[Any]:
    """One value or several, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, (int, str)) else list(value)


def selected(
    signature: Signature, argnums: Any, argnames: Any, what: str
) -> frozenset[str]:
    """The names of arguments by position and by name.

    Args:
      signature: Of the function.
      argnums: One position or name, or several; negative positions count from the end.
      argnames: The same.
      what: What the arguments are declared to be, for messages.

    Raises:
      SpecFormError: [T204] there is no such argument.
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    known = [n for n in argument_names(signature, len(kinds)) if "[" not in n]
    takes_more = Parameter.VAR_POSITIONAL in kinds
    given = [*listed(argnums), *listed(argnames)]
    names = {name for name in given if isinstance(name, str)}
    every = [n for n, p in signature.parameters.items() if p.kind not in _VARIADIC]
    of_rest = {name for name in names if takes_more and name.startswith("args[")}
    unknown = sorted(names.difference(every, of_rest))
    if unknown and Parameter.VAR_KEYWORD not in kinds:
        raise SpecFormError(
            f"there is no argument {unknown[0]!r} to be {what}",
            fix=did_you_mean(unknown[0], every),
        )
    for position in (place for place in given if not isinstance(place, str)):
        index = position + len(known) if position < 0 else position
        if not 0 <= index < len(known) and not (takes_more and position >= 0):
            raise SpecFormError(
                f"there is no argument {position} to be {what}",
                got=f"arguments {', '.join(known) or 'none'}",
                fix="give the position or the name of one of them",
            )
        names.add(argument_names(signature, index + 1)[index])
    return frozenset(names)


def _by_name(
    what: str, signature: Signature, layouts: Any, static: Collection[int]
) -> tuple[dict[str, Any], Any]:
    """The layouts of arguments by name, and that of all others.

    Raises:
      SpecFormError: [T204] there are more or fewer than arguments.
    """
    if _is_layout(layouts):
        return {}, layouts
    if isinstance(layouts, Mapping):
        return dict(layouts), None
    if not isinstance(layouts, (tuple, list)):
        raise SpecFormError(
            f"{what} is one layout, a tuple of them by position, or a dict by name",
            got=f"a {type(layouts).__name__}",
            fix=f"put the tree of one argument into a tuple: {what}=(tree,)",
        )
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    count = sum(kind not in (*_VARIADIC, Parameter.KEYWORD_ONLY) for kind in kinds)
    if Parameter.VAR_POSITIONAL in kinds:
        count = max(count, len(layouts) + len(static))
    every = argument_names(signature, count)
    names = [name for index, name in enumerate(every) if index not in static]
    defaults = {n for n, p in signature.parameters.items() if p.default is not p.empty}
    needed = [n for n in names if n not in defaults and n in signature.parameters]
    if not len(needed) <= len(layouts) <= len(names):
        raise SpecFormError(
            f"{what} has not one layout for each argument",
            got=f"{len(layouts)} layouts, arguments {', '.join(names) or 'none'}"
            + (" (without the static ones)" if static else ""),
            fix="give None for an argument without one, or a dict by name: "
            f"{what}={{{(names or ['x'])[0]!r}: {layouts[0] if layouts else None}}}",
        )
    by_name = dict(zip(names, layouts, strict=False))
    return by_name, UNDECLARED if layouts else None


def _named(layouts: Any) -> Any:
    """Layouts with a mesh of its own for that of one device."""

    def named(layout: Any) -> Any:
        if is_object(layout):  # nnx.get_partition_spec gives them in variables
            layout = layout.get_raw_value()
        if not isinstance(layout, SingleDeviceSharding):
            return layout
        mesh, kind = mesh_of_one_device(layout).jax, layout.memory_kind
        return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)

    def is_leaf(node: Any) -> bool:
        return _is_layout(node) or is_object(node)

    return jax.tree.map(named, layouts, is_leaf=is_leaf)


def _check_layouts(what: str, layouts: Any) -> None:
    for sharding in jax.tree.leaves(layouts, is_leaf=_is_layout):
        spec = getattr(sharding, "spec", sharding)
        if isinstance(spec, PartitionSpec) and _UNCONSTRAINED in spec.partitions:
            raise SpecFormError(
                f"{what} has a dim that is unconstrained",
                got=repr(sharding),
                fix="leave the whole layout out, and constrain the array inside: "
                "jax.lax.with_sharding_constraint",
            )
        if sharding is None or isinstance(sharding, (ShardSpec, PartitionSpec)):
            continue
        is_named = isinstance(sharding, NamedSharding)
        if not is_named or sharding.memory_kind not in (None, "device"):
            raise SpecFormError(
                f"{what} takes layouts on a mesh or on one device",
                got=repr(sharding),
                fix='give a PartitionSpec, such as P("dp"), a dist.ShardSpec, a '
                "NamedSharding or a SingleDeviceSharding\n"
                "and pass an array of another layout where it lies",
            )


def _mesh_of(shardings: Any) -> Mesh | None:
    """The first mesh of some checked shardings that has axes for all of them."""
    leaves = jax.tree.leaves(shardings, is_leaf=_is_layout)
    named = [leaf for leaf in leaves if isinstance(leaf, NamedSharding)]
    meshes = list(dict.fromkeys(Mesh.of(sharding.mesh) for sharding in named))
    for mesh in meshes:
        if None not in [spec_on(s.spec, Mesh.of(s.mesh), mesh) for s in named]:
            return mesh
    if not meshes:
        return None
    raise SettingConflictError(
        "in_shardings and out_shardings are of several meshes",
        got=", ".join(
            f"{mesh.topology} of devices {mesh.device_ids}" for mesh in meshes
        ),
        fix="lay all of them out on one mesh",
    )


def _specs_on(mesh: Mesh | None, shardings: Any) -> Any:
    """The specs in a tree of shardings, by the axes of one mesh."""

    def spec(sharding: Any) -> Any:
        if mesh is None or not isinstance(sharding, NamedSharding):
            return sharding
        return spec_on(sharding.spec, Mesh.of(sharding.mesh), mesh)

    return jax.tree.map(spec, shardings, is_leaf=_is_layout)


def _is_layout(node: Any) -> bool:
    kinds = (ShardSpec, PartitionSpec, jax.sharding.Sharding)
    return node is None or isinstance(node, kinds)
