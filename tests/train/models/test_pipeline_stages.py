# SPDX-License-Identifier: Apache-2.0
"""Layers cut into stages: which goes where, what is stored, what devices have."""

import dataclasses
import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tessera.analysis.inspection import inspect
from tessera.errors import PipelineSizeError
from tessera.mesh import Mesh
from tessera.train.config.optimizer_config import AdamWConfig
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.train_state import init_state
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.pipeline_stages import StageSplit
from tests.graph.pipelines import cases

CONFIG = DecoderConfig(
    vocab_size=64,
    d_model=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=8,
    global_every=3,
)
FIVE = dataclasses.replace(CONFIG, num_layers=5)


def mesh_of(**sizes: int) -> Mesh:
    devices = range(math.prod(sizes.values()))
    return Mesh(tuple(sizes), devices=devices, shape=tuple(sizes.values()))


def paths(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, P)
    )
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in found}


# --- which layers where


def test_layers_that_divide_are_shared_equally():
    # The logits cost less than half a layer: no other split has a quicker slowest.
    split = StageSplit.of(CONFIG, 2)
    assert split.layers == (range(2), range(2, 4))
    assert (split.chunks, split.depth, split.num_layers) == (1, 2, 4)
    assert split.is_even
    assert split.numbers.tolist() == [[[0, 1], [2, 3]]]


def test_layers_that_do_not_divide_leave_fillers():
    split = StageSplit.of(FIVE, 2)
    assert split.layers == (range(3), range(3, 5))
    assert not split.is_even
    # There is no layer 5: its place is a filler's.
    assert split.numbers.tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert split.numbers.dtype == np.int32


def test_chunks_of_a_device_are_as_many_layers_apart_as_there_are_stages():
    split = StageSplit.of(dataclasses.replace(CONFIG, num_layers=9), 2, chunks=2)
    assert split.layers == (range(3), range(3, 5), range(5, 7), range(7, 9))
    assert split.numbers.tolist() == [
        [[0, 1, 2], [3, 4, 9]],
        [[5, 6, 9], [7, 8, 9]],
    ]


def test_a_large_vocabulary_leaves_fewer_layers_to_the_last_stage():
    large = dataclasses.replace(CONFIG, num_layers=8, vocab_size=2048)
    costs, head = large.layer_costs
    # Queries, keys, values and outputs; the three matmuls of the MLP; the logits.
    layer = 16 * (2 * (4 + 2) * 8 + 3 * 32) / 1e6
    assert costs == [pytest.approx(layer)] * 8
    assert head == pytest.approx(16 * 2048 / 1e6)
    split = StageSplit.of(large, 4)
    assert split.layers == (range(3), range(3, 5), range(5, 7), range(7, 8))
    small = dataclasses.replace(large, vocab_size=64)
    assert StageSplit.of(small, 4).is_even


def test_every_expert_that_a_token_meets_counts():
    plain, _ = CONFIG.layer_costs
    experts = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=3)
    sparse, _ = experts.layer_costs
    router, two_more = 16 * 4, 2 * 16 * 3 * 32
    assert sparse[0] - plain[0] == pytest.approx((router + two_more) / 1e6)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PipelineSizeError) as caught:
        StageSplit.of(CONFIG, 4, chunks=2)
    assert str(caught.value) == (
        "[T311] a pipeline has fewer layers than stages, so that a stage would be "
        "empty\n"
        "  got: 4 layers, 8 stages\n"
        "  fix: use at most 4 stages (devices x chunks), or at least 8 layers\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


# --- how they are stored


@settings(max_examples=12)  # each compiles
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=12))
@pytest.mark.full
def test_what_is_stacked_comes_back(stages, chunks, lengths):
    ends = np.cumsum([0, *lengths[: stages * chunks]]).tolist()
    runs = tuple(range(a, b) for a, b in pairwise(ends))
    split = StageSplit(stages, runs)
    layers = np.arange(1, ends[-1] * 2 + 1, dtype=np.float32).reshape(-1, 2)
    stored = split.stack({"kernel": jnp.asarray(layers)})["kernel"]
    assert stored.shape == split.shape(layers.shape)
    assert stored.shape == (chunks, stages, split.depth, 2)
    for k, run in enumerate(runs):
        mine = np.asarray(stored[k // stages, k % stages])
        np.testing.assert_array_equal(mine[: len(run)], layers[run.start : run.stop])
        assert not mine[len(run) :].any(), "a filler is zeros"
    back = split.unstack({"kernel": stored})["kernel"]
    np.testing.assert_array_equal(back, layers)


# --- the model with stages

SPLITS = {
    "even": (CONFIG, {"pp": 2}, 1),
    "uneven": (FIVE, {"pp": 4}, 1),
    "chunks": (FIVE, {"pp": 2}, 2),
    "all_axes": (FIVE, {"pp": 2, "fsdp": 2, "tp": 2}, 1),
    "other_order": (CONFIG, {"dp": 2, "tp": 2, "pp": 2}, 2),
}


@pytest.mark.full
@pytest.mark.parametrize("case", cases(SPLITS, "uneven"))
def test_parameters_are_those_of_the_plain_model_whatever_the_stages(case):
    config, shape, chunks = SPLITS[case]
    mesh = mesh_of(**shape)
    model = DecoderModel(config, split=StageSplit.of(config, shape["pp"], chunks))
    params = model.init(jax.random.key(0), mesh)
    for path, want in paths(model.abstract()).items():
        got = paths(params)[path]
        assert (got.shape, got.dtype) == (want.shape, want.dtype), path
        assert got.sharding.spec == paths(model.layouts(mesh))[path], path
    plain = paths(DecoderModel(config).init(jax.random.key(0)))
    back = paths(model.plain(jax.device_get(params)))
    assert back.keys() == plain.keys()
    for path, want in plain.items():
        np.testing.assert_allclose(back[path], want, rtol=1e-6, atol=1e-7, err_msg=path)
    again = paths(model.stored(model.plain(jax.device_get(params))))
    for path, want in paths(params).items():
        np.testing.assert_array_equal(again[path], want, err_msg=path)


def test_the_dim_of_stages_is_split_over_pp_and_others_as_without():
    model = DecoderModel(FIVE, split=StageSplit.of(FIVE, 2))
    layouts = paths(model.layouts(mesh_of(pp=2, fsdp=2, tp=2)))
    plain = paths(DecoderModel(FIVE).layouts(mesh_of(fsdp=2, tp=2)))
    for path, spec in layouts.items():
        if path.startswith("decoder/"):
            assert tuple(spec) == (None, "pp", *plain[path]), path
    # Both ends read the table: each device stores a part of it.
    assert layouts["embedding"] == P("tp", ("fsdp", "pp"))
    assert layouts["final_norm/scale"] == plain["final_norm/scale"]


def test_a_table_that_pp_does_not_divide_is_whole_and_the_notes_say_so():
    narrow = dataclasses.replace(CONFIG, d_model=18)
    mesh = mesh_of(pp=4)
    model = DecoderModel(narrow, split=StageSplit.of(narrow, 4))
    assert model.layouts(mesh)["embedding"] == P()
    assert model.layout_notes(mesh) == [
        "the embedding table is replicated over 'pp', which does not divide d_model 18"
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "shape", "share"),
    [
        pytest.param(CONFIG, {"pp": 4}, 1 / 4, marks=pytest.mark.full),
        (CONFIG, {"dp": 2, "pp": 2}, 1 / 2),
        # Five layers in three and two: room for six.
        pytest.param(FIVE, {"pp": 2}, 1 / 2 * 6 / 5, marks=pytest.mark.full),
    ],
)
def test_each_device_stores_its_own_stages_and_their_optimizer_state(
    config, shape, share
):
    mesh = mesh_of(**shape)
    model = DecoderModel(config, split=StageSplit.of(config, shape["pp"]))
    optimizer, _ = make_optimizer(AdamWConfig(), steps=10)
    state = init_state(model, optimizer, jax.random.key(0), mesh)

    def decoder(tree: Any) -> list[Any]:
        return [leaf for path, leaf in paths(tree).items() if "decoder/" in path]

    whole = sum(
        math.prod(leaf.shape) * 4
        for leaf in jax.tree.leaves(DecoderModel(config).abstract()["decoder"])
    )
    assert inspect(decoder(state.params)).local_nbytes == share * whole
    assert inspect(decoder(state.optimizer)).local_nbytes == 2 * share * whole
    # Not by its layout alone: what lies on a device are the layers of its stage.
    stored = state.params["decoder"]["mlp"]["up"]["kernel"]
    plain = paths(DecoderModel(config).init(jax.random.key(0)))["decoder/mlp/up/kernel"]
    stages = mesh.axes.index("pp")
    for place, device in np.ndenumerate(mesh.jax.devices):
        (block,) = (s.data for s in stored.addressable_shards if s.device == device)
        run = model.split.layers[place[stages]]
        mine = np.asarray(block)[0, 0, : len(run)]
        np.testing.assert_allclose(mine, plain[run.start : run.stop], atol=1e-6)
