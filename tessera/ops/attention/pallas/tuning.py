# SPDX-License-Identifier: Apache-2.0
"""How kernels cut their work: measured ahead of time, and kept on disk.

Nothing is measured while a program is traced: a call takes what ``tune_attention``
found for its shapes on this kind of device with this JAX, or else the defaults, so that
the same code gives the same program until somebody tunes. There is a file for each
case, in a folder of the user's own.
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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tessera import _jax
from tessera.dtypes import as_dtype
from tessera.errors import ImplementationError
from tessera.ops.attention.attention_call import Operands, Setting
from tessera.ops.attention.pallas.block_sizes import (
    Blocks,
    Hopper,
    Kernel,
    Portable,
    Tiles,
    default_for_hopper,
    padded_width,
)

if TYPE_CHECKING:
    from tessera.ops.attention.dispatch import Device

FORMAT = 1  # of the files; raised when kernels change what is best
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def kernel_for(operands: Operands, setting: Setting, device: "Device") -> Kernel:
    """The kernel of a call, cut as was found best or by default; measures nothing."""
    from tessera.ops.attention.pallas.kernel_attention import why_not_hopper

    on_hopper = why_not_hopper(operands, setting, device) is None
    tuned = _read(str(_file(_case(operands, setting, device))))
    if on_hopper:
        if isinstance(tuned, Hopper):
            return tuned
        return default_for_hopper(operands.q.shape[3])
    return tuned if isinstance(tuned, Portable) else Portable()


def tune_attention(  # noqa: PLR0913 - a call, and how to measure it
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
    """Measure how attention's kernel cuts its work best, and remember it on disk.

    Programs that are compiled later in this process or in others of this user take it:
    calls of ``flash_attention`` of just these shapes, dtype and kind of mask, on the
    same kind of device and JAX. Those that are compiled already stay as they are. The
    kernel is the one that a call would get here: for Hopper, or the portable one.

    Args:
      shape: Of the queries: ``(B, H, S, D)``.
      kv_heads: Key/value heads; H when not given.
      keys: Length of keys; S when not given.
      dtype: Of all operands.
      causal: As ``flash_attention`` takes it.
      window: Likewise.
      soft_cap: Likewise.
      candidates: Kernels that are measured, forward and backward; by default those
        whose tiles go into registers and shared memory.
      rounds: How often each is timed, in turns; the least counts.

    Returns:
      The fastest kernel.

    Raises:
      ImplementationError: [T406] it is called while a function is traced, or there is
        no candidate that runs.
    """
    from tessera.ops.attention.dispatch import Device

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
    setting = Setting(causal, width**-0.5, window, soft_cap)
    device = Device.here()
    best, seconds = kernel_for(operands, setting, device), 0.0
    stages: list[Callable[[Kernel, int], Sequence[Kernel]]] = [
        _forward_variants,
        _backward_variants,
    ]
    if candidates is not None:
        stages = [lambda _best, _width: candidates]
    for stage in stages:
        tried = stage(best, width)
        best, seconds = _fastest(tried, operands, setting, gradient, rounds)
    _write(_case(operands, setting, device), best, seconds)
    return best


def _normal(key: int, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.normal(jax.random.key(key), tuple(shape)).astype(as_dtype(dtype))


def _forward_variants(best: Kernel, width: int) -> Sequence[Kernel]:
    """The best so far, which is kept when nothing is faster, and others."""
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
    # Queries and gradients, or keys and values, lie beside the slots.
    fit = [t for t in tiles if _fits(2 * t[0], *t[1:], width)]
    return [best, *(best._replace(backward=Tiles(*t)) for t in fit)]


def _fits(rows: int, columns: int, slots: int, width: int) -> bool:
    """Whether tiles of 2-byte numbers go into shared memory, beside some vectors."""
    return 2 * padded_width(width) * (rows + 2 * columns * slots) <= 220 * 1024


def _fastest(
    tried: Sequence[Kernel],
    operands: Operands,
    setting: Setting,
    gradient: Any,
    rounds: int,
) -> tuple[Kernel, float]:
    """The one whose forward and backward pass took least, and the seconds."""
    from tessera.ops.attention.pallas.kernel_attention import attend_by

    def program(kernel: Kernel) -> Any:
        def run(arrays: Any, gradient: Any) -> Any:
            def attend(*arrays: Any) -> Any:
                return attend_by(kernel, Operands(*arrays), setting)

            out, back = jax.vjp(attend, *arrays)
            return out, back(gradient)

        return jax.jit(run)

    programs, refused = dict[Kernel, Any](), list[str]()
    for kernel in dict.fromkeys(tried):
        try:
            ready = program(kernel).lower(operands[:3], gradient).compile()
            jax.block_until_ready(ready(operands[:3], gradient))
            programs[kernel] = ready
        except Exception as error:
            # Compilers refuse tiles in many ways; which, is what is being found out.
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


# --- the cases that are kept


def _case(operands: Operands, setting: Setting, device: "Device") -> str:
    """What a measurement holds for, as text."""
    case = {
        "format": FORMAT,
        "device": device.kind or device.platform,
        "jax": jax.__version__,
        "queries": list(operands.q.shape),
        "keys": list(operands.k.shape),
        "dtype": operands.q.dtype.name,
        "causal": setting.causal,
        "window": setting.window,
        "soft_cap": setting.soft_cap is not None,
        "segments": operands.query_segments is not None,
        "offset": setting.offset if operands.offset is None else "varies",
    }
    return json.dumps(case, sort_keys=True)


def cache_folder() -> Path:
    """Where measurements are kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tessera" / "attention"


def _file(case: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(case.encode()).hexdigest()[:32]}.json"


@cache
def _read(path: str) -> Kernel | None:
    """What is kept in a file that is the user's alone; None for anything else."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
                return None
            kept = json.load(file)["kernel"]
        if "blocks" in kept:
            blocks = Blocks(*map(int, kept["blocks"]))
            return Portable(blocks) if min(blocks) > 0 else None
        ways = [Tiles(*map(int, kept[way])) for way in ("forward", "backward")]
        if any(t.rows % 64 or t.columns % 64 or min(t) < 1 for t in ways):
            return None
        return Hopper(*ways)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(case: str, kernel: Kernel, seconds: float) -> None:
    """Keep it, whole or not at all."""
    _read.cache_clear()
    sizes = {k: v for k, v in kernel._asdict().items() if k != "interpret"}
    text = json.dumps({"case": case, "kernel": sizes, "seconds": seconds}, indent=1)
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder)  # mode 600
    with os.fdopen(handle, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, _file(case))
