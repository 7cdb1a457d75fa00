# SPDX-License-Identifier: Apache-2.0
"""``op.kernel``: a function that every device runs on its own blocks.

The body is an SPMD region: its arguments are the blocks of one device, and devices
communicate by collectives. The layouts of the arguments say how these are split, and
the axes that a result varies over say how it is assembled.

    @op.kernel
    def gram(x):  # x: this device's rows
        return dist.all_reduce(x.T @ x, axis="dp")
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import BoundArguments, Parameter
from typing import Any, Final, NoReturn, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from tessera.annotations import bind_call, refuse_options
from tessera.errors import (
    AUTO_AXES,
    KernelError,
    MeshConflictError,
    NoMeshError,
    did_you_mean,
)
from tessera.foundations.tree import partition
from tessera.graph.function import Function
from tessera.graph.tracer.argument_leaves import is_array
from tessera.graph.tracer.declared_layouts import Options
from tessera.jax_compat.tracebacks import at_boundary
from tessera.jax_compat.traces import manual_axes, varying_axes
from tessera.mesh import Mesh, opened_or_none
from tessera.ops.operand_layouts import (
    as_array,
    is_traced,
    is_unplaced,
    layout_of,
    region_mesh,
)
from tessera.shard import DistTensor, ShardSpec, capturing, is_tensor
from tessera.tracing import scope
from tessera.tracing.object_arguments import holds_objects
from tessera.tracing.per_device_checks import check_region

# Options of jax.shard_map, which works in a step as well, and what takes their place.
_ELSEWHERE: Final = {
    "mesh": "call the kernel in 'with mesh:', or with arrays that are on it",
    "in_specs": 'declare layouts by name: layouts={"x": P("dp")}',
    "out_specs": "leave it out: a result is split over the axes that it varies over",
}


@overload
def kernel(function: Callable[..., Any], /) -> "Kernel": ...
@overload
def kernel(
    *, layouts: Mapping[str, ShardSpec | PartitionSpec] | None = None
) -> Callable[[Callable[..., Any]], "Kernel"]: ...
def kernel(
    function: Callable[..., Any] | None = None,
    /,
    *,
    layouts: Mapping[str, ShardSpec | PartitionSpec] | None = None,
    **others: Any,
) -> Any:
    """Run a function on every device of the mesh, each on its own blocks.

    Shapes: the body gets per-device blocks, split by each argument's own layout; arrays
    without one are replicated. A result that may vary over mesh axes is split over them
    along its leading dim (a scalar becomes a vector, one entry per device); a result
    that is the same on every device is replicated. Arguments that are not arrays
    (numbers, strings, functions) are constants of the program.

    The mesh is that of the arguments, or else the innermost that is open. A kernel
    that is called in another kernel runs on the blocks there, one in a step becomes
    part of the step's program, and elsewhere it is compiled as a ``ts.function`` is.

    Args:
      function: The body.
      layouts: Layouts by argument name, for arguments without a known layout: values
        that ``jax.jit`` or ``jax.vmap`` traces have none.
      **others: None: those of ``jax.shard_map`` say what takes their place.

    Returns:
      A callable with the signature of the body, from global arrays to global arrays.

    Raises:
      MeshConflictError: [T308] the arguments live on different meshes.
      NoMeshError: [T106] no argument is on a mesh, and none is open.
      KernelError: [T208] an argument whose layout is not known, or a result that is
        not an array.
      ArgumentError: [T301] there is no such option; (outside of a step) a constant that
        is not hashable.
      CollectiveError: [T206] the body reduces gradients that are sums already.
      RandomNumbersError: [T211] devices draw the same numbers for blocks that differ.

    Example:
      >>> from tessera.ops.collectives import all_reduce
      >>> from tessera.shard import tensor
      >>> @kernel
      ... def total(x):
      ...     return all_reduce(x.sum(), axis="dp")
      >>> with Mesh(["dp"], devices=range(4)):
      ...     x = tensor((8, 2), ShardSpec(("row",), ("dp",)), init="ones")
      >>> total(x)
      Array(16., dtype=float32)
    """
    refuse_options(others, kernel, _ELSEWHERE)
    if function is None:
        return functools.partial(Kernel, layouts=layouts)
    return Kernel(function, layouts=layouts)


class Kernel:
    """A function that runs per device. Made by :func:`kernel`."""

    def __init__(
        self,
        function: Callable[..., Any],
        layouts: Mapping[str, ShardSpec | PartitionSpec] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        if layouts is not None and not isinstance(layouts, Mapping):
            raise KernelError(
                "a kernel takes layouts by the names of arguments",
                got=f"{layouts!r}",
                fix='write layouts={"x": P("dp")}',
            )
        self._layouts = {
            name: ShardSpec.of(layout, f"argument {name!r}")
            for name, layout in dict(layouts or {}).items()
        }
        self._alone = self._compiled()
        for name in self._layouts:
            if name not in self._signature.parameters:
                raise KernelError(
                    f"a layout is given for {name!r}, which is no argument",
                    got=f"{getattr(function, '__name__', 'kernel')}{self._signature}",
                    fix=did_you_mean(name, self._signature.parameters),
                )

    @at_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body on every device; arguments and results are global arrays."""
        if manual_axes():
            return scope.resolve_callee(self._function)(*args, **kwargs)
        bound = bind_call(self._signature, args, kwargs, name=self._name)
        bound.apply_defaults()
        self._refuse_objects(bound.arguments)
        named, _ = jax.tree.flatten_with_path(bound.arguments, is_leaf=is_tensor)
        arrays = [_Leaf(path, x) for path, x in named if is_array(x)]
        self._check_visible(arrays)
        mesh = _one_mesh(arrays)
        specs = tuple(self._spec_of(leaf, mesh) for leaf in arrays)
        if scope.current() is None and not is_traced(*(leaf.value for leaf in arrays)):
            with mesh:
                return self._alone(specs, *bound.args, **bound.kwargs)
        return self._on_blocks(mesh, specs, bound)

    def _on_blocks(
        self, mesh: Mesh, specs: Sequence[PartitionSpec], bound: BoundArguments
    ) -> Any:
        """The results on all devices, with their layouts recorded."""
        arrays, rest = partition(bound.arguments, is_array, is_leaf=is_tensor)
        values = list(map(as_array, arrays))

        def body(*blocks: jax.Array) -> Any:
            call = BoundArguments(self._signature, rest.combine(blocks))
            with capturing(_refuse_closure):
                function = scope.resolve_callee(self._function)
                result = function(*call.args, **call.kwargs)
            self._refuse_objects({"result": result})
            return result

        return _mapped(body, mesh, tuple(specs), values)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "kernel")

    def _compiled(self) -> Function:
        """The kernel as a function, for calls that are no part of a step.

        The layouts are an argument, for under ``jax.grad`` only the call knows them.
        There are no annotations: those of the body are for blocks.
        """

        def part_of_step(specs: Any, *args: Any, **kwargs: Any) -> Any:
            mesh, bound = opened_or_none(), self._signature.bind(*args, **kwargs)
            assert mesh is not None, "the call opens its mesh"
            return self._on_blocks(mesh, specs, bound)

        first = Parameter("_layouts_of_arguments", Parameter.POSITIONAL_ONLY)
        parameters = [first, *self._signature.parameters.values()]
        part: Any = part_of_step
        part.__name__, part.__signature__ = self._name, inspect.Signature(parameters)
        return Function(part, Options(name=self._name))

    def _spec_of(self, leaf: "_Leaf", mesh: Mesh) -> PartitionSpec:
        what = f"argument {leaf.name!r}"
        if leaf.parameter in self._layouts:
            declared = self._layouts[leaf.parameter]
            return declared.resolve(leaf.value.shape, mesh, what=what)
        layout = layout_of(leaf.value)
        return PartitionSpec() if layout is None else layout[1]

    def _refuse_objects(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if holds_objects(value):
                raise KernelError(
                    f"a kernel is for arrays, and {name!r} holds NNX objects",
                    got=f"a {type(value).__name__}",
                    fix="pass its arrays: layer.kernel[...]",
                )

    def _check_visible(self, arrays: list["_Leaf"]) -> None:
        for leaf in arrays:
            if leaf.parameter in self._layouts or not is_unplaced(leaf.value):
                continue
            why, also = _HIDDEN if scope.current() is None else _COMPUTED
            raise KernelError(
                f"a kernel does not know the layout of argument {leaf.name!r}",
                got=f"{jax.typeof(leaf.value)}, {why}",
                fix=f"declare it: @op.kernel(layouts={{{leaf.parameter!r}: "
                f"dist.ShardSpec(...)}}), or dist.ShardSpec.replicated()\n{also}",
            )


_HIDDEN = (
    "traced by a transformation that hides layouts",
    "or compile with ts.jit, which keeps the layouts of its arguments",
)
_COMPUTED = (
    "computed in a step that leaves its layout to the compiler",
    "or pass an argument of the step, a dist.tensor, or the result of a kernel",
)


@dataclass(frozen=True)
class _Leaf:
    """One array among a call's arguments, and its path."""

    path: tuple[Any, ...]
    value: Any

    @property
    def parameter(self) -> str:
        """The parameter of the function that it belongs to."""
        return self.path[0].key

    @property
    def name(self) -> str:
        """The leaf as it is written in Python: ``params['w']``."""
        return self.parameter + jax.tree_util.keystr(self.path[1:])


def _one_mesh(arrays: list[_Leaf]) -> Mesh:
    """The mesh of the arguments, or else the current one."""
    meshes: dict[Mesh, list[str]] = {}
    for leaf in arrays:
        if (layout := layout_of(leaf.value)) is not None:
            meshes.setdefault(layout[0], []).append(leaf.name)
    if len(meshes) > 1:
        raise MeshConflictError(
            "the arguments of a kernel live on different meshes",
            got="\n".join(f"{', '.join(names)}: {m}" for m, names in meshes.items()),
            fix="put them on one mesh, with jax.device_put or mesh="
            + (f"\n{AUTO_AXES}" if any(m.explicit_axes for m in meshes) else ""),
        )
    mesh = next(iter(meshes), None) or opened_or_none()
    if mesh is None:
        names = ", ".join(leaf.name for leaf in arrays)
        raise NoMeshError(
            "a kernel needs a mesh, and no argument is on one",
            got=f"arguments {names}" if names else "no array arguments",
            fix="call it inside 'with mesh:', or pass arrays that have a layout",
        )
    return mesh


def _mapped(
    body: Callable[..., Any],
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
    values: Sequence[Any],
) -> Any:
    """The results on all devices, with their layouts recorded."""
    region = region_mesh(mesh, explicit=True)
    if mesh.explicit_axes:  # over these JAX does not reshard by itself
        pairs = zip(values, specs, strict=True)
        values = [scope.constrain(value, mesh, spec) for value, spec in pairs]
    tree, results = _results_of(body, mesh, region, specs, values)

    def on_blocks(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        leaves = [_as_array(leaf) for leaf in jax.tree.leaves(body(*blocks))]
        # A scalar that varies has no dim to split: it becomes a vector of one entry.
        return tuple(
            leaf.reshape(1) if leaf.ndim == 0 and spec else leaf
            for leaf, spec in zip(leaves, results, strict=True)
        )

    mapped = jax.shard_map(on_blocks, mesh=region, in_specs=specs, out_specs=results)
    leaves = mapped(*values)
    for leaf, spec in zip(leaves, results, strict=True):
        scope.record_layout(leaf, mesh, spec)
    return jax.tree.unflatten(tree, leaves)


def _results_of(
    body: Callable[..., Any],
    mesh: Mesh,
    region: JaxMesh | AbstractMesh,
    specs: tuple[PartitionSpec, ...],
    values: Sequence[Any],
) -> tuple[Any, tuple[PartitionSpec, ...]]:
    """The tree of the body's results and their layouts, from an abstract trace.

    JAX needs the layouts of results before it traces a region, but only the trace shows
    which axes they vary over: the first trace returns nothing and records them.
    """
    recorded: list[Any] = []

    def record(*blocks: jax.Array) -> tuple[()]:
        leaves, tree = jax.tree.flatten(body(*blocks))
        varying = [varying_axes(_as_array(leaf)) for leaf in leaves]
        recorded.append((tree, tuple(_over(mesh, axes) for axes in varying)))
        return ()

    check_region(
        jax.shard_map(record, mesh=region, in_specs=specs, out_specs=()), *values
    )
    return recorded[-1]


def _over(mesh: Mesh, axes: frozenset[str]) -> PartitionSpec:
    """The leading dim split over some axes, in the order of the mesh."""
    named = tuple(axis for axis in mesh.axes if axis in axes)
    if not named:
        return PartitionSpec()
    return PartitionSpec(named if len(named) > 1 else named[0])


def _as_array(leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise KernelError(
            "a kernel returns something that is not an array",
            got=f"{leaf!r}, of type {type(leaf).__name__}",
            fix="return arrays or numbers, or trees of them",
        ) from None


def _refuse_closure(tensor: DistTensor) -> NoReturn:
    raise KernelError(
        f"a kernel closes over {tensor.described}, so it gets no block of it",
        got=f"{tensor!r}",
        fix="pass it as an argument: every device gets its block",
    )
