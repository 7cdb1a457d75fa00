# SPDX-License-Identifier: Apache-2.0
"""``ts.tune_attention``: tile sizes of attention's kernels, measured and cached.

Nothing is measured while a program is traced: a call uses the tile sizes that
``tune_attention`` measured for its shapes on this kind of device with this JAX, or else
the defaults, so that the same code gives the same program until somebody tunes.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tessera import _jax
from tessera.dtypes import as_dtype
from tessera.errors import ImplementationError
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas.block_sizes import (
    Hopper,
    Tiles,
    kernel_for,
    padded_width,
    store,
)
from tessera.ops.attention.pallas.kernel_attention import (
    attend_with,
    unsupported_reason,
)


def tune_attention(  # noqa: PLR0913 - the arguments of a call, and how to measure it
    shape: Sequence[int],
    *,
    kv_heads: int | None = None,
    keys: int | None = None,
    dtype: Any = "bf16",
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    candidates: Sequence[Hopper] | None = None,
    rounds: int = 5,
) -> Hopper:
    """Measure the best tile sizes of attention's kernel, and cache them on disk.

    Programs that this user compiles later, in this process or another, use them: in
    calls of ``flash_attention`` with exactly these shapes, dtype and kind of mask, on
    the same kind of device and JAX. Programs that are compiled already do not change.

    Args:
      shape: Of the queries: ``(B, H, S, D)``.
      kv_heads: Key/value heads; H by default.
      keys: Length of keys; S by default.
      dtype: Of all operands.
      causal: As in ``flash_attention``.
      window: As in ``flash_attention``.
      soft_cap: As in ``flash_attention``.
      candidates: Kernels to measure, forward and backward; by default those whose
        tiles fit into registers and shared memory.
      rounds: How often each is timed, in turns; the shortest time counts.

    Returns:
      The fastest kernel.

    Raises:
      ImplementationError: [T406] it is called while a function is traced, the kernel
        does not support such calls here, or no candidate runs.
    """
    if isinstance(jnp.zeros(()), _jax.Tracer):
        raise ImplementationError(
            "tune_attention measures, and nothing runs while a function is traced",
            got=f"tune_attention({tuple(shape)}, …) inside of a traced function",
            fix="call it before, where the program starts",
        )
    batch, heads, length, width = shape
    kv = batch, kv_heads or heads, keys or length, width
    q, gradient = (_normal(key, shape, dtype) for key in (0, 1))
    operands = Operands(q, _normal(2, kv, dtype), _normal(3, kv, dtype))
    options = Options(causal, width**-0.5, window, soft_cap)
    device = Device.here()
    if reason := unsupported_reason(operands, options, device):
        raise ImplementationError(
            "tune_attention has no kernel to tune for such calls here",
            got=reason,
            fix="call it where implementation='pallas' runs; other implementations "
            "have nothing to tune",
        )
    best, seconds = kernel_for(operands, options, device), 0.0
    stages: list[Callable[[Hopper, int], Sequence[Hopper]]] = [
        _forward_variants,
        _backward_variants,
    ]
    if candidates is not None:
        stages = [lambda _best, _width: candidates]
    for stage in stages:
        kernels = stage(best, width)
        best, seconds = _fastest(kernels, operands, options, gradient, rounds)
    store(best, seconds, operands, options, device)
    return best


def _normal(key: int, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.normal(jax.random.key(key), tuple(shape)).astype(as_dtype(dtype))


def _forward_variants(best: Hopper, width: int) -> Sequence[Hopper]:
    """Candidates for the forward pass: the best so far, and others."""
    tiles = itertools.product((64, 128, 192), (64, 128), (1, 2, 3))
    return [
        best,
        *(best._replace(forward=Tiles(*t)) for t in tiles if _fits(*t, width)),
    ]


def _backward_variants(best: Hopper, width: int) -> Sequence[Hopper]:
    tiles = itertools.product((64, 128), (64, 128), (1, 2, 3))
    # Queries and gradients, or keys and values, need memory beside the slots.
    fit = [t for t in tiles if _fits(2 * t[0], *t[1:], width)]
    return [best, *(best._replace(backward=Tiles(*t)) for t in fit)]


def _fits(rows: int, columns: int, slots: int, width: int) -> bool:
    """Whether tiles of 2-byte numbers, and some vectors, fit into shared memory."""
    return 2 * padded_width(width) * (rows + 2 * columns * slots) <= 220 * 1024


def _fastest(
    kernels: Sequence[Hopper],
    operands: Operands,
    options: Options,
    gradient: Any,
    rounds: int,
) -> tuple[Hopper, float]:
    """The kernel with the fastest forward and backward pass, and its seconds."""

    def program(kernel: Hopper) -> Any:
        def run(arrays: Any, gradient: Any) -> Any:
            def attend(*arrays: Any) -> Any:
                return attend_with(kernel, Operands(*arrays), options)

            out, back = jax.vjp(attend, *arrays)
            return out, back(gradient)

        return jax.jit(run)

    programs, refused = dict[Hopper, Any](), list[str]()
    for kernel in dict.fromkeys(kernels):
        try:
            ready = program(kernel).lower(operands[:3], gradient).compile()
            jax.block_until_ready(ready(operands[:3], gradient))
            programs[kernel] = ready
        except Exception as error:
            # Compilers refuse tile sizes with errors of many types.
            refused.append(f"{kernel}: {str(error).splitlines()[:1]}")
    if not programs:
        raise ImplementationError(
            "none of the ways to cut attention's work runs here",
            got="\n".join(refused),
            fix="use implementation='xla'",
        )
    least = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for kernel, ready in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(ready(operands[:3], gradient))
            least[kernel] = min(least[kernel], time.perf_counter() - start)
    best = min(least, key=lambda kernel: least[kernel])
    return best, least[best]
