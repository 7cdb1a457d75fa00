# SPDX-License-Identifier: Apache-2.0
"""The kernel for Hopper: run by JAX's interpreter of GPU kernels, and lowered for CUDA.

Neither needs a GPU. The interpreter runs every warpgroup as a thread, with barriers and
copies, and raises where two of these race; reads by wgmma it does not follow. Lowering
infers layouts, counts shared memory and writes the kernel's LLVM, as on a GPU, with
products of registers and sums that stay there.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

from tessera._jax_traces import HAS_MOSAIC_GPU_KERNELS
from tessera.ops.attention.dispatch import Device, Operands, Options
from tessera.ops.attention.pallas.block_sizes import Hopper, Tiles, default_for_hopper
from tessera.ops.attention.pallas.kernel_attention import (
    attend_with,
    unsupported_reason,
)
from tests.ops.attention.exact import (
    check_as_exact_as_the_reference,
    drawn,
    exact,
)

needs_kernels = pytest.mark.skipif(
    not HAS_MOSAIC_GPU_KERNELS, reason="this JAX is older than the kernels' language"
)
H200 = Device("cuda", "NVIDIA H200", (9, 0))


def interpreted(setting, forward=(128, 64, 2), backward=(64, 64, 2)):
    params = plgpu.InterpretGPUParams(detect_races=True)
    kernel = Hopper(Tiles(*forward), Tiles(*backward), params)
    return lambda operands: attend_with(kernel, operands, setting)


CASES = {
    "plain": ({}, {"queries": 128, "keys": 128}),
    "causal, in groups, padded heads and rows": (
        {"causal": True},
        {"queries": 120, "keys": 120, "heads": 2, "width": 80},
    ),
    "queries before the keys, which attend to nothing": (
        {"causal": True, "offset": -40},
        {"queries": 64, "keys": 64},
    ),
    "window and cap, after the keys": (
        {"causal": True, "window": 70, "soft_cap": 4.0, "offset": 100},
        {"queries": 64, "keys": 192, "dtype": "float16"},
    ),
}


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_exact_as_the_reference_and_races_with_nobody(name):
    setting, sizes = CASES[name]
    setting = Options(**{"causal": False, "scale": 0.125} | setting)
    sizes = {"heads": 1, "width": 64, "dtype": "bfloat16"} | sizes
    operands, gradient = drawn(**sizes)
    check_as_exact_as_the_reference(interpreted(setting), operands, setting, gradient)


@needs_kernels
def test_blocks_that_the_mask_empties_are_not_read():
    setting = Options(causal=True, scale=0.125)
    operands, gradient = drawn(
        heads=1, width=64, queries=128, keys=128, dtype="bfloat16"
    )
    wanted = exact(operands, setting, gradient)[0]
    operands = operands._replace(
        k=operands.k.at[:, :, 64:].set(jnp.nan), v=operands.v.at[:, :, 64:].set(jnp.nan)
    )
    out = interpreted(setting, forward=(64, 64, 2))(operands)[:, :, :64]
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, wanted[:, :, :64], atol=0.02)


def lowered_for_h200(function, *arguments):
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@pytest.mark.parametrize("width", [64, 128, 256])
def test_it_is_lowered_for_cuda_forward_and_backward(width):
    setting = Options(causal=True, scale=0.125, window=300, soft_cap=30.0)
    kernel = default_for_hopper(width)
    queries = jax.ShapeDtypeStruct((1, 4, 768, width), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 2, 768, width), jnp.bfloat16)

    def run(q, k, v, gradient):
        out, back = jax.vjp(
            lambda *x: attend_with(kernel, Operands(*x), setting), q, k, v
        )
        return out, back(gradient)

    text = lowered_for_h200(run, queries, keys, keys, queries)
    # Forward, of queries, and of keys and values: of both at once if registers allow.
    assert text.count("custom_call @mosaic_gpu") == (4 if width == 256 else 3)


@needs_kernels
def test_it_goes_with_vmap_recomputation_and_regions_that_check_what_varies():
    setting, kernel = Options(causal=True, scale=0.125), default_for_hopper(64)

    @jax.vmap
    def run(q, k, v, gradient):
        attend = jax.checkpoint(lambda *x: attend_with(kernel, Operands(*x), setting))
        out, back = jax.vjp(attend, q, k, v)
        return out, back(gradient)

    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = AbstractMesh((1,), ("dp",), axis_types=auto, abstract_device=device)
    x = jax.ShapeDtypeStruct((2, 1, 1, 256, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        region = jax.shard_map(run, in_specs=P("dp"), out_specs=P("dp"))
        traced = jax.jit(region).trace(x, x, x, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Forward once more, in the backward pass.
    assert text.count("custom_call @mosaic_gpu") == 4


@needs_kernels
def test_tiles_that_do_not_go_into_shared_memory_are_refused_when_lowered():
    kernel = Hopper(Tiles(192, 128, 3), Tiles(128, 64, 1))
    x = jax.ShapeDtypeStruct((1, 1, 768, 256), jnp.bfloat16)

    def run(q, k, v):
        return attend_with(kernel, Operands(q, k, v), Options(False, 1.0))

    with pytest.raises(ValueError, match="smem_bytes"):
        lowered_for_h200(run, x, x, x)


def test_it_says_which_calls_it_does_not_serve():
    def reason(device=H200, width=128, dtype=jnp.bfloat16, **arrays):
        x = SimpleNamespace(shape=(1, 1, 256, width), dtype=jnp.dtype(dtype))
        return unsupported_reason(
            Operands(x, x, x, **arrays), Options(True, 1.0), device
        )

    place = "the kernel for Hopper runs on GPUs of compute capability 9.0"
    assert reason(Device("cpu")) == place
    assert reason(Device("cuda", "NVIDIA B200", (10, 0))) == place
    if not HAS_MOSAIC_GPU_KERNELS:
        assert reason() == "the kernel for Hopper needs JAX 0.12"
        return
    assert reason() is None
    assert (
        reason(width=264) == "the kernel for Hopper takes heads up to 256, and got 264"
    )
    assert reason(dtype="float32") == (
        "the kernel for Hopper takes bfloat16 and float16, and got float32"
    )
    ids = jnp.zeros((1, 256), jnp.int32)
    assert reason(query_segments=ids, key_segments=ids) == (
        "the kernel for Hopper has no segment ids"
    )
    assert reason(offset=jnp.int32(1)) == (
        "the kernel for Hopper has no offset that changes from run to run"
    )
