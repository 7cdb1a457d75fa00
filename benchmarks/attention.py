# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention that this device runs, forward and with gradients.

Beside them ``jax.nn.dot_product_attention`` and, where it is installed and sees a GPU,
PyTorch's ``scaled_dot_product_attention``. What is compared runs in turns. A TFLOP/s
counts 4 · S · S · D for each head forward and 2.5 times that in the backward pass; half
of both with a causal mask, and the window's share of it with a window.

    python benchmarks/attention.py [--quick] [--json PATH] [--rounds N]
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report

from tessera import op
from tessera.ops.attention.dispatch import (
    IMPLEMENTATIONS,
    Device,
    Operands,
    Options,
    unsupported_reason,
)

# Arrays as large as the square of the sequence that still fit a machine.
_MOST_SCORES = 2**32


@dataclass(frozen=True)
class Case:
    """One call: heads of queries and of keys, length, width, and the mask."""

    heads: int
    groups: int
    length: int
    width: int
    causal: bool
    window: int | None = None

    @property
    def name(self) -> str:
        """As the table has it."""
        mask = "causal" if self.causal else "full"
        mask = mask if self.window is None else f"window {self.window}"
        heads = f"{self.heads}/{self.groups}"
        return f"D {self.width}, S {self.length}, heads {heads}, {mask}"

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        seen = self.length**2 / (2 if self.causal else 1)
        if self.window is not None:
            seen = min(seen, self.length * self.window)
        return 4 * self.heads * self.width * seen


def cases(*, quick: bool, is_gpu: bool) -> Iterator[Case]:
    """Heads times width is 2048 on a GPU, and 256 on a CPU."""
    widths = (64,) if quick else (64, 128, 256)
    lengths = (1024,) if quick else (1024, 2048, 4096, 8192, 16384)
    for width in widths:
        heads = (2048 if is_gpu else 256) // width
        for length in lengths if is_gpu or quick else lengths[:3]:
            plain = partial(Case, heads, heads, length, width)
            yield plain(causal=False)
            yield plain(causal=True)
        yield plain(causal=True, window=length // 4)
        if heads > 1:
            yield Case(heads, heads // 2, length, width, causal=True)


def contestants(case: Case, arrays: list[Any]) -> dict[str, Callable[..., Any]]:
    """Functions of ``[B, H, S, D]``, by name."""
    options = Options(case.causal, case.width**-0.5, case.window)
    found: dict[str, Callable[..., Any]] = {}
    for name in IMPLEMENTATIONS:
        reason = unsupported_reason(name, Operands(*arrays), options, Device.here())
        if reason is None:
            found[name] = partial(
                op.flash_attention,
                causal=case.causal,
                window=case.window,
                implementation=name,
            )
    window = None if case.window is None else (case.window - 1, 0)

    def of_jax(*arrays: Any) -> Any:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in arrays)
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, local_window_size=window
        )
        return jnp.swapaxes(out, 1, 2)

    if case.heads * case.length**2 <= _MOST_SCORES:
        found["jax.nn"] = of_jax
    return found


def gradients(read: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward; the loss is the sum of what was read times the queries."""

    def loss(*arrays: Any) -> Any:
        return (read(*arrays).astype(jnp.float32) * arrays[0]).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


def torch_run(case: Case, arrays: list[Any], *, backward: bool) -> Any:
    """The same by PyTorch on this GPU, or None."""
    if case.window is not None or find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    q, k, v = (
        torch.tensor(np.asarray(x, np.float32), device="cuda", dtype=torch.bfloat16)
        for x in arrays
    )
    for x in (q, k, v):
        x.requires_grad_(backward)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        out = attend(
            q, k, v, is_causal=case.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        if backward:
            out.backward(q.detach())
        torch.cuda.synchronize()

    return run


def measure(case: Case, rounds: int, *, is_gpu: bool) -> Iterator[dict[str, Any]]:
    """Rows of the table: each contestant, forward and with gradients."""
    draw = np.random.default_rng(0)
    dtype = jnp.bfloat16 if is_gpu else jnp.float32
    sizes = case.heads, case.groups, case.groups
    arrays = [
        jnp.asarray(draw.normal(size=(1, n, case.length, case.width)), dtype)
        for n in sizes
    ]
    for backward in (False, True):
        runs: dict[str, Callable[[], Any]] = {}
        memory: dict[str, int] = {}
        for name, read in contestants(case, arrays).items():
            function = jax.jit(gradients(read) if backward else read)
            compiled = function.lower(*arrays).compile()
            if (used := compiled.memory_analysis()) is not None:
                memory[name] = used.temp_size_in_bytes
            runs[name] = partial(compiled, *arrays)
        if run := torch_run(case, arrays, backward=backward):
            runs["torch"] = run
        for run in runs.values():
            jax.block_until_ready(run())
        seconds = report.alternate(list(runs.values()), rounds)
        medians = dict(zip(runs, map(statistics.median, seconds), strict=True))
        flops = case.flops * (3.5 if backward else 1.0)
        base = medians.get("jax.nn")
        for name, sample in zip(runs, seconds, strict=True):
            yield {
                "call": case.name,
                "pass": "both" if backward else "forward",
                "implementation": name,
                "ms": report.spread(sample),
                "TFLOP/s": round(flops / medians[name] / 1e12, 3),
                "of jax.nn": None if base is None else round(base / medians[name], 2),
                "temporary MB": round(memory[name] / 1e6, 1)
                if name in memory
                else None,
            }


def main(options: argparse.Namespace) -> None:
    """Every case, on the device that JAX computes on."""
    is_gpu = Device.here().platform == "cuda"
    rounds = options.rounds or (5 if options.quick else 9)
    rows: list[dict[str, Any]] = []
    for case in cases(quick=options.quick, is_gpu=is_gpu):
        report.progress(case.name)
        rows += measure(case, rounds, is_gpu=is_gpu)
    report.show("Attention, one sequence", rows, options.json)


if __name__ == "__main__":
    found = report.parser(__doc__)
    found.add_argument("--rounds", type=int, help="runs of each")
    main(found.parse_args())
