# SPDX-License-Identifier: Apache-2.0
"""What the parameters of JAX's primitives say, by meaning.

JAX names these parameters for itself, and renames them between versions. No other room
reads them; a test in ``tests/jax_compat/test_only_door.py`` looks for that.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec, Sharding

from tessera.jax_compat import jaxprs
from tessera.jax_compat.jaxprs import Equation, Program

Dims: TypeAlias = tuple[int, ...]

# Parameters with the one dim that a primitive works along.
_ALONG: Final = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "top_k": "axis",
    "concatenate": "dimension",
    "split": "axis",
    "iota": "dimension",
}

ALONG_ONE_DIM: Final = frozenset(_ALONG)
"""Primitives whose results depend on several entries along one dim."""

# Parameters with sizes of results.
_SIZES: Final = frozenset(
    ("shape", "new_sizes", "limit_indices", "slice_sizes", "sizes")
)


# --- calls, loops, branches and SPMD regions


class WhileLoop(NamedTuple):
    """A ``while`` loop: its programs take their constants, then what is carried."""

    condition: Program
    body: Program
    num_condition_constants: int
    num_body_constants: int


class Region(NamedTuple):
    """What ``shard_map`` was called with; ``axes`` are those that it makes manual."""

    mesh: Any
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    axes: frozenset[str]
    check_vma: bool

    @property
    def num_devices(self) -> int:
        """How many devices run the body."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


def body(equation: Equation) -> Program:
    """The program that a ``jit``, a ``scan`` or an SPMD region runs."""
    return equation.params["jaxpr"]


def branches(equation: Equation) -> tuple[Program, ...]:
    """The programs of a ``cond`` or a ``switch``; the first operand chooses one."""
    return equation.params["branches"]


def while_loop(equation: Equation) -> WhileLoop:
    """The two programs of a ``while`` loop, and the numbers of their constants."""
    params = equation.params
    return WhileLoop(
        params["cond_jaxpr"],
        params["body_jaxpr"],
        params["cond_nconsts"],
        params["body_nconsts"],
    )


def scan_length(equation: Equation) -> int | None:
    """How often a ``scan`` runs its body; None of another equation."""
    return equation.params["length"] if equation.primitive.name == "scan" else None


def scan_options(equation: Equation) -> dict[str, Any]:
    """What ``jax.lax.scan`` takes beside its body and arrays."""
    return {name: equation.params[name] for name in ("length", "reverse", "unroll")}


def region(equation: Equation) -> Region:
    """The arguments of a ``shard_map``."""
    params = equation.params
    return Region(
        params["mesh"],
        tuple(params["in_specs"]),
        tuple(params["out_specs"]),
        frozenset(params["newly_manual_axes"]),
        params["check_vma"],
    )


def bind_region(
    equation: Equation,
    values: Sequence[Any],
    body: Callable[..., Sequence[Any]],
    mesh: Any = None,
) -> list[Any]:
    """Apply an SPMD region with another body of the same type, or on another mesh.

    Args:
      equation: The region.
      values: Its operands.
      body: Takes the blocks of one device.
      mesh: One around it, some of whose axes may be manual; None for the region's own.
    """
    own = region(equation)
    mesh = own.mesh if mesh is None else mesh

    def on_blocks(*blocks: Any) -> tuple[Any, ...]:
        return tuple(body(*blocks))

    mapped = jax.shard_map(
        on_blocks,
        mesh=mesh,
        in_specs=own.in_specs,
        out_specs=own.out_specs,
        check_vma=own.check_vma,
        axis_names=own.axes - set(mesh.manual_axes),
    )
    with jaxprs.source_context(equation):
        return list(mapped(*values))


def calls_with_operands(equation: Equation) -> Iterator[tuple[Program, list[Any]]]:
    """The programs in an equation, each with the operands of its first call.

    Programs that take something else, such as the blocks of a kernel, are left out.
    """
    operands, carried = list(equation.invars), len(equation.outvars)
    for name, inner in jaxprs.nested(equation):
        count = len(jaxprs.inputs(inner))
        if name == "cond_jaxpr":  # of a while loop: its constants, then what is carried
            yield inner, operands[: count - carried] + operands[-carried:]
        elif name in ("body_jaxpr", "branches"):
            yield inner, operands[-count:] if count else []
        elif count == len(operands):
            yield inner, operands


def num_closed_over(equation: Equation) -> int:
    """How many first operands a custom derivative's function closes over."""
    is_one = equation.primitive.name == "custom_jvp_call"
    return equation.params.get("num_consts", 0) if is_one else 0


def declares_layouts(equation: Equation) -> bool:
    """Whether a call is a ``jit`` with ``in_shardings`` or ``out_shardings``."""
    params = equation.params
    layouts = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(isinstance(layout, Sharding) for layout in layouts)


def is_rematerialization(equation: Equation) -> bool:
    """Whether a call is ``jax.checkpoint`` recomputing something in a backward pass."""
    return all(map(equation.params.get, ("differentiated", "prevent_cse")))


def grid_steps(equation: Equation) -> int:
    """How often a Pallas kernel runs; dims of run-time size count as one step."""
    grid = equation.params["grid_mapping"].grid
    return math.prod(steps for steps in grid if isinstance(steps, int))


# --- layouts and devices


def layout(equation: Equation) -> Any:
    """The sharding that an equation gives its result, or None.

    As of a constraint, or of ``zeros_like``, which copies that of its argument.
    """
    return equation.params.get("sharding")


def is_product_split(equation: Equation) -> bool:
    """Whether a matmul is written with a layout of its result over Explicit axes."""
    spec = getattr(equation.params["out_sharding"], "spec", None)
    return spec is not None and bool(any(spec.partitions) or spec.unreduced)


def constraint(equation: Equation) -> Any:
    """The sharding of ``with_sharding_constraint`` or ``reshard``; None of another."""
    match equation.primitive.name:
        case "sharding_constraint":
            return equation.params["sharding"]
        case "reshard":
            return equation.params["dst_sharding"]
    return None


def bind_without_layout(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Apply an equation that gives its result a layout, leaving that to XLA."""
    return jaxprs.bind(equation, values, {**equation.params, "sharding": None})


def meshes(equation: Equation) -> list[Mesh]:
    """The meshes of devices that an equation names."""
    named = (equation.params.get("mesh"), getattr(layout(equation), "mesh", None))
    return [mesh for mesh in named if isinstance(mesh, Mesh)]


def axis_names(equation: Equation) -> frozenset[str]:
    """The mesh axes of a collective or of ``axis_index``."""
    params = equation.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    named = axes if isinstance(axes, (tuple, list)) else (axes,)
    return frozenset(axis for axis in named if isinstance(axis, str))


# --- dims


class DotDims(NamedTuple):
    """Of both operands of a matmul: the dims summed over, and those of the batch."""

    contracted: tuple[Dims, Dims]
    batch: tuple[Dims, Dims]


class RaggedDims(NamedTuple):
    """The dim that groups divide on the left, and those that number them right."""

    left: int
    groups: Dims


class GatherDims(NamedTuple):
    """Dims of a gather's operand: the sizes read, those indexed, those of a batch."""

    sizes: Dims
    indexed: Dims
    batch: Dims


class Convolution(NamedTuple):
    """Arguments of ``jax.lax.conv_general_dilated``."""

    dims: lax.ConvDimensionNumbers
    strides: Dims
    padding: tuple[tuple[int, int], ...]
    image_dilation: Dims
    kernel_dilation: Dims
    batch_groups: int


def dot_dims(equation: Equation) -> DotDims:
    """The dims of a ``dot_general`` or a ``ragged_dot_general``."""
    params = equation.params
    if "ragged_dot_dimension_numbers" in params:
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    else:
        numbers = params["dimension_numbers"]
    contracted, batch = numbers
    return DotDims(
        (tuple(contracted[0]), tuple(contracted[1])), (tuple(batch[0]), tuple(batch[1]))
    )


def ragged_dims(equation: Equation) -> RaggedDims:
    """The dims of the groups of a ``ragged_dot_general``."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    left = numbers.lhs_ragged_dimensions[0]
    return RaggedDims(left, tuple(numbers.rhs_group_dimensions))


def bind_matmul(
    equation: Equation,
    values: Sequence[Any],
    dtype: Any = None,
    dims: DotDims | None = None,
) -> Any:
    """The product of a matmul with another dtype of the result, or of other dims."""
    params = dict(equation.params)
    if dtype is not None:
        params["preferred_element_type"] = dtype
    if dims is not None:
        params["dimension_numbers"] = tuple(dims)
    return jaxprs.bind(equation, values, params)[0]


def convolution(equation: Equation) -> Convolution:
    """The arguments of a convolution."""
    params = equation.params
    return Convolution(
        params["dimension_numbers"],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        params["batch_group_count"],
    )


def permutation(equation: Equation) -> Dims:
    """For each dim of a transpose's result, the operand's dim."""
    return tuple(equation.params["permutation"])


def broadcast_dims(equation: Equation) -> Dims:
    """For each dim of a broadcast's operand, the result's dim."""
    return tuple(equation.params["broadcast_dimensions"])


def removed_dims(equation: Equation) -> Dims | None:
    """The dims that a squeeze or a reduction removes; None of another equation."""
    name = equation.primitive.name
    if name == "squeeze":
        return tuple(equation.params["dimensions"])
    if name.startswith(("reduce_", "arg")) and "axes" in equation.params:
        return tuple(equation.params["axes"])
    return None


def dim_along(equation: Equation) -> int | None:
    """The dim that an equation of ``ALONG_ONE_DIM`` works along; None of another."""
    name = equation.primitive.name
    if name not in _ALONG:
        return None
    last = len(equation.outvars[0].aval.shape) - 1  # before top_k had an axis
    return equation.params.get(_ALONG[name], last)


def reversed_dims(equation: Equation) -> Dims:
    """The dims that ``rev`` reverses."""
    return tuple(equation.params["dimensions"])


def padding(equation: Equation) -> tuple[tuple[int, int, int], ...]:
    """Of each dim of a ``pad``: what is added before, after, and between elements."""
    return equation.params["padding_config"]


def window_size(equation: Equation) -> int:
    """How many elements a ``reduce_window`` combines into one."""
    return math.prod(equation.params.get("window_dimensions", ()))


def gather_dims(equation: Equation) -> GatherDims:
    """The dims of a gather's operand."""
    params = equation.params
    numbers = params["dimension_numbers"]
    return GatherDims(
        params["slice_sizes"], numbers.start_index_map, numbers.operand_batching_dims
    )


def indexed_dims(equation: Equation) -> Dims:
    """The operand's dims that the indices of a gather or a scatter choose from."""
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "gather":
        return numbers.start_index_map
    return numbers.scatter_dims_to_operand_dims


def bind_scatter_add(equation: Equation, values: Sequence[Any]) -> jax.Array:
    """The result of a scatter-add with operands of another dtype."""
    operand, indices, updates = values
    params = equation.params
    return lax.scatter_add(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


# --- numbers and names


def exponent(equation: Equation) -> int:
    """The power of an ``integer_pow`` or a ``square``."""
    return equation.params.get("y", 2)


def fills_in(equation: Equation) -> bool:
    """Whether a gather has a number of its own for indices that are out of bounds."""
    return equation.params.get("fill_value") is not None


def mantissa_bits(equation: Equation) -> int | None:
    """The precision of a ``reduce_precision``; None of another equation."""
    is_one = equation.primitive.name == "reduce_precision"
    return equation.params["mantissa_bits"] if is_one else None


def checkpoint_name(equation: Equation) -> str | None:
    """The name that ``checkpoint_name`` gives a value; None of another equation."""
    is_name = equation.primitive.name == "name"
    return equation.params["name"] if is_name else None


def attention_window(equation: Equation) -> tuple[bool, int | None]:
    """Whether cuDNN's attention is causal, and how many positions back it sees."""
    params = equation.params
    window = params["sliding_window_length"] or None
    return "CAUSAL" in params["mask_type"].name, window


def have_same_parameters(equation: Equation, twin: Equation) -> bool:
    """Whether two equations have the same parameters, but for sizes of results."""
    return all(
        repr(value) == repr(twin.params.get(name))  # NaN equals itself
        for name, value in equation.params.items()
        if name not in _SIZES and _is_plain(value)
    )


def _is_plain(value: Any) -> bool:
    """Whether a parameter consists of numbers and names, and has no program."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, jax.numpy.dtype))
