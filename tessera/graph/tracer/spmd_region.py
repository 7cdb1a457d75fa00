# SPDX-License-Identifier: Apache-2.0
"""``tensor_parallel``: runs a function's body as an SPMD region (``shard_map``).

Annotations say what is split. A dim whose symbol appears in the first array is whole
everywhere; one that does not appear there, such as a layer's output features, is split
over the strategy's axes. The body becomes a ``shard_map`` that is manual over these
axes and leaves the others to the partitioner.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tessera.annotations import Annotation, Dim, bind, bind_call
from tessera.errors import ShardDivisibilityError, StrategyError, nearest_multiples
from tessera.foundations.tree import Skeleton, partition
from tessera.graph.ir import Graph
from tessera.graph.tracer.argument_leaves import Leaf, is_array
from tessera.graph.tracer.arguments import Call
from tessera.graph.tracer.declared_layouts import is_number
from tessera.graph.tracer.strategies import Strategy
from tessera.jax_compat.traces import manual_axes, varying_axes
from tessera.mesh import Mesh
from tessera.ops.operand_layouts import region_mesh
from tessera.shard import ShardSpec, is_tensor
from tessera.tracing import scope
from tessera.tracing.object_arguments import holds_objects, split_result
from tessera.tracing.per_device_checks import check_region


@dataclass(frozen=True)
class Split:
    """The dim of an array that is split, and into how many blocks it is fused.

    Of ``3*D_head*H`` each of the three blocks is split by itself, so that a device
    which divides its part by three has its own share of each.
    """

    dim: int
    blocks: int = 1

    def apart(self, array: Any) -> Any:
        """The array with a dim of its own for the blocks, before the one to split."""
        if self.blocks == 1:
            return array
        shape = list(array.shape)
        shape[self.dim : self.dim + 1] = [self.blocks, shape[self.dim] // self.blocks]
        return array.reshape(shape)

    def together(self, array: Any) -> Any:
        """The inverse of ``apart``."""
        if self.blocks == 1:
            return array
        shape = list(array.shape)
        shape[self.dim : self.dim + 2] = [shape[self.dim] * shape[self.dim + 1]]
        return array.reshape(shape)

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The layout of an array that was taken apart."""
        return PartitionSpec(*(None,) * (self.dim + (self.blocks > 1)), axes)


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Strategy):
    """The strategy, for one function.

    Attributes:
      annotations: Of the function's arguments.
      common: The argument whose dims are whole; by default the first array.
    """

    annotations: Mapping[str, Annotation] = field(default_factory=dict)
    common: str | None = None

    def common_dims(self, dims: Mapping[str, Any]) -> Any:
        """Of the dims of each argument those that are whole; None where there are none.

        Args:
          dims: What is known of the dims of arrays, by path, in the order of the
            arguments.
        """
        return dims.get(self.common or next(iter(dims), ""))

    def with_inferred_roles(self, graph: Graph, call: Call) -> Self:
        """The strategy itself: annotations decide everything."""
        del graph, call
        return self

    def layout(self, leaf: Leaf, mesh: Mesh) -> PartitionSpec:
        """The layout of one array of the arguments: its own, or what the region takes.

        A fused dim stays whole unless the array has a layout of its own: no layout
        of a fused dim gives each device its share of every block.
        """
        if leaf.layout is not None:
            return leaf.layout[1]
        shape = tuple(leaf.aval.shape)
        annotation = self.annotations.get(leaf.name)  # of a whole argument
        names = annotation.names(len(shape)) if annotation is not None else None
        first = self.common_dims(self.annotations)
        if names is None or first is None:
            return PartitionSpec()
        split = split_of(names, first.symbols)
        if split is None or split.blocks > 1:
            return PartitionSpec()
        return ShardSpec((split.dim,), (self.axes,)).resolve(
            shape, mesh, what=f"argument {leaf.name!r}"
        )


def split_of(names: Sequence[str], common: Sequence[str]) -> Split | None:
    """The first dim of an array whose symbols the first array does not have.

    Args:
      names: The dims of the array, as they are annotated.
      common: The symbols of the first array.

    Example:
      >>> split_of(("D", "3*D_head*H"), ("B", "S", "D"))
      Split(dim=1, blocks=3)
    """
    for number, name in enumerate(names):
        symbols = () if name == "..." else Dim(name).symbols
        if symbols and not set(symbols) & set(common):
            return Split(number, Dim(name).coefficient)
    return None


def spmd_function(
    body: Callable[..., Any], strategy: TensorParallel
) -> Callable[..., Any]:
    """A function of global arrays whose body each device runs on its own blocks.

    Raises:
      UnknownAxisError: [T103] (at the call) the mesh lacks one of the axes.
      ShardDivisibilityError: [T201] (at the call) the axes do not divide a dim.
      StrategyError: [T313] (at the call) the annotations do not say what is split.
    """

    @functools.wraps(body)
    def on_blocks(*args: Any, **kwargs: Any) -> Any:
        if set(strategy.axes) <= set(manual_axes()):  # its arguments are blocks
            return scope.resolve_callee(body)(*args, **kwargs)
        mesh = strategy.mesh_here()
        strategy.check_mesh(mesh)
        return _Region(body, strategy, mesh, args, kwargs).run()

    return on_blocks


class _Region:
    """One call of a function as an SPMD region."""

    def __init__(
        self,
        body: Callable[..., Any],
        strategy: TensorParallel,
        mesh: Mesh,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._body, self._strategy, self._mesh = body, strategy, mesh
        self._axes = strategy.axes
        self._name = getattr(body, "__name__", "function")
        self._binding = bind(body, args, kwargs, name=self._name)
        self._signature = inspect.signature(body)
        bound = bind_call(self._signature, args, kwargs, name=self._name)
        for name, value in bound.arguments.items():
            if holds_objects(value):
                raise self._takes_no_object(name, value)
        arguments = dict(bound.arguments)
        arrays, self._rest = partition(arguments, is_array, is_leaf=is_tensor)
        self._arrays = dict(zip(self._rest.names(""), arrays, strict=True))
        first = strategy.common_dims(self._binding.dim_names) or ()
        self._common = [s for n in first if n != "..." for s in Dim(n).symbols]
        self._splits = self._splits_of_arguments()

    def _takes_no_object(self, name: str, value: Any) -> StrategyError:
        return StrategyError(
            f"strategy {self._strategy.name!r} does not know the dims of the arrays in "
            f"{name!r}",
            got=f"a {type(value).__name__}, which no annotation describes",
            fix=f"give {self._name!r} its arrays: kernel: ts.Tensor["
            '"D_in", "D_out"], and layer.kernel[...] in the call',
        )

    def run(self) -> Any:
        """The global results."""
        operands = [
            _apart(split, jnp.asarray(self._arrays[path]))
            for path, split in self._splits.items()
        ]
        found: list[Any] = []

        def probe(*blocks: Any) -> tuple[()]:
            _, *found[:] = self._results(blocks)
            return ()

        def on_blocks(*blocks: Any) -> list[Any]:
            arrays, _, splits = self._results(blocks)
            return list(map(_apart, splits, arrays))

        # shard_map asks for the layouts of results, which only a run of the body shows.
        here = scope.current()
        before = here.snapshot() if here is not None else ()
        check_region(self._mapped(probe, ()), *operands)
        if here is not None:
            here.restore(before)
        skeleton, splits = found
        arrays = self._mapped(on_blocks, self._specs(splits))(*operands)
        return self._restore(skeleton.combine(map(_together, splits, arrays)))

    def _mapped(self, function: Callable[..., Any], out_specs: Any) -> Any:
        """The function under ``shard_map``; a nested one is over the remaining axes."""
        outer = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            function,
            mesh=outer if manual_axes() else region_mesh(self._mesh),
            in_specs=tuple(self._specs(self._splits.values())),
            out_specs=out_specs,
            axis_names=set(self._axes),
        )

    def _specs(self, splits: Iterable[Split | None]) -> list[PartitionSpec]:
        return [s.spec(self._axes) if s else PartitionSpec() for s in splits]

    def _results(
        self, blocks: Sequence[Any]
    ) -> tuple[list[Any], Skeleton, list[Split | None]]:
        """The body's arrays on one device, the rest of its result, and the splits."""
        joined = map(_together, self._splits.values(), blocks)
        arguments = self._rest.combine(joined)
        given = jax.tree.leaves(arguments, is_leaf=is_tensor)
        call = inspect.BoundArguments(self._signature, arguments)
        result = scope.resolve_callee(self._body)(*call.args, **call.kwargs)
        result, self._restore = split_result(result)
        self._refuse_writes(arguments, given)
        found, skeleton = partition(result, is_number, is_leaf=is_tensor)
        arrays = list(map(jnp.asarray, found))
        names = self._binding.result_dim_names(result)
        splits = [
            self._split_of_result(path, array, names.get(path))
            for path, array in zip(skeleton.names("result"), arrays, strict=True)
        ]
        return arrays, skeleton, splits

    def _refuse_writes(self, arguments: Any, given: Sequence[Any]) -> None:
        """Raise [T313] where the body put something into one of its arguments."""
        after = jax.tree.leaves(arguments, is_leaf=is_tensor)
        if len(after) == len(given) and all(map(operator.is_, after, given)):
            return
        raise StrategyError(
            f"{self._name!r} writes into its arguments, which are blocks of one device",
            fix=f"return what is new; strategy {self._strategy.name!r} gives nothing "
            "back to the caller's containers",
        )

    # --- what is split

    def _splits_of_arguments(self) -> dict[str, Split | None]:
        """For each array among the arguments its split dim, or None."""
        names, arrays = self._binding.dim_names, self._arrays
        unknown = [path for path in arrays if arrays[path].ndim and path not in names]
        if unknown:
            raise StrategyError(
                f"strategy {self._strategy.name!r} does not know the dims of "
                f"{', '.join(map(repr, unknown))}",
                got=f"arguments of {self._name!r} without an annotation",
                fix='annotate every array: weight: ts.Tensor["D_in", "D_out"]\n'
                "a dim whose symbol the first array lacks is split, others are not",
            )
        splits = {path: split_of(names.get(path, ()), self._common) for path in arrays}
        if not any(splits.values()):
            raise StrategyError(
                f"strategy {self._strategy.name!r} finds nothing to split in "
                f"{self._name!r}",
                got=", ".join(f"{p}: {' '.join(dims)}" for p, dims in names.items()),
                fix="give a weight a dim whose symbol is not in the first array",
            )
        for path, split in splits.items():
            if split is not None:
                self._check_divides(path, tuple(arrays[path].shape), split)
        return splits

    def _check_divides(self, path: str, shape: tuple[int, ...], split: Split) -> None:
        size = self._mesh.axis_size(self._axes)
        factor, number = size * split.blocks, shape[split.dim]
        if number % factor == 0:
            return
        fused = f" in {split.blocks} blocks" if split.blocks > 1 else ""
        raise ShardDivisibilityError(
            f"argument {path!r} cannot be split evenly over mesh axes {self._axes!r}",
            got=f"shape {shape}, dim {split.dim} = {number}{fused}, axis size {size}",
            fix=f"use {nearest_multiples(factor, number)}, or a smaller axis",
        )

    def _split_of_result(
        self, path: str, block: Any, names: Sequence[str] | None
    ) -> Split | None:
        """How a result is split that differs from device to device."""
        if not varying_axes(block) & set(self._axes):
            return None
        split = split_of(names or (), self._common)
        if split is not None and block.shape[split.dim] % split.blocks == 0:
            return split
        axes = ", ".join(map(repr, self._axes))
        raise StrategyError(
            f"{path!r} of {self._name!r} differs from device to device along {axes}",
            got=f"a block of shape {block.shape}, annotated "
            + (f"with {', '.join(names)}" if names else "with no dims"),
            fix="add the devices' parts up with ts.distributed.all_reduce, or join "
            "them with all_gather\n"
            "or annotate the result with the dim that is split",
        )


def _apart(split: Split | None, array: Any) -> Any:
    return array if split is None else split.apart(array)


def _together(split: Split | None, array: Any) -> Any:
    return array if split is None else split.together(array)
