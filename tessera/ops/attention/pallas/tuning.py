# SPDX-License-Identifier: Apache-2.0
"""``ts.tune_attention``: block sizes of attention's kernels, measured and cached.

Nothing is measured while a program is traced: a call uses the block sizes that
``tune_attention`` measured for its shapes on this kind of device with this JAX, or else
the defaults, so that the same code gives the same program until somebody tunes. Each
case is a file in the cache folder of the user.
"""

import hashlib
import itertools
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tessera import _jax
from tessera.dtypes import as_dtype
from tessera.errors import ImplementationError
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas.block_sizes import (
    Blocks,
    Hopper,
    Kernel,
    Portable,
    Tiles,
    default_for_hopper,
    padded_width,
)

FORMAT = 1  # of the files; raised when a change of the kernels outdates them
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def kernel_for(operands: Operands, options: Options, device: Device) -> Kernel:
    """The kernel of a call with its tuned or default block sizes; measures nothing."""
    from tessera.ops.attention.pallas.kernel_attention import hopper_unsupported_reason

    on_hopper = hopper_unsupported_reason(operands, options, device) is None
    tuned = _read(str(_file(_case(operands, options, device))))
    if on_hopper:
        if isinstance(tuned, Hopper):
            return tuned
        return default_for_hopper(operands.q.shape[3])
    return tuned if isinstance(tuned, Portable) else Portable()


def tune_attention(  # noqa: PLR0913 - the arguments of a call, and how to measure it
    shape: Sequence[int],
    *,
    kv_heads: int | None = None,
    keys: int | None = None,
    dtype: Any = "bf16",
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    candidates: Sequence[Kernel] | None = None,
    rounds: int = 5,
) -> Kernel:
    """Measure the best block sizes of attention's kernel, and cache them on disk.

    Programs that this user compiles later, in this process or another, use them: in
    calls of ``flash_attention`` with exactly these shapes, dtype and kind of mask, on
    the same kind of device and JAX. Programs that are compiled already do not change.
    The kernel is the one that a call would use here: for Hopper, or the portable one.

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
      ImplementationError: [T406] it is called while a function is traced, or no
        candidate runs.
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
    best, seconds = kernel_for(operands, options, device), 0.0
    stages: list[Callable[[Kernel, int], Sequence[Kernel]]] = [
        _forward_variants,
        _backward_variants,
    ]
    if candidates is not None:
        stages = [lambda _best, _width: candidates]
    for stage in stages:
        kernels = stage(best, width)
        best, seconds = _fastest(kernels, operands, options, gradient, rounds)
    _write(_case(operands, options, device), best, seconds)
    return best


def _normal(key: int, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.normal(jax.random.key(key), tuple(shape)).astype(as_dtype(dtype))


def _forward_variants(best: Kernel, width: int) -> Sequence[Kernel]:
    """Candidates for the forward pass: the best so far, and others."""
    if isinstance(best, Portable):
        return [best, *(Portable(Blocks(rows, rows)) for rows in (32, 64, 128, 256))]
    tiles = itertools.product((64, 128, 192), (64, 128), (1, 2, 3))
    return [
        best,
        *(best._replace(forward=Tiles(*t)) for t in tiles if _fits(*t, width)),
    ]


def _backward_variants(best: Kernel, width: int) -> Sequence[Kernel]:
    if isinstance(best, Portable):
        return [best]
    tiles = itertools.product((64, 128), (64, 128), (1, 2, 3))
    # Queries and gradients, or keys and values, need memory beside the slots.
    fit = [t for t in tiles if _fits(2 * t[0], *t[1:], width)]
    return [best, *(best._replace(backward=Tiles(*t)) for t in fit)]


def _fits(rows: int, columns: int, slots: int, width: int) -> bool:
    """Whether tiles of 2-byte numbers, and some vectors, fit into shared memory."""
    return 2 * padded_width(width) * (rows + 2 * columns * slots) <= 220 * 1024


def _fastest(
    kernels: Sequence[Kernel],
    operands: Operands,
    options: Options,
    gradient: Any,
    rounds: int,
) -> tuple[Kernel, float]:
    """The kernel with the fastest forward and backward pass, and its seconds."""
    from tessera.ops.attention.pallas.kernel_attention import attend_with

    def program(kernel: Kernel) -> Any:
        def run(arrays: Any, gradient: Any) -> Any:
            def attend(*arrays: Any) -> Any:
                return attend_with(kernel, Operands(*arrays), options)

            out, back = jax.vjp(attend, *arrays)
            return out, back(gradient)

        return jax.jit(run)

    programs, refused = dict[Kernel, Any](), list[str]()
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


# --- the cache


def _case(operands: Operands, options: Options, device: Device) -> str:
    """What a measurement is valid for, as text."""
    case = {
        "format": FORMAT,
        "device": device.kind or device.platform,
        "jax": jax.__version__,
        "queries": list(operands.q.shape),
        "keys": list(operands.k.shape),
        "dtype": operands.q.dtype.name,
        "causal": options.causal,
        "window": options.window,
        "soft_cap": options.soft_cap is not None,
        "segments": operands.query_segments is not None,
        "offset": options.offset if operands.offset is None else "varies",
    }
    return json.dumps(case, sort_keys=True)


def cache_folder() -> Path:
    """The folder of the cache: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tessera" / "attention"


def _file(case: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(case.encode()).hexdigest()[:32]}.json"


@cache
def _read(path: str) -> Kernel | None:
    """The kernel in a file that only the user may write; None for anything else."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
                return None
            stored = json.load(file)["kernel"]
        if "blocks" in stored:
            blocks = Blocks(*map(int, stored["blocks"]))
            return Portable(blocks) if min(blocks) > 0 else None
        ways = [Tiles(*map(int, stored[way])) for way in ("forward", "backward")]
        if any(t.rows % 64 or t.columns % 64 or min(t) < 1 for t in ways):
            return None
        return Hopper(*ways)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(case: str, kernel: Kernel, seconds: float) -> None:
    """Write a measurement atomically."""
    _read.cache_clear()
    sizes = {k: v for k, v in kernel._asdict().items() if k != "interpret"}
    text = json.dumps({"case": case, "kernel": sizes, "seconds": seconds}, indent=1)
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder)  # mode 600
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, _file(case))
