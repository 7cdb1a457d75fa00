# SPDX-License-Identifier: Apache-2.0
"""Attention for GPUs and TPUs: which kernels it becomes, and in how much memory.

XLA can be told to fail where a kernel that it compiles spills registers: its fusions,
and kernels in Triton. cuDNN's kernels are compiled already, and Tessera's own, in
Mosaic GPU, are compiled where they run: of them no spills can be read here.
"""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tessera import op
from tessera._jax_traces import HAS_MOSAIC_GPU_KERNELS
from tests.targets.compiled.programs import (
    array,
    compile_without_spills,
    custom_calls,
    on_one_device,
    only_in_test_targets,
)

pytestmark = only_in_test_targets

HEADS, LENGTH = 8, 4096
SCORES = 4 * HEADS * LENGTH**2  # bytes in f32
H100, V5E, V5P = "h100:1x1", "v5e:2x2", "v5p:2x2x1"


@cache
def attention(target, width=128, implementation=None, window=None):
    """The output and the gradients of causal attention."""

    def attend(q, k, v):
        settings = {"causal": True, "window": window, "implementation": implementation}
        return op.flash_attention(q, k, v, **settings)

    def run(q, k, v, gradient):
        out, backward = jax.vjp(attend, q, k, v)
        return out, backward(gradient)

    operand = array(1, HEADS, LENGTH, width)
    return on_one_device(target, run, *[operand] * 4)


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_h100_uses_cudnn_forward_and_backward(width, window):
    compiled = attention(H100, width, window=window)
    calls = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert custom_calls(compiled) == calls
    # As large as queries, keys, values and the output; scores are 8 times that.
    assert compiled.memory.temporaries < 1.1 * compiled.memory.arguments


def test_a100_has_no_cudnn_for_the_widest_heads():
    assert "__cudnn$fmhaSoftmax" in custom_calls(attention("a100:1x1", 128))
    assert "__cudnn$fmhaSoftmax" not in custom_calls(attention("a100:1x1", 256))


@pytest.mark.skipif(not HAS_MOSAIC_GPU_KERNELS, reason="the kernels need JAX 0.12")
@pytest.mark.parametrize("width", [64, 128, 256])
def test_h100_uses_our_kernels_where_they_are_asked_for(width):
    compiled = attention(H100, width, "pallas")
    (call,) = custom_calls(compiled)
    assert call.startswith("mosaic_gpu")
    assert compiled.memory.temporaries < SCORES / 12


def test_h100_needs_no_scores_without_kernels():
    compiled = attention(H100, 128, "xla")
    assert not {call for call in custom_calls(compiled) if "fmha" in call}
    assert compiled.memory.temporaries < SCORES / 2
    compile_without_spills(compiled)


@pytest.mark.parametrize("target", [V5E, V5P])
@pytest.mark.parametrize("width", [128, 256])
def test_a_tpu_attends_in_blocks(target, width):
    compiled = attention(target, width)
    assert "flash_attention_xla" in compiled.as_text()
    assert not {call for call in custom_calls(compiled) if "kernel" in call}
    assert compiled.memory.temporaries < SCORES / 3


def test_the_reference_needs_the_scores():
    compiled = attention(H100, 128, "reference")
    assert compiled.memory.temporaries >= SCORES


def test_a_kernel_that_spills_registers_is_refused():
    def kernel(x, out):
        exponentials = jnp.exp(x[...]) * x[...].sum(axis=0, keepdims=True)
        out[...] = exponentials.sum(axis=1, keepdims=True) * exponentials + x[...]

    def run(x):
        # 16,384 numbers in the registers of 32 threads, which have 255 each.
        one_warp = triton.CompilerParams(num_warps=1, num_stages=1)
        return pl.pallas_call(kernel, out_shape=x, compiler_params=one_warp)(x)

    compiled = on_one_device(H100, run, array(128, 128, dtype="float32"))
    assert custom_calls(compiled) == {"__gpu$xla.gpu.triton"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_without_spills(compiled)
