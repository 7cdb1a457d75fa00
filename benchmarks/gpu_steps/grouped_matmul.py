# SPDX-License-Identifier: Apache-2.0
"""Matmuls of experts: ``ragged_dot`` by XLA and tokamax, and Tessera's blocks."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_steps.rows import QUICK, Compiler, emit, errors_kept, is_gpu, seconds_of

from tessera.ops.moe.blocks import in_blocks

EXPERTS, ROWS, WIDTH, INNER = (4, 256, 32, 16) if QUICK else (64, 32768, 2048, 1024)

# Of rows, the experts' matrices, and the rows that each expert gets.
Grouped = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def blocks(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Tessera's way on GPUs: an even share in one matmul, the rest in blocks."""
    order = jnp.arange(ROWS, dtype=jnp.int32)
    return in_blocks(jnp.matmul, ROWS // EXPERTS, x, order, sizes, w)


def equal_groups(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """As many operations in one batched matmul, for its time; sizes are ignored."""
    grouped = x.reshape(EXPERTS, -1, WIDTH)
    return jnp.einsum("erd,edf->erf", grouped, w).reshape(ROWS, INNER)


def ways() -> dict[str, Grouped]:
    """Those that give what ``jax.lax.ragged_dot`` gives, and run here."""
    found: dict[str, Grouped] = {
        "lax.ragged_dot": jax.lax.ragged_dot,
        "blocks": blocks,
    }
    if is_gpu() and find_spec("tokamax"):
        import tokamax

        found["tokamax"] = partial(tokamax.ragged_dot, implementation="mosaic")
    return found


def drawn(*, equal: bool = False) -> tuple[Any, Any, Any, Any]:
    """Rows, matrices, sizes of groups, and a gradient of the result; bf16."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape, np.float32), jnp.bfloat16)

    x, w = normal(ROWS, WIDTH), normal(EXPERTS, WIDTH, INNER) * WIDTH**-0.5
    gradient = normal(ROWS, INNER)
    owners = np.arange(ROWS) % EXPERTS if equal else draw.integers(0, EXPERTS, ROWS)
    sizes = jnp.asarray(np.bincount(owners, minlength=EXPERTS), jnp.int32)
    return x, w.astype(jnp.bfloat16), sizes, gradient


def with_gradients(
    way: Grouped, x: Any, w: Any, sizes: Any, gradient: Any
) -> tuple[Any, ...]:
    """The result, and the gradients of rows and matrices."""
    out, back = jax.vjp(partial(_without_sizes, way, sizes), x, w)
    return out, *back(gradient)


def _without_sizes(way: Grouped, sizes: Any, x: Any, w: Any) -> Any:
    """What is differentiated."""
    return way(x, w, sizes)


def exact() -> None:
    """Results and gradients against f64, the gradients of matrices by expert.

    With drawn and with equal sizes: only the first begin within a kernel's tiles.
    """
    for equal in (False, True):
        arrays = drawn(equal=equal)
        compiler = Compiler()
        programs = {
            name: compiler.submit(partial(with_gradients, way), *arrays)
            for name, way in ways().items()
        }
        truth = exact_results(*(np.asarray(x, np.float64) for x in arrays))
        sizes = "equal" if equal else "drawn"
        for name, program in programs.items():
            known = {"sizes": sizes, "way": name}
            with errors_kept("grouped_exact", **known):
                judge(known, program.result()(*arrays), truth, np.asarray(arrays[2]))


def exact_results(x: Any, w: Any, sizes: Any, gradient: Any) -> tuple[Any, ...]:
    """The same by NumPy in f64, one expert after the other."""
    ends = np.cumsum(sizes.astype(int))
    groups = [
        slice(end - size, end)
        for end, size in zip(ends, sizes.astype(int), strict=True)
    ]
    out = np.concatenate([x[g] @ w[e] for e, g in enumerate(groups)])
    of_x = np.concatenate([gradient[g] @ w[e].T for e, g in enumerate(groups)])
    of_w = np.stack([x[g].T @ gradient[g] for g in groups])
    return out, of_x, of_w


def judge(known: dict[str, Any], found: Any, truth: Any, sizes: np.ndarray) -> None:
    """A row: relative errors, and of the matrices' gradients those of three experts."""
    out, of_x, of_w = (np.asarray(a, np.float64) for a in found)
    norm = np.linalg.norm
    each = norm(of_w - truth[2], axis=(1, 2)) / np.maximum(
        norm(truth[2], axis=(1, 2)), 1e-30
    )
    worst = np.argsort(each)[::-1][:3]
    begins = np.cumsum(sizes) - sizes
    emit(
        "grouped_exact",
        **known,
        out=float(norm(out - truth[0]) / norm(truth[0])),
        of_rows=float(norm(of_x - truth[1]) / norm(truth[1])),
        of_matrices=float(norm(of_w - truth[2]) / norm(truth[2])),
        median_expert=float(np.median(each)),
        experts_over_1_percent=int((each > 0.01).sum()),
        worst=[
            {
                "expert": int(e),
                "error": float(each[e]),
                "rows": int(sizes[e]),
                "begins": int(begins[e]),
            }
            for e in worst
        ],
    )


def timed() -> None:
    """Milliseconds and temporaries of each way, forward and with gradients."""
    *arrays, gradient = drawn()
    compiler = Compiler()
    work = []
    for name, way in (ways() | {"equal groups": equal_groups}).items():
        work.append((name, False, arrays, compiler.submit(way, *arrays)))
        both = [*arrays, gradient]
        program = compiler.submit(partial(with_gradients, way), *both)
        work.append((name, True, both, program))
    compiler.finish()
    for name, backward, operands, future in work:
        known = {"experts": EXPERTS, "way": name, "backward": backward}
        with errors_kept("grouped_time", **known):
            program = future.result()
            seconds = seconds_of(partial(program, *operands))
            flops = 2 * ROWS * WIDTH * INNER * (3 if backward else 1)
            emit(
                "grouped_time",
                **known,
                ms=round(1e3 * seconds, 3),
                TFLOP_s=round(flops / seconds / 1e12, 3),
                temporaries_MB=round(
                    program.memory_analysis().temp_size_in_bytes / 1e6, 1
                ),
            )
