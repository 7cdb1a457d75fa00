# SPDX-License-Identifier: Apache-2.0
"""Attention by other libraries, as functions of ``[B, H, S, D]``."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from attention import Case
from gpu_steps.rows import emit, errors_kept, is_gpu

Attention = Callable[..., Any]


def transposed(function: Attention) -> Attention:
    """Of a function of ``[B, S, H, D]``."""
    import jax.numpy as jnp

    def attend(*arrays: Any) -> Any:
        out = function(*(jnp.swapaxes(x, 1, 2) for x in arrays))
        return jnp.swapaxes(out, 1, 2)

    return attend


def window_of(case: Case) -> tuple[int, int] | None:
    """As JAX and tokamax take it: keys to the left and to the right."""
    return None if case.window is None else (case.window - 1, 0)


def of_jax_nn(case: Case) -> Attention:
    """``jax.nn``, by cuDNN on a GPU."""
    import jax

    return transposed(
        partial(
            jax.nn.dot_product_attention,
            is_causal=case.causal,
            local_window_size=window_of(case),
            implementation="cudnn" if is_gpu() else None,
        )
    )


def of_tokamax(case: Case, implementation: str) -> Attention:
    """One of tokamax's kernels."""
    import tokamax

    return transposed(
        partial(
            tokamax.dot_product_attention,
            is_causal=case.causal,
            local_window_size=window_of(case),
            implementation=implementation,
        )
    )


def of_jax_pallas(case: Case) -> Attention:
    """The example of JAX for Hopper, with blocks that are not tuned.

    It keeps f16 in shared memory, so its operands are f16 here.
    """
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128 if case.width <= 128 else 64,
        max_concurrent_steps=2,
        causal=case.causal,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )

    def attend(q: Any, k: Any, v: Any) -> Any:
        f16 = ((q * case.width**-0.5), k, v)
        out = attention_mgpu.attention(*(x.astype(jnp.float16) for x in f16), config)
        return out.astype(q.dtype)

    return transposed(attend)


def others(case: Case) -> dict[str, Attention]:
    """Those that run here and take such a call; none without a GPU."""
    found: dict[str, Attention] = {}
    if not is_gpu():
        return found
    if find_spec("tokamax"):
        found["tokamax mosaic"] = of_tokamax(case, "mosaic")
        if case.length <= 4096:
            found["tokamax triton"] = of_tokamax(case, "triton")
    if case.window is None and case.width in (64, 128, 256):
        found["jax pallas f16"] = of_jax_pallas(case)
    return found


def time_torch(cases: list[tuple[Case, int]]) -> None:
    """A row for each of PyTorch's kernels, where PyTorch sees a GPU."""
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        return
    for case, rows, backend, backward in torch_runs(cases):
        name = f"torch {backend.name.lower()}"
        known = {
            "case": case.name,
            "rows": rows,
            "backward": backward,
            "implementation": name,
        }
        with errors_kept("attention_time", **known):
            ms = torch_ms(case, rows, backend, backward=backward)
            flops = rows * case.flops * (3.5 if backward else 1)
            speed = round(flops / ms / 1e9, 1)
            emit("attention_time", **known, ms=round(ms, 3), TFLOP_s=speed)


def torch_runs(cases: list[tuple[Case, int]]) -> Iterator[tuple[Case, int, Any, bool]]:
    """Every case without a window, by both kernels, with and without gradients."""
    from torch.nn.attention import SDPBackend

    for case, rows in cases:
        if case.window is None:
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                yield case, rows, backend, False
                yield case, rows, backend, True


def torch_ms(case: Case, rows: int, backend: Any, *, backward: bool) -> float:
    """Milliseconds of a call: the median of five samples of ten, by CUDA's events."""
    import torch
    from torch.nn.attention import sdpa_kernel

    sizes = [
        (rows, n, case.length, case.width)
        for n in (case.heads, case.groups, case.groups)
    ]
    q, k, v = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in sizes
    )
    gradient = torch.randn_like(q)
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=case.causal,
        enable_gqa=case.heads != case.groups,
    )

    def run() -> None:
        with sdpa_kernel(backend):
            out = attend(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    def sample() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 10

    sample()
    return sorted(sample() for _ in range(5))[2]
