# SPDX-License-Identifier: Apache-2.0
"""A model whose sequences are split over ``cp`` is the model that it is elsewhere."""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tessera.errors import HeadCountError, ShardDivisibilityError
from tessera.mesh import Mesh
from tessera.ops.attention import dispatch, splash
from tessera.ops.attention.dispatch import Device
from tessera.train.models import (
    DecoderConfig,
    DecoderModel,
    Placement,
    config_of,
)
from tessera.train.models.decoder import attention_inputs
from tessera.train.models.partition_rules import NO_MESH
from tessera.train.rollouts import generate

CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=16,
    window=3,
    query_pre_attn_scalar=4,
    global_every=2,
)
KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16)).astype(np.int32)
SEGMENTS = np.repeat(np.array([[1, 2, 2, 3], [1, 1, 1, 2]], np.int32), 4, axis=1)


def mesh_of(**sizes: int) -> Mesh:
    devices = range(math.prod(sizes.values()))
    return Mesh(tuple(sizes), devices=devices, shape=tuple(sizes.values()))


@cache
def params_on_one_device() -> Any:
    return DecoderModel(CONFIG).init(KEY)


def logits(model: DecoderModel, mesh: Mesh | None, segments: Any) -> jax.Array:
    params = params_on_one_device()
    if mesh is not None:
        shardings = jax.tree.map(partial(NamedSharding, mesh.jax), model.layouts(mesh))
        params = jax.device_put(params, shardings)
    apply = jax.jit(lambda p: model.apply(p, TOKENS, segment_ids=segments, mesh=mesh))
    return apply(params)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "options", "segments"),
    [
        ({"cp": 4}, {}, None),
        ({"dp": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True}, SEGMENTS),
        ({"cp": 2, "tp": 2}, {"context_parallel": "all_to_all"}, SEGMENTS),
    ],
    ids=["ring-one segment", "ring_tp-segments", "all_to_all_tp-segments"],
)
def test_tokens_and_logits_are_in_the_order_of_the_sequence(sizes, options, segments):
    mesh, model = mesh_of(**sizes), DecoderModel(CONFIG, **options)
    got = logits(model, mesh, segments)
    want = logits(DecoderModel(CONFIG), None, segments)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert got.sharding.spec[1] == "cp"


def test_a_placement_knows_the_order_of_its_devices():
    mesh = mesh_of(dp=2, cp=2)
    ring = Placement(mesh)
    assert ring.arranged(np.arange(8)[None]).tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    assert ring.restored(ring.arranged(TOKENS)).tolist() == TOKENS.tolist()
    exchange = dataclasses.replace(ring, context_parallel="all_to_all")
    assert exchange.arranged(TOKENS) is TOKENS
    assert Placement(mesh_of(dp=2)).arrangement is None


def test_the_residual_is_split_over_cp_and_under_sequence_parallelism_over_tp():
    mesh = mesh_of(cp=2, tp=2)
    names, shape = ("batch", "sequence", None), (2, 16, 32)
    place = DecoderModel(CONFIG).place(mesh)
    assert place.resolve(names, shape, "x") == PartitionSpec(None, "cp")
    place = DecoderModel(CONFIG, sequence_parallel=True).place(mesh)
    assert place.resolve(names, shape, "x") == PartitionSpec(None, ("cp", "tp"))


@pytest.mark.full
def test_a_model_generates_where_its_parameters_are():
    model, mesh = DecoderModel(CONFIG), mesh_of(fsdp=2, cp=2)
    want = generate(
        model, params_on_one_device(), TOKENS[:1, :5], 4, KEY, temperature=0.0
    )
    params = model.init(KEY, mesh)
    got = generate(model, params, TOKENS[:1, :5], 4, KEY, temperature=0.0)
    assert got.tolist() == want.tolist()


def test_the_layout_notes_say_how_sequences_are_split():
    ring = DecoderModel(config_of("tiny"))
    (note,) = ring.layout_notes(mesh_of(cp=4))
    assert note == (
        "sequences are sharded over 'cp' in zigzag order; its 4 devices pass keys and "
        "values around a ring; local layers exchange only a halo of 63 tokens, if "
        "chunks are that long"
    )
    (note,) = ring.layout_notes(mesh_of(pp=2, cp=4))
    assert "stages gather the keys and values of its 4 devices" in note
    exchange = DecoderModel(config_of("tiny"), context_parallel="all_to_all")
    (note,) = exchange.layout_notes(mesh_of(cp=4))
    assert "exchanged for heads among its 4 devices" in note
    assert exchange.layout_notes(mesh_of(dp=4)) == [
        "context_parallel changes nothing: 'cp' has one device"
    ]
    assert ring.layout_notes(mesh_of(dp=4)) == []


def test_heads_and_sequences_that_cp_does_not_divide():
    exchange = DecoderModel(CONFIG, context_parallel="all_to_all")
    with pytest.raises(HeadCountError) as caught:
        exchange.place(mesh_of(cp=4, tp=2))
    assert str(caught.value) == (
        "[T402] all-to-all attention cannot divide the heads over mesh axis 'cp'\n"
        "  got: 2 query heads and 1 key/value heads on each device, axis size 4\n"
        "  fix: use cp 2, or the ring, which divides no heads\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T402.html"
    )
    model = DecoderModel(CONFIG)
    with pytest.raises(ShardDivisibilityError, match="16 tokens: 16 / 6 leaves 4"):
        model.apply(model.init(KEY), TOKENS, mesh=mesh_of(cp=3))


def test_each_kind_of_layer_has_a_kernel_with_a_static_window(monkeypatch):
    """As on GPUs: each kind of layer has a call of its own, with its own window."""
    q, k, v = (
        jax.random.normal(jax.random.key(n), (1, 12, heads, 4))
        for n, heads in enumerate((4, 2, 2))
    )

    def attend(is_global):
        attention = attention_inputs.layer_attention(CONFIG, 12, None, NO_MESH)
        return attention(is_global)(q, k, v)

    flags = [jnp.asarray(flag) for flag in (True, False)]
    expected = [attend(flag) for flag in flags]
    monkeypatch.setattr(attention_inputs, "_supports_traced_windows", lambda: False)
    for flag, want in zip(flags, expected, strict=True):
        np.testing.assert_allclose(jax.jit(attend)(flag), want, atol=1e-6)
    assert abs(expected[0] - expected[1]).max() > 0.1


@pytest.fixture
def on_tpu(monkeypatch):
    """Attention as on a TPU, whose kernels are interpreted."""
    interpreted = partial(splash.attend_with, max_block=128, interpret=True)
    monkeypatch.setattr(Device, "here", classmethod(lambda cls: Device("tpu")))
    monkeypatch.setattr(splash, "attend", interpreted)
    dispatch._program.cache_clear()
    yield
    dispatch._program.cache_clear()


def attention_gradients(place: Any) -> Callable[..., Any]:
    """Of a loss of a layer's attention by queries, keys and values."""

    def total(is_global: Any, *operands: Any) -> Any:
        def attend(*operands: Any) -> Any:
            *arrays, segments = operands
            select = attention_inputs.layer_attention(CONFIG, 16, segments, place)
            return (select(is_global)(*arrays) ** 2).sum()

        if not place.vmapped_axes:
            return attend(*operands)
        copies = (x.reshape(2, -1, *x.shape[1:]) for x in operands)
        return jax.vmap(attend, spmd_axis_name=("dp",))(*copies).sum()

    return jax.jit(jax.grad(total, (1, 2, 3)))


@pytest.mark.full
@pytest.mark.parametrize("vmapped", [(), ("dp",)])
def test_a_tpu_attends_in_regions_by_kernels(on_tpu, monkeypatch, vmapped):
    """XLA cannot split them, and each is compiled for one window."""
    operands = [
        jax.random.normal(jax.random.key(n), (4, 16, heads, 4))
        for n, heads in enumerate((4, 2, 2))
    ]
    operands.append(jnp.concatenate([SEGMENTS, SEGMENTS]))
    flags = [jnp.asarray(is_global) for is_global in (True, False)]
    place = Placement(mesh_of(dp=2, tp=2), vmapped_axes=frozenset(vmapped))
    step = attention_gradients(place)
    traced = step.trace(flags[0], *operands)
    kernels = re.findall(r"name=splash_mha_(fwd|dq|dkv)", str(traced.jaxpr))
    assert sorted(set(kernels)) == ["dkv", "dq", "fwd"]
    assert "all-gather" not in traced.lower().compile().as_text()
    found = [step(is_global, *operands) for is_global in flags]
    monkeypatch.undo()
    plain = attention_gradients(NO_MESH)
    expected = [plain(is_global, *operands) for is_global in flags]
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)
