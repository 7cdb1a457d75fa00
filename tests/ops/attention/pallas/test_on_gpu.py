# SPDX-License-Identifier: Apache-2.0
"""The kernel for Hopper on a GPU: as exact as the reference there, and tuned.

Without such a GPU every test is skipped, and says so. ``make bench-gpu`` runs them.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.attention import reference
from tessera.ops.attention.dispatch import Operands, Options
from tessera.ops.attention.pallas.block_sizes import default_for_hopper
from tessera.ops.attention.pallas.kernel_attention import attend_with
from tessera.ops.attention.pallas.tuning import (
    _backward_variants,
    _forward_variants,
)
from tests.ops.attention.exact import (
    check_as_exact_as_the_reference,
    drawn,
    with_gradients,
)


def unsupported_reason_here():
    """Why the kernel cannot run on JAX's devices; or None."""
    # Asked in this order, collecting the tests starts no backend.
    if "cuda" not in str(jax.config.jax_platforms):
        return (
            "JAX runs on the CPU; with an NVIDIA GPU: "
            "JAX_PLATFORMS=cuda,cpu pytest -m gpu (make bench-gpu does it)"
        )
    capability = str(getattr(jax.devices()[0], "compute_capability", "none"))
    if capability != "9.0":
        return f"the kernel is for Hopper, compute capability 9.0; this is {capability}"
    return None


REASON = unsupported_reason_here()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 200},
    "cap": {"causal": True, "soft_cap": 20.0},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_as_exact_as_the_reference(name, width, dtype):
    setting = Options(**{"causal": False, "scale": width**-0.5} | SETTINGS[name])
    operands, gradient = drawn(
        batch=2, heads=4, groups=2, queries=500, keys=500, width=width, dtype=dtype
    )
    check_as_exact_as_the_reference(
        lambda x: attend_with(default_for_hopper(width), x, setting),
        operands,
        setting,
        gradient,
    )


@pytest.mark.parametrize("width", [64, 128, 256])
def test_every_way_to_cut_the_work_gives_the_same_result(width):
    setting = Options(causal=True, scale=width**-0.5)
    operands, gradient = drawn(queries=768, keys=768, width=width, dtype="bfloat16")
    default = default_for_hopper(width)
    wanted = with_gradients(lambda x: reference.attend(x, setting), operands, gradient)
    for stage in (_forward_variants, _backward_variants):
        for kernel in stage(default, width):
            results = with_gradients(
                lambda x, kernel=kernel: attend_with(kernel, x, setting),
                operands,
                gradient,
            )
            for ours, theirs in zip(results, wanted, strict=True):
                ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
                np.testing.assert_allclose(ours, theirs, atol=0.06, err_msg=kernel)


def test_two_runs_give_the_same_bits():
    setting = Options(causal=True, scale=0.1)
    operands, gradient = drawn(
        batch=4, heads=8, groups=2, queries=1024, keys=1024, width=128, dtype="bfloat16"
    )
    kernel = default_for_hopper(128)
    runs = [
        with_gradients(lambda x: attend_with(kernel, x, setting), operands, gradient)
        for _ in range(2)
    ]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_long_sequences_need_memory_that_grows_with_their_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, 8, length, 128), jnp.bfloat16)
        setting = Options(causal=True, scale=0.1)

        def run(q, k, v, gradient):
            kernel = default_for_hopper(128)
            out, back = jax.vjp(
                lambda *x: attend_with(kernel, Operands(*x), setting), q, k, v
            )
            return out, back(gradient)

        compiled = jax.jit(run).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16384) <= 4.5 * temporary(4096)


def test_tuning_finds_a_kernel_that_is_kept(tmp_path):
    program = (
        "import tessera as ts; "
        "print(ts.tune_attention((1, 8, 2048, 128), dtype='bf16', rounds=3))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Hopper(")
    assert len(list((tmp_path / "tessera" / "attention").iterdir())) == 1
