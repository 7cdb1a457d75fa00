# SPDX-License-Identifier: Apache-2.0
"""How long attention takes: Tessera's routes, other libraries, packed rows."""

from concurrent.futures import Future
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from attention import Case, contestants, gradients
from gpu_steps.other_kernels import Attention, of_jax_nn, others, time_torch
from gpu_steps.rows import QUICK, Compiler, emit, errors_kept, is_gpu, seconds_of

from tessera import op

# Longer sequences are not timed in XLA's blocks, which take a tenth of a second there.
_LONG = 8192


def cases() -> list[tuple[Case, int]]:
    """Calls, and how many sequences each has."""
    if QUICK:
        return [(Case(2, 2, 128, 64, causal=True), 1)]
    return [
        (Case(16, 16, 4096, 128, causal=True), 4),
        (Case(32, 8, 4096, 64, causal=True), 4),
        (Case(8, 8, 4096, 256, causal=True), 4),
        (Case(16, 16, 16384, 128, causal=True), 1),
        (Case(16, 4, 1024, 128, causal=True), 4),
        (Case(16, 16, 4096, 128, causal=False), 4),
        (Case(4, 1, 4096, 256, causal=True, window=512), 4),
    ]


def arrays_of(case: Case, rows: int) -> list[Any]:
    """Queries, keys and values: bf16, f32 on a CPU."""
    draw = np.random.default_rng(0)
    dtype = jnp.bfloat16 if is_gpu() else jnp.float32
    return [
        jnp.asarray(draw.standard_normal(shape, np.float32), dtype)
        for n in (case.heads, case.groups, case.groups)
        for shape in [(rows, n, case.length, case.width)]
    ]


class Timed:
    """Compiles functions of arrays, then times them one after another."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._compiler = Compiler()
        self._work: list[tuple[dict[str, Any], float, Any, Future[Any]]] = []

    def add(self, name: str, attend: Attention, case: Case, arrays: list[Any]) -> None:
        """Forward, and with gradients of the first three."""
        rows = len(arrays[0])
        for backward in (False, True):
            known = {
                "case": case.name,
                "rows": rows,
                "backward": backward,
                "implementation": name,
            }
            function = gradients(attend) if backward else attend
            flops = rows * case.flops * (3.5 if backward else 1)
            program = self._compiler.submit(function, *arrays)
            self._work.append((known, flops, arrays, program))

    def run(self) -> None:
        """A row for each, once everything is compiled."""
        self._compiler.finish()
        for known, flops, arrays, program in self._work:
            with errors_kept(self._table, **known):
                seconds = seconds_of(partial(program.result(), *arrays))
                speed = round(flops / seconds / 1e12, 3)
                ms = round(1e3 * seconds, 3)
                emit(self._table, **known, ms=ms, TFLOP_s=speed)


def attention() -> None:
    """Tessera's routes, ``jax.nn``, tokamax, JAX's Pallas example, PyTorch."""
    timed = Timed("attention_time")
    for case, rows in cases():
        arrays = arrays_of(case, rows)
        found = contestants(case, arrays) | {"jax.nn": of_jax_nn(case)} | others(case)
        for name, attend in found.items():
            if name != "xla" or case.length <= _LONG:
                timed.add(name, attend, case, arrays)
    timed.run()
    time_torch(cases())


def packed() -> None:
    """Rows of eight segments by cuDNN and XLA's blocks, and without segments.

    Segment ids are arguments: constant ones would decide cuDNN's condition in advance.
    """
    timed = Timed("packed_time")
    heads, groups, length, rows = (2, 1, 128, 1) if QUICK else (16, 8, 4096, 4)
    draw = np.random.default_rng(0).integers(0, 8, (rows, length))
    ids = jnp.asarray(np.sort(draw, 1), jnp.int32)
    for width in (64,) if QUICK else (64, 128, 256):
        case = Case(heads, groups, length, width, causal=True)
        arrays = arrays_of(case, rows)
        timed.add("xla", partial(_packed, "xla"), case, [*arrays, ids])
        if is_gpu():
            timed.add("cudnn", partial(_packed, "cudnn"), case, [*arrays, ids])
            plain = partial(op.flash_attention, causal=True, implementation="cudnn")
            timed.add("cudnn, no segments", plain, case, arrays)
    timed.run()


def _packed(route: str, q: Any, k: Any, v: Any, ids: Any) -> Any:
    return op.flash_attention(
        q, k, v, causal=True, segment_ids=ids, implementation=route
    )
