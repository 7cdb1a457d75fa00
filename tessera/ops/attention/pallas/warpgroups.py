# SPDX-License-Identifier: Apache-2.0
"""What the kernels for Hopper are made of: tiles, barriers, products of a warpgroup.

A block of threads has compute warpgroups, each with 64 rows of the tile, and after them
one that copies: it fills slots of shared memory by TMA, says so on a barrier, and waits
on another for every compute warpgroup to be done with a slot before it fills it again.
While one warpgroup computes exponentials, the others' products use the tensor cores.

JAX's interpreter of GPU kernels has no product with an operand in registers and no
accumulator that starts from a value. For it the operand goes through shared memory and
the sum is taken afterwards; everything else is one and the same program.
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

LOWEST = -1e30  # of scores: finite, so that differences are numbers
LOG2_E = 1.4426950408889634
MATRIX, ROW, COLUMN = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
)


@dataclass(frozen=True)
class Ring:
    """Slots of shared memory that the copying warpgroup fills and others empty."""

    slots: Any
    filled: Any
    emptied: Any
    count: int

    def fill(self, step: Any, source: Any) -> None:
        """Copy from global memory, once nobody reads the slot any longer."""
        slot = lax.rem(step, jnp.int32(self.count))

        @pl.when(step >= self.count)
        def _wait() -> None:
            plgpu.barrier_wait(self.emptied.at[slot])

        plgpu.copy_gmem_to_smem(source, self.slots.at[slot], self.filled.at[slot])

    def wait(self, step: Any) -> Any:
        """What was copied in a step."""
        slot = lax.rem(step, jnp.int32(self.count))
        plgpu.barrier_wait(self.filled.at[slot])
        return self.slots.at[slot]

    def done(self, step: Any) -> None:
        """This warpgroup has read what was copied in a step."""
        plgpu.barrier_arrive(self.emptied.at[lax.rem(step, jnp.int32(self.count))])


def operand(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for the operand of a product, in the order that wgmma reads."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def ring_scratch(prefix: str, tiles: Tiles, slot: Any) -> dict[str, Any]:
    """What a :class:`Ring` is made of."""
    return {
        prefix: slot,
        f"{prefix}_filled": plgpu.Barrier(num_barriers=tiles.slots),
        f"{prefix}_emptied": plgpu.Barrier(
            num_arrivals=tiles.warpgroups, num_barriers=tiles.slots
        ),
    }


def ring_of(prefix: str, tiles: Tiles, scratch: dict[str, Any]) -> Ring:
    """The ring whose parts are among the scratch."""
    slots, filled, emptied = (
        scratch[prefix + end] for end in ("", "_filled", "_emptied")
    )
    return Ring(slots, filled, emptied, tiles.slots)


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


def divide_work(
    tiles: Tiles, compute: Callable[[Any], None], copy: Callable[[], None]
) -> None:
    """Give each warpgroup what it does, and the registers for it."""
    index = lax.axis_index("warpgroup")
    # 512 for each of 128 threads, shared out evenly at launch; then the copier gives.
    all_of_them = 512 // (tiles.warpgroups + 1) // 8 * 8 * (tiles.warpgroups + 1)
    copier = 40 if tiles.warpgroups < 3 else 32
    each = min((all_of_them - copier) // tiles.warpgroups // 8 * 8, 240)

    @pl.when(index < tiles.warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(each, action="increase")
        compute(index)

    @pl.when(index == tiles.warpgroups)
    def _copy() -> None:
        plgpu.set_max_registers(copier, action="decrease")
        copy()


def product(a: Any, b: Any) -> Array:
    """f32 product of two matrices in shared memory."""

    def body(total: Any) -> Array:
        plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def plus_product(total: Array, a: Array, b: Any, spare: Any) -> Array:
    """A sum and the product of a matrix in registers and one in shared memory.

    ``spare`` is memory for ``a`` where the kernel is interpreted, and None elsewhere.
    """
    if spare is not None:
        spare[...] = a
        plgpu.commit_smem()
        return total + product(spare, b)

    def body(total: Any) -> None:
        plgpu.wgmma(total, a, b)
        plgpu.wgmma_wait(0)

    # By its types a reference; what a state leaves behind is the array.
    added: Any = pl.run_state(body)(plgpu.ACC.init(total))
    return added


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A constant that is spread over a warpgroup's registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def places(first: Any, shape: tuple[int, int], dim: int) -> Array:
    """Places of the rows (dim 0) or of the columns (dim 1) of a matrix."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=MATRIX)


def row_numbers(ref: Any, layout: Any) -> Array:
    """A vector in shared memory, spread as the rows or columns of a matrix are."""
    load: Any = plgpu.load  # it has had other arguments
    return load(ref, layout=layout)


def over(x: Array, shape: tuple[int, int], dim: int) -> Array:
    """One number of each row (dim 0) or column (dim 1), all over a matrix."""
    return lax.broadcast_in_dim(x, shape, (dim,))


def in_parts(
    start: Any,
    stop: Any,
    inside: tuple[Any, Any] | None,
    step: Callable[[bool], Callable[[Any, Any], Any]],
    state: Any,
) -> Any:
    """A loop whose steps outside of ``inside`` apply the mask, and those inside do not.

    None is a mask that hides nothing at all.
    """
    if inside is None:
        return lax.fori_loop(start, stop, step(False), state)
    first = lax.clamp(start, inside[0], stop)
    last = lax.clamp(first, inside[1], stop)
    state = lax.fori_loop(start, first, step(True), state)
    state = lax.fori_loop(first, last, step(False), state)
    return lax.fori_loop(last, stop, step(True), state)


def hides(rules: Rules) -> bool:
    """Whether some query may not see some key."""
    setting = rules.setting
    return setting.causal or setting.window is not None or rules.padded
