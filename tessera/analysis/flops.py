# SPDX-License-Identifier: Apache-2.0
"""Counts a program's floating-point operations on its jaxpr.

XLA's own ``cost_analysis`` counts the body of a loop once and does not look into custom
calls, so it can differ by a factor between two programs of equal work. The jaxpr has
every matmul with its sizes and every scan with its length.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from tessera.foundations.primitive_properties import (
    CUDNN_ATTENTION,
    CUMULATIVE,
    DATA_MOVEMENT,
    REDUCTIONS,
    SORTS,
)
from tessera.jax_compat import jaxprs, primitives

# Primitives that count one operation per element of their first operand.
_READS = REDUCTIONS | CUMULATIVE | SORTS


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one execution, all devices together.

    Attributes:
      matmul: Of matrix products and convolutions; a multiply and an add are two.
      other: Of everything else, one per element: of the result for elementwise
        operations, of the operand for reductions.
      unknown_loops: Loops whose length is known only at run time; each counts once.
    """

    matmul: int = 0
    other: int = 0
    unknown_loops: int = 0

    @property
    def total(self) -> int:
        """Matmuls and everything else."""
        return self.matmul + self.other

    def __add__(self, more: "Flops") -> "Flops":
        return Flops(
            self.matmul + more.matmul,
            self.other + more.other,
            self.unknown_loops + more.unknown_loops,
        )

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.matmul * times, self.other * times, self.unknown_loops)

    def as_text(self) -> str:
        """One line.

        Example:
          >>> Flops(matmul=3_000_000_000, other=5000).as_text()
          'FLOPs: 3.00 G in matmuls, 5.00 k in the rest'
        """
        text = (
            f"FLOPs: {format_flops(self.matmul)} in matmuls, "
            f"{format_flops(self.other)} in the rest"
        )
        loops = self.unknown_loops
        return text + (f"; {loops} loops of unknown length count once" if loops else "")


def count(program: jaxprs.Program) -> Flops:
    """The floating-point operations of one execution of a program.

    Args:
      program: A jaxpr, from ``jax.make_jaxpr(f)(...)`` or ``jax.jit(f).trace(...)``.

    Returns:
      A count for all devices together: an SPMD region counts once for each device of
      its axes. A scan counts as often as its length, a conditional as its most
      expensive branch, and dead code not at all.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> count(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5)))).matmul
      60
    """
    return _count(jaxprs.without_dead_code(program))


def matmul_dtype(program: jaxprs.Program) -> np.dtype:
    """The dtype in which a program does most of its matmul operations.

    Returns:
      The dtype of their first operand; float32 where there are none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> a = jnp.ones((2, 3), jnp.bfloat16)
      >>> matmul_dtype(jax.make_jaxpr(jnp.dot)(a, a.T))
      dtype(bfloat16)
    """
    counts: dict[np.dtype, int] = {np.dtype(np.float32): 0}
    _count_dtypes(program, 1, counts)
    return max(counts, key=lambda dtype: counts[dtype])


def _count_dtypes(
    program: jaxprs.Program, times: int, counts: dict[np.dtype, int]
) -> None:
    for equation in jaxprs.equations(program):
        name = equation.primitive.name
        if name in _CONTRACTIONS:
            dtype = equation.invars[0].aval.dtype
            flops = times * _CONTRACTIONS[name](equation)
            counts[dtype] = counts.get(dtype, 0) + flops
        for _, inner in jaxprs.nested(equation):
            _count_dtypes(inner, times * repetitions(equation), counts)


def format_flops(number: float) -> str:
    """A number of operations with a decimal prefix.

    Example:
      >>> format_flops(2.5e15), format_flops(12)
      ('2.50 P', '12')
    """
    for prefix, size in zip("EPTGMk", (1e18, 1e15, 1e12, 1e9, 1e6, 1e3), strict=True):
        if number >= size:
            return f"{number / size:.2f} {prefix}"
    return f"{number:.0f}"


def _count(program: jaxprs.Program) -> Flops:
    equations = jaxprs.equations(program)
    return _sum(count_equation(each) for each in equations if is_live(each))


def is_live(equation: jaxprs.Equation) -> bool:
    """Whether an equation has results or effects.

    Rematerialization leaves calls of kernels in a program whose results nothing reads.
    """
    return bool(equation.outvars or equation.effects)


def count_equation(equation: jaxprs.Equation) -> Flops:
    """The floating-point operations of one equation and the programs in it."""
    name = equation.primitive.name
    if name in _CONTRACTIONS:
        return Flops(matmul=_CONTRACTIONS[name](equation))
    if name in DATA_MOVEMENT:
        return Flops()
    if name in _READS:
        return Flops(other=_size(equation.invars[0]))
    if name.startswith("reduce_window"):
        window = primitives.window_size(equation)
        return Flops(other=_size(equation.outvars[0]) * window)
    if name.startswith("scatter"):
        return Flops(other=_size(equation.invars[2]))
    if name == "while":
        loop = primitives.while_loop(equation)
        once = _count(loop.condition) + _count(loop.body)
        return replace(once, unknown_loops=once.unknown_loops + 1)
    if name == "cond":
        branches = map(_count, primitives.branches(equation))
        return max(branches, key=lambda flops: flops.total)
    inner = [_count(program) for _, program in jaxprs.nested(equation)]
    if inner:
        return _sum(inner) * repetitions(equation)
    return Flops(other=sum(_size(result) for result in equation.outvars))


def repetitions(equation: jaxprs.Equation) -> int:
    """How often, over all devices, an equation runs the programs in it."""
    if (length := primitives.scan_length(equation)) is not None:
        return length
    if jaxprs.is_shard_map(equation):
        return primitives.region(equation).num_devices
    if equation.primitive.name == "pallas_call":
        return primitives.grid_steps(equation)
    return 1


def _dot_general(equation: jaxprs.Equation) -> int:
    contracted = primitives.dot_dims(equation).contracted[0]
    shape = equation.invars[0].aval.shape
    depth = math.prod(shape[dim] for dim in contracted)
    return 2 * depth * _size(equation.outvars[0])


def _ragged_dot_general(equation: jaxprs.Equation) -> int:
    contracted, flops = primitives.dot_dims(equation).contracted, _dot_general(equation)
    if primitives.ragged_dims(equation).left in contracted[0]:
        # The groups divide the depth, and the result has one product for each group.
        flops //= equation.invars[2].aval.shape[-1]
    return flops


def _convolution(equation: jaxprs.Equation) -> int:
    conv = primitives.convolution(equation)
    numbers = conv.dims
    image = equation.invars[0].aval.shape
    kernel = equation.invars[1].aval.shape
    result = equation.outvars[0].aval.shape
    products = result[numbers.out_spec[0]] * result[numbers.out_spec[1]]
    products *= kernel[numbers.rhs_spec[1]]
    for i, stride in enumerate(conv.strides):
        products *= _window_products(
            image[numbers.lhs_spec[2 + i]],
            kernel[numbers.rhs_spec[2 + i]],
            result[numbers.out_spec[2 + i]],
            stride,
            conv.padding[i][0],
            (conv.image_dilation[i], conv.kernel_dilation[i]),
        )
    return 2 * products


def _window_products(
    image: int,
    kernel: int,
    result: int,
    stride: int,
    padding: int,
    dilation: tuple[int, int],
) -> int:
    """Products along one dim, without those of padding and of dilation's gaps."""
    step, kernel_step = dilation
    starts = np.arange(result)[:, None] * stride - padding
    index = starts + np.arange(kernel) * kernel_step
    inside = (index >= 0) & (index <= (image - 1) * step) & (index % step == 0)
    return int(inside.sum())


def _cudnn_attention(equation: jaxprs.Equation) -> int:
    """Two matmuls over the scores, and five for the gradient; half with causality.

    Packed rows count as rows of one segment, which is the most that they may be.
    """
    queries, keys = (x.aval.shape for x in equation.invars[:2])
    is_backward = "bwd" in equation.primitive.name
    batch, length, heads, width = queries  # tessera and jax.nn pass no other layout
    seen = length * keys[1]
    is_causal, window = primitives.attention_window(equation)
    if is_causal:
        seen = min(seen // 2, length * (window or length))
    return 2 * (5 if is_backward else 2) * batch * heads * width * seen


_CONTRACTIONS: dict[str, Callable[[jaxprs.Equation], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(CUDNN_ATTENTION, _cudnn_attention),
}


def _sum(parts: Iterable[Flops]) -> Flops:
    return sum(parts, start=Flops())


def _size(atom: jaxprs.Atom) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
