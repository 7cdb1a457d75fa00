# SPDX-License-Identifier: Apache-2.0
"""Versions, the device, and the ceilings of copies and matmuls."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from shutil import which
from typing import Any

from gpu_steps.rows import QUICK, emit, errors_kept, is_gpu, seconds_of

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax"),
    *("orbax-checkpoint", "numpy", "torch", "triton", "transformers", "grain"),
    *("hydra-core", "tokamax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
QUERY = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"


def machine() -> None:
    """What the figures depend on."""
    import jax

    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    emit("versions", python=platform.python_version(), cores=os.cpu_count(), **found)
    if which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        emit("card", nvidia_smi=(answer.stdout or answer.stderr).strip())
    device = jax.devices()[0]
    emit(
        "device",
        kind=device.device_kind,
        platform=device.platform,
        memory=(device.memory_stats() or {}).get("bytes_limit"),
        memories=[memory.kind for memory in device.addressable_memories()],
    )


def ceilings() -> None:
    """The bandwidth of a copy and the TFLOP/s of a matmul, by dtype."""
    machine()
    with errors_kept("ceilings", what="copy"):
        _copy()
    for dtype, precision in (
        ("bfloat16", None),
        ("float16", None),
        ("float32", None),
        ("float32", "highest"),
    ):
        with errors_kept("ceilings", what=f"matmul {dtype} {precision}"):
            _matmul(dtype, precision)
    if is_gpu():
        with errors_kept("ceilings", what="matmul fp8"):
            _fp8()


def _copy() -> None:
    """A program that reads and writes every byte once."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(2**30 if is_gpu() else 2**22, jnp.bfloat16)
    add = jax.jit(lambda x: x + jnp.bfloat16(1))
    seconds = seconds_of(lambda: add(x))
    emit("ceilings", what="copy", TB_s=round(2 * x.nbytes / seconds / 1e12, 4))


def _drawn(dtype: Any) -> Any:
    import jax

    size = 256 if QUICK else 8192
    return jax.random.normal(jax.random.key(0), (2, size, size)).astype(dtype)


def _matmul(dtype: str, precision: str | None) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    a, b = _drawn(dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    seconds = seconds_of(lambda: product(a, b), 10 if precision is None else 3)
    some = np.asarray(product(a, b)[:16], np.float64)
    exact = np.asarray(a[:16], np.float64) @ np.asarray(b, np.float64)
    emit(
        "ceilings",
        what=f"matmul {dtype} {precision or 'default'}",
        TFLOP_s=round(2 * len(a) ** 3 / seconds / 1e12, 3),
        error=float(np.linalg.norm(some - exact) / np.linalg.norm(exact)),
    )


def _fp8() -> None:
    import jax
    import jax.numpy as jnp

    a, b = _drawn(jnp.float8_e4m3fn)
    dims = (((1,), (1,)), ((), ()))

    @jax.jit
    def product(a: Any, b: Any) -> Any:
        out = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
        return out.astype(jnp.bfloat16)

    seconds = seconds_of(lambda: product(a, b))
    emit("ceilings", what="matmul fp8", TFLOP_s=round(2 * len(a) ** 3 / seconds / 1e12))
