# SPDX-License-Identifier: Apache-2.0
"""A model with experts: parameters, layouts and router statistics."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from tessera.errors import ModelShapeError, ShardDivisibilityError
from tessera.mesh import Mesh
from tessera.ops.moe.experts import Weights
from tessera.ops.moe.routing import RoutingOptions
from tessera.train.models import DecoderModel, config_of
from tessera.train.models.decoder.layers import MLP
from tessera.train.models.partition_rules import NO_MESH
from tests.ops.moe.reference import reference

CONFIG = dataclasses.replace(
    config_of("moe_tiny"), num_layers=2, window=4, global_every=2
)
MODEL = DecoderModel(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 264, (4, 8), np.int32)


def mesh_of(**sizes: int) -> Mesh:
    devices = range(math.prod(sizes.values()))
    return Mesh(tuple(sizes), devices=devices, shape=tuple(sizes.values()))


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


def test_experts_stand_in_the_place_of_the_mlp():
    block = MODEL.abstract()["decoder"]
    assert "mlp" not in block
    assert {name: leaf.shape for name, leaf in block["experts"].items()} == {
        "router": (2, 128, 8),
        "gate": (2, 8, 128, 128),
        "up": (2, 8, 128, 128),
        "down": (2, 8, 128, 128),
    }


def test_experts_are_split_over_ep_and_each_of_them_over_fsdp_and_tp():
    layouts = MODEL.layouts(mesh_of(fsdp=2, ep=2, tp=2))["decoder"]["experts"]
    assert {name: tuple(spec) for name, spec in layouts.items()} == {
        "router": (None, "fsdp"),
        "gate": (None, "ep", "fsdp", "tp"),
        "up": (None, "ep", "fsdp", "tp"),
        "down": (None, "ep", "tp", "fsdp"),
    }
    two_levels = MODEL.layouts(mesh_of(ep_outer=2, ep=2))["decoder"]["experts"]
    assert two_levels["gate"] == jax.P(None, ("ep_outer", "ep"))


def test_the_batch_is_split_over_ep_as_over_dp():
    assert MODEL.place(mesh_of(dp=2, ep=4)).axes("batch") == ("dp", "ep")


@pytest.mark.full
def test_initial_experts_differ_and_have_the_variance_of_a_dense_mlp():
    config = dataclasses.replace(CONFIG, mlp_dim=256)
    gate = np.asarray(
        DecoderModel(config).init(jax.random.key(0))["decoder"]["experts"]["gate"]
    )
    assert len(np.unique(gate.reshape(16, -1)[:, 0])) == 16
    np.testing.assert_allclose(gate.std(axis=(2, 3)), 128**-0.5, rtol=0.02)


@pytest.mark.full
def test_one_layer_computes_what_the_reference_computes(params):
    # As the scan over layers does it: the module with one layer's slice.
    graphdef, state = nnx.split(MODEL.merge(params).decoder)
    experts = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state)).experts
    weights = Weights(*(getattr(experts, name)[...] for name in Weights._fields[:4]))
    x = jax.random.normal(jax.random.key(1), (2, 4, 128))
    names = ("batch", None, None)
    out, _ = nnx.jit(lambda experts, x: experts(x, NO_MESH, names))(experts, x)
    wanted = reference(x, weights, RoutingOptions(top_k=2))
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def statistics_of(model, params):
    batch = {
        "tokens": TOKENS,
        "positions": jnp.arange(TOKENS.shape[1])[None],
        "segment_ids": None,
    }
    hidden = model.embed(params, batch, NO_MESH)
    return model.run_blocks(params, hidden, batch, NO_MESH)[1]


@pytest.mark.full
def test_every_layer_has_router_statistics(params):
    statistics = jax.jit(partial(statistics_of, MODEL))(params)
    assert {name: value.shape for name, value in statistics.items()} == {
        "load_balancing_loss": (2,),
        "z_loss": (2,),
        "entropy": (2,),
        "tokens_per_expert": (2, 8),
    }
    assert (statistics["tokens_per_expert"].sum(axis=1) == 4 * 8 * 2).all()


def test_a_model_without_experts_has_no_router_statistics():
    config = dataclasses.replace(CONFIG, num_experts=0)
    model = DecoderModel(config)
    module = model.merge(model.abstract())
    assert isinstance(module.decoder.mlp, MLP)
    assert not hasattr(module.decoder, "experts")
    assert jax.eval_shape(partial(statistics_of, model), model.abstract()) == {}


def test_a_token_computes_a_part_of_the_parameters():
    unused = 2 * 6 * 3 * 128 * 128
    assert MODEL.num_active_params == MODEL.num_params - unused
    dense = DecoderModel(config_of("tiny"))
    assert dense.num_active_params == dense.num_params


# --- mistakes


def test_more_experts_for_a_token_than_there_are_is_an_error():
    with pytest.raises(ModelShapeError) as caught:
        dataclasses.replace(CONFIG, num_experts=4, experts_per_token=6)
    assert str(caught.value) == (
        "[T405] these sizes do not make a model\n"
        "  got: experts_per_token = 6, num_experts = 4\n"
        "  fix: use experts_per_token 4 or less\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T405.html"
    )


def test_a_negative_weight_of_a_loss_is_an_error():
    with pytest.raises(ModelShapeError, match="use router_z_weight 0 or more"):
        dataclasses.replace(CONFIG, router_z_weight=-0.1)
    assert dataclasses.replace(CONFIG, router_z_weight=0.0).router_z_weight == 0


def test_experts_that_ep_does_not_divide_are_an_error():
    model = DecoderModel(dataclasses.replace(CONFIG, num_experts=6))
    with pytest.raises(ShardDivisibilityError, match="decoder/experts/gate"):
        model.layouts(mesh_of(ep=4))


@pytest.mark.full
def test_on_a_mesh_the_logits_are_the_same(params):
    mesh = mesh_of(ep_outer=2, ep=2, tp=2)
    want = jax.jit(MODEL.apply)(params, TOKENS)
    shardings = jax.tree.map(partial(NamedSharding, mesh.jax), MODEL.layouts(mesh))
    sharded = jax.device_put(params, shardings)
    got = jax.jit(lambda p: MODEL.apply(p, jnp.asarray(TOKENS), mesh=mesh))(sharded)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5)
