# SPDX-License-Identifier: Apache-2.0
"""Which implementation of attention serves a call, and why another one does not."""

import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tessera as ts
from tessera import op
from tessera.analysis.flops import count as count_flops
from tessera.errors import ImplementationError
from tessera.ops.attention import flash
from tessera.ops.attention.dispatch import (
    Device,
    Operands,
    Options,
    fastest,
    unsupported_reason,
)
from tests.ops.attention import reference

CPU, TPU = Device("cpu"), Device("tpu", "TPU v5")
AMPERE = Device("cuda", "NVIDIA A100", (8, 0))
HOPPER = Device("cuda", "NVIDIA H200", (9, 0))
TURING = Device("cuda", "NVIDIA T4", (7, 5))


def operands(dtype="bfloat16", width=64, keys=32, **others):
    def made(length):
        return jax.ShapeDtypeStruct((2, 4, length, width), jnp.dtype(dtype))

    return Operands(made(32), made(keys), made(keys), **others)


def scalar():
    return jax.ShapeDtypeStruct((), jnp.int32)


CAUSAL = Options(causal=True, scale=0.125)
WINDOW = Options(causal=True, scale=0.125, window=7)
IDS = jax.ShapeDtypeStruct((2, 32), jnp.int32)
PACKED = {"segments": IDS}


def test_a_device_is_known_by_its_platform_and_capability():
    def of(platform, kind, **others):
        return Device.of(SimpleNamespace(platform=platform, device_kind=kind, **others))

    assert of("gpu", "NVIDIA H200", compute_capability="9.0") == HOPPER
    assert of("gpu", "AMD", compute_capability="gfx90a") == Device("rocm", "AMD")
    assert of("tpu", "TPU v5") == TPU
    assert Device.here().platform == "cpu"


def test_a_cpu_gets_blocks():
    assert fastest(operands("float32"), CAUSAL, CPU) == "xla"


def test_ampere_gets_cudnn():
    assert fastest(operands(), CAUSAL, AMPERE) == "cudnn"


def test_a_tpu_gets_blocks():
    assert fastest(operands(), CAUSAL, TPU) == "xla"


@pytest.mark.parametrize(
    ("given", "setting", "device", "reason"),
    [
        ({}, CAUSAL, CPU, "NVIDIA GPUs, and this call on cpu"),
        ({}, CAUSAL, TURING, "compute capability 8.0, and this is 7.5"),
        ({"dtype": "float32"}, CAUSAL, HOPPER, "bfloat16 and float16, and got float32"),
        ({"width": 160}, CAUSAL, AMPERE, "up to 128 on this device, and got 160"),
        ({"width": 264}, CAUSAL, HOPPER, "up to 256 on this device, and got 264"),
        ({"width": 60}, CAUSAL, HOPPER, "multiple of 8"),
        ({}, Options(True, 1.0, soft_cap=2.0), HOPPER, "soft_cap"),
        ({"window": scalar()}, CAUSAL, HOPPER, "before the call runs"),
        (PACKED, WINDOW, AMPERE, "packed rows needs compute capability 9.0"),
    ],
)
def test_cudnn_says_what_it_cannot_do(given, setting, device, reason):
    said = unsupported_reason("cudnn", operands(**given), setting, device)
    assert said is not None
    assert reason in said


@pytest.mark.parametrize(
    ("given", "setting", "device"),
    [
        ({}, CAUSAL, AMPERE),
        ({"dtype": "float16", "width": 128}, CAUSAL, AMPERE),
        ({"width": 256}, Options(True, 1.0, window=7), HOPPER),
        ({"keys": 48}, Options(False, 1.0), HOPPER),
        ({"width": 256, **PACKED}, WINDOW, HOPPER),
        (PACKED, WINDOW, Device("cuda", "NVIDIA B200", (10, 0))),
    ],
)
def test_cudnn_serves_what_it_can(given, setting, device):
    assert unsupported_reason("cudnn", operands(**given), setting, device) is None


def test_an_implementation_that_cannot_is_an_error_with_its_reason():
    q = jnp.ones((1, 2, 16, 8))
    with pytest.raises(ImplementationError) as caught:
        op.flash_attention(q, q, q, implementation="cudnn")
    said = str(caught.value)
    assert said.startswith(
        "[T406] implementation 'cudnn' of flash_attention cannot serve this call\n"
        "  got: cudnn runs on NVIDIA GPUs, and this call on cpu\n"
    )
    assert "use 'xla', or None for the fastest that fits" in said


def test_an_unknown_implementation_is_an_error_with_a_suggestion():
    q = jnp.ones((1, 2, 16, 8))
    with pytest.raises(ImplementationError, match="did you mean 'splash'") as caught:
        op.flash_attention(q, q, q, implementation="splahs")
    assert "has no implementation 'splahs'" in str(caught.value)


def test_the_choice_is_seen_in_the_trace():
    @ts.function
    def read(q):
        return op.flash_attention(q, q, q, causal=True)

    text = read.trace(jnp.ones((1, 2, 16, 8))).as_text()
    assert set(re.findall(r"flash_attention_(\w+)", text)) == {"xla"}


def test_the_kernels_of_cudnn_are_in_the_program_for_cuda(monkeypatch):
    """Lowered, not run: there the masks are named and no array is made for them."""
    from tessera.ops.attention import cudnn

    place = "jax._src.cudnn.fused_attention_stablehlo."
    monkeypatch.setattr(place + "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(place + "check_compute_capability", lambda _: True)
    monkeypatch.setattr(place + "is_cuda_compute_capability_equal", lambda _: False)
    call, setting = operands(), Options(True, 0.3, window=7)

    def loss(q, k, v):
        return cudnn.attend(Operands(q, k, v), setting).astype(jnp.float32).sum()

    # Half of two matmuls of 32 × 32 scores forward; in a window of 7 there are fewer.
    scores = 2 * 4 * 32 * 7 * 64
    forward = count_flops(jax.make_jaxpr(loss)(*call[:3])).matmul
    both = count_flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*call[:3])).matmul
    assert (forward, both) == (2 * 2 * scores, 7 * 2 * scores)
    for function, target in (
        (loss, "__cudnn$fmhaSoftmax"),
        (jax.grad(loss, (0, 1, 2)), "__cudnn$fmhaSoftmaxBackward"),
    ):
        traced = jax.jit(function).trace(*call[:3])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert target in text
        assert "\\22sliding_window_length\\22: 7" in text
        assert "CAUSAL" in text
        assert "32x32" not in text


@pytest.mark.parametrize("is_kernel", [True, False])
def test_a_kernel_is_given_what_autocast_makes_of_the_operands(is_kernel, monkeypatch):
    """The pass casts the matmuls of the others, which it can see."""
    monkeypatch.setattr(flash, "KERNELS", ("xla",) if is_kernel else ())
    seen = []

    @ts.function
    def read(q):
        with ts.autocast("bf16"):
            out = op.flash_attention(q, q, q, implementation="xla")
        seen.append(out.dtype)
        return out

    q = jax.random.normal(jax.random.key(0), (1, 2, 16, 8))
    text = read.trace(q).as_text()
    assert ("to bfloat16" in text or "new_dtype=bfloat16" in text) == is_kernel, text
    assert seen == [jnp.float32]
    exact = reference.attend(Operands(q, q, q), Options(False, 8**-0.5))
    assert 0 < jnp.abs(read(q) - exact).max() < 0.05


PROBE = """
import sys
import jax.numpy as jnp
from tessera import op
q, before = jnp.ones((1, 2, 8, 8)), set(sys.modules)
op.flash_attention(q, q, q)
print([name for name in set(sys.modules) - before if "pallas" in name])
"""


@pytest.mark.full
def test_on_a_cpu_it_imports_no_kernel_language():
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_kernel_leaves_out_the_sinks():
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert fastest(operands(), CAUSAL, HOPPER) == "cudnn"
    assert fastest(operands(sinks=sinks), CAUSAL, HOPPER) == "xla"
