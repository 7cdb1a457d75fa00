# SPDX-License-Identifier: Apache-2.0
"""What tokamax's kernels are asked for; on a GPU, ``test_on_gpu`` runs them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.ops.attention import pallas
from tessera.ops.attention.dispatch import (
    Device,
    Operands,
    Options,
    fastest,
    unsupported_reason,
)
from tests.ops.attention.exact import check_as_exact_as_the_reference, drawn

H200 = Device("cuda", "NVIDIA H200", (9, 0))
IDS = jax.ShapeDtypeStruct((2, 32), jnp.int32)
CAUSAL = Options(causal=True, scale=0.125)
CAPPED = Options(causal=True, scale=0.125, soft_cap=20.0)


def operands(dtype="bfloat16", width=64, keys=32, **others):
    def made(length):
        return jax.ShapeDtypeStruct((2, 4, length, width), jnp.dtype(dtype))

    return Operands(made(32), made(keys), made(keys), **others)


@pytest.fixture
def on_h200(monkeypatch):
    """As on a machine with such a GPU and tokamax."""
    monkeypatch.setattr(pallas, "_is_installed", lambda: True)
    monkeypatch.setattr(pallas, "_device_of_machine", lambda: H200)


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("given", "setting", "device", "reason"),
    [
        ({}, CAUSAL, Device("cpu"), "run on Hopper and Blackwell"),
        ({}, CAUSAL, Device("cuda", "NVIDIA A100", (8, 0)), "on Hopper and Blackwell"),
        ({}, CAUSAL, Device("cuda", "NVIDIA H100", (9, 0)), "this is another"),
        ({"dtype": "float32"}, CAUSAL, H200, "bfloat16 and float16, and got float32"),
        ({"width": 264}, CAUSAL, H200, "up to 256, and got 264"),
        ({"width": 60}, CAUSAL, H200, "multiple of 8"),
        ({"query_segments": IDS, "key_segments": IDS}, CAUSAL, H200, "no segment ids"),
        ({}, Options(True, 1.0, offset=3), H200, "no query_offset"),
        ({"keys": 48}, CAUSAL, H200, "as many queries as keys"),
    ],
)
def test_it_says_what_it_cannot_do(given, setting, device, reason):
    said = unsupported_reason("pallas", operands(**given), setting, device)
    assert said is not None
    assert reason in said


def test_without_tokamax_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(pallas, "_is_installed", lambda: False)
    said = unsupported_reason("pallas", operands(), CAPPED, H200)
    assert said == "tokamax is not installed: pip install 'tessera-spmd[kernels]'"


@pytest.mark.usefixtures("on_h200")
def test_it_serves_what_asks_for_it_by_name_alone():
    assert unsupported_reason("pallas", operands(), CAPPED, H200) is None
    assert unsupported_reason("cudnn", operands(), CAPPED, H200) is not None
    assert fastest(operands(), CAPPED, H200) == "xla"


def plain_attention(q, k, v, **asked):
    """What tokamax documents of its function, written out: ``[B, S, H, D]``."""
    assert asked.pop("implementation") == "mosaic"
    window, cap = asked.pop("local_window_size"), asked.pop("logits_soft_cap")
    scale, is_causal = asked.pop("scale"), asked.pop("is_causal")
    assert not asked
    k, v = (x.repeat(q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    behind = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    left, right = (len(behind), len(behind)) if window is None else window
    seen = (behind <= left) & (behind >= -right)
    if is_causal:
        seen &= behind >= 0
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhst,bthd->bshd", weights, v)


@pytest.mark.parametrize(
    "setting",
    [
        Options(causal=False, scale=0.3),
        Options(causal=True, scale=0.25, soft_cap=2.0),
        Options(causal=True, scale=0.25, window=7, soft_cap=2.0),
        Options(causal=True, scale=0.25, window=1),
    ],
)
def test_tokamax_is_asked_for_the_attention_of_the_call(setting, monkeypatch):
    stand_in = SimpleNamespace(dot_product_attention=plain_attention)
    monkeypatch.setattr(pallas, "_tokamax", lambda: stand_in)
    arrays, gradient = drawn(heads=4, groups=2, queries=24, keys=24)
    check_as_exact_as_the_reference(
        lambda operands: pallas.attend(operands, setting), arrays, setting, gradient
    )
