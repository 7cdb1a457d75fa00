# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the Hopper kernels: warpgroups, ring buffers and matmuls.

A thread block has compute warpgroups, each with 64 rows of the tile, and one that
copies: it fills slots of shared memory by TMA, signals a barrier, and waits on another
until every compute warpgroup has read a slot before it fills the slot again. While one
warpgroup computes exponentials, the matmuls of the others use the tensor cores.

JAX's interpreter of GPU kernels supports no matmul with an operand in registers and no
accumulator with an initial value. For it the operand goes through shared memory and the
sum is computed afterwards; the rest of the program is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tessera.ops.attention.pallas.block_sizes import Tiles
from tessera.ops.attention.pallas.mask_rules import Rules

LOWEST = -1e30  # score of a masked key: finite, so that differences are not NaN
LOG2_E = 1.4426950408889634
MATRIX, ROW, COLUMN = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
)


@dataclass(frozen=True)
class RingBuffer:
    """Slots of shared memory that the copying warpgroup fills and the others read."""

    slots: Any
    filled: Any
    empty: Any
    count: int

    def fill(self, step: Any, source: Any) -> None:
        """Copy from global memory, once every reader has released the slot."""
        slot = lax.rem(step, jnp.int32(self.count))

        @pl.when(step >= self.count)
        def _wait() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

        plgpu.copy_gmem_to_smem(source, self.slots.at[slot], self.filled.at[slot])

    def wait(self, step: Any) -> Any:
        """Wait for the copy of a step, and return its slot."""
        slot = lax.rem(step, jnp.int32(self.count))
        plgpu.barrier_wait(self.filled.at[slot])
        return self.slots.at[slot]

    def done(self, step: Any) -> None:
        """Release the slot of a step: this warpgroup has read it."""
        plgpu.barrier_arrive(self.empty.at[lax.rem(step, jnp.int32(self.count))])


def operand(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for the operand of a matmul, in the layout of wgmma."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def ring_scratch(prefix: str, tiles: Tiles, slot: Any) -> dict[str, Any]:
    """The shared memory and barriers of a :class:`RingBuffer`."""
    return {
        prefix: slot,
        f"{prefix}_filled": plgpu.Barrier(num_barriers=tiles.slots),
        f"{prefix}_empty": plgpu.Barrier(
            num_arrivals=tiles.warpgroups, num_barriers=tiles.slots
        ),
    }


def ring_buffer(prefix: str, tiles: Tiles, scratch: dict[str, Any]) -> RingBuffer:
    """The ring buffer with that prefix in the scratch memory."""
    slots, filled, empty = (scratch[prefix + end] for end in ("", "_filled", "_empty"))
    return RingBuffer(slots, filled, empty, tiles.slots)


def run(
    body: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    outs: list[Any],
    scratch: dict[str, Any],
    grid: tuple[int, int],
    tiles: Tiles,
    interpret: Any,
) -> Any:
    """Run a kernel over (heads, tiles), with a copying warpgroup after the others."""
    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "tile"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)


def specialize_warpgroups(
    tiles: Tiles, compute: Callable[[Any], None], copy: Callable[[], None]
) -> None:
    """Run ``compute`` or ``copy`` in each warpgroup, with the registers it needs."""
    index = lax.axis_index("warpgroup")
    # 512 for each of 128 threads, evenly divided at launch; the copier gives some up.
    registers = 512 // (tiles.warpgroups + 1) // 8 * 8 * (tiles.warpgroups + 1)
    copier = 40 if tiles.warpgroups < 3 else 32
    computer = min((registers - copier) // tiles.warpgroups // 8 * 8, 240)

    @pl.when(index < tiles.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(computer, action="increase")
        compute(index)

    @pl.when(index == tiles.warpgroups)
    def _copy() -> None:
        plgpu.set_max_registers(copier, action="decrease")
        copy()


def matmul(a: Any, b: Any) -> Array:
    """The f32 product of two matrices in shared memory."""

    def body(total: Any) -> Array:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def matmul_add(total: Array, a: Array, b: Any, spare: Any) -> Array:
    """``total`` plus the product of a matrix in registers and one in shared memory.

    ``spare`` is memory for ``a`` where the kernel is interpreted, and None elsewhere.
    """
    if spare is not None:
        spare[...] = a
        plgpu.commit_smem()
        return total + matmul(spare, b)

    def body(total: Any) -> None:
        plgpu.wgmma(total, a, b)
        plgpu.wgmma_wait(0)

    # run_state is typed as returning references, but returns the arrays.
    added: Any = pl.run_state(body)(plgpu.ACC.init(total))
    return added


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A constant array in the registers of a warpgroup."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def positions(first: Any, shape: tuple[int, int], dim: int) -> Array:
    """Positions of the rows (dim 0) or of the columns (dim 1) of a matrix."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=MATRIX)


def load_vector(ref: Any, layout: Any) -> Array:
    """Load a vector from shared memory, in the layout of a matrix's rows or columns."""
    load: Any = plgpu.load  # its signature differs between versions
    return load(ref, layout=layout)


def broadcast(x: Array, shape: tuple[int, int], dim: int) -> Array:
    """Broadcast one number per row (dim 0) or column (dim 1) to a matrix."""
    return lax.broadcast_in_dim(x, shape, (dim,))


def loop_with_mask(
    start: Any,
    stop: Any,
    inside: tuple[Any, Any] | None,
    step: Callable[[bool], Callable[[Any, Any], Any]],
    state: Any,
) -> Any:
    """A loop that applies the mask only in steps outside of the range ``inside``.

    None means that no step needs the mask.
    """
    if inside is None:
        return lax.fori_loop(start, stop, step(False), state)
    first = lax.clamp(start, inside[0], stop)
    last = lax.clamp(first, inside[1], stop)
    state = lax.fori_loop(start, first, step(True), state)
    state = lax.fori_loop(first, last, step(False), state)
    return lax.fori_loop(last, stop, step(True), state)


def is_masked(rules: Rules) -> bool:
    """Whether any pair of a query and a key is masked."""
    options = rules.options
    return options.causal or options.window is not None or rules.padded
