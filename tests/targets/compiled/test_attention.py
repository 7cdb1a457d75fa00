# SPDX-License-Identifier: Apache-2.0
"""Attention for GPUs and TPUs: which kernels it becomes, and in how much memory.

XLA can be told to fail where a kernel that it compiles spills registers: its fusions,
and kernels in Triton. cuDNN's kernels are compiled already: of them no spills can be
read here.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tessera import op
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
H100, V5E, V5P, V6E = "h100:1x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"


@cache
def attention(
    target,
    width=128,
    implementation=None,
    window=None,
    soft_cap=None,
    *,
    packed=False,
    dtype="bfloat16",
):
    """The output and the gradients of causal attention; two query heads share keys."""

    def run(q, k, v, gradient, ids):
        def attend(q, k, v):
            return op.flash_attention(
                q,
                k,
                v,
                causal=True,
                window=window,
                soft_cap=soft_cap,
                segment_ids=ids if packed else None,
                implementation=implementation,
            )

        out, backward = jax.vjp(attend, q, k, v)
        return out, backward(gradient)

    queries = array(1, HEADS, LENGTH, width, dtype=dtype)
    keys = array(1, HEADS // 2, LENGTH, width, dtype=dtype)
    ids = array(1, LENGTH, dtype="int32")
    return on_one_device(target, run, queries, keys, keys, queries, ids)


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_h100_uses_cudnn_forward_and_backward(width, window):
    compiled = attention(H100, width, window=window)
    calls = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert custom_calls(compiled) == calls
    # As large as queries, keys, values and the output; scores are 8 times that.
    assert compiled.memory.temporaries < 1.1 * compiled.memory.arguments


@pytest.mark.parametrize("target", [H100, "b200:1x1"])
@pytest.mark.parametrize(("width", "window"), [(64, None), (256, 512)])
def test_packed_rows_use_cudnn(target, width, window):
    compiled = attention(target, width, window=window, packed=True)
    calls = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert custom_calls(compiled) == calls
    text = compiled.as_text()
    assert '"max_seg_per_batch": 32' in text
    assert f'"sliding_window_length": {window or 0}' in text
    # Where cuDNN cannot, XLA computes: the memory is of both.
    blocks = attention(target, width, "xla", window, packed=True).memory
    own = 6 * compiled.memory.arguments
    assert compiled.memory.temporaries < blocks.temporaries + own < SCORES


def test_a100_has_no_cudnn_for_the_widest_heads():
    assert "__cudnn$fmhaSoftmax" in custom_calls(attention("a100:1x1", 128))
    assert "__cudnn$fmhaSoftmax" not in custom_calls(attention("a100:1x1", 256))


def test_h100_needs_no_scores_without_kernels():
    compiled = attention(H100, 128, "xla")
    assert not {call for call in custom_calls(compiled) if "fmha" in call}
    assert compiled.memory.temporaries < SCORES / 2
    compile_without_spills(compiled)


def splash_kernels(compiled):
    """The names of JAX's attention kernels in a program for TPUs."""
    names = re.findall(
        r"%splash_mha_(\w+?)_(?:no_)?residuals\S* = ", compiled.as_text()
    )
    return sorted(names)


@pytest.mark.parametrize("target", [V5E, V5P, V6E])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_a_tpu_uses_splash_attention(target, width):
    compiled = attention(target, width)
    assert splash_kernels(compiled) == ["dkv", "dq", "fwd"]
    # As large as the operands, and the log-sum-exp of each query in 128 lanes.
    lanes = 4 * HEADS * LENGTH * 128
    assert compiled.memory.temporaries < 1.1 * compiled.memory.arguments + 2 * lanes


@pytest.mark.parametrize("target", [V5E, V5P, V6E])
def test_its_kernels_have_segments_a_window_and_a_cap(target):
    compiled = attention(target, 256, window=1024, soft_cap=50.0, packed=True)
    kernels = ["dkv_segmented", "dq_segmented", "fwd_segmented"]
    assert splash_kernels(compiled) == kernels


@pytest.mark.parametrize(
    ("width", "dtype"), [(512, "bfloat16"), (256, "float32"), (8, "bfloat16")]
)
def test_the_widest_and_narrowest_heads_fit_into_vector_memory(width, dtype):
    for packed in (False, True):
        settings = {"dtype": dtype, "packed": packed, "soft_cap": 50.0}
        assert splash_kernels(attention(V5E, width, **settings))


def test_a_tpu_attends_in_blocks_where_it_has_no_kernel():
    compiled = attention(V5E, 128, dtype="float16")
    assert "flash_attention_xla" in compiled.as_text()
    assert splash_kernels(compiled) == []
    assert compiled.memory.temporaries < SCORES / 3


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
