# SPDX-License-Identifier: Apache-2.0
"""What a run carries from step to step: its numbers, its layouts, where they lie."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.errors import AbstractMeshError
from tessera.mesh import Mesh
from tessera.ops.loss_scale import LossScale
from tessera.train.config.optimizer_config import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
)
from tessera.train.loop.optimizers import make_optimizer
from tessera.train.loop.train_state import (
    TrainState,
    abstract_state,
    init_state,
    state_specs,
)
from tessera.train.models import DecoderModel, config_of
from tests.small_model import SMALL

MODEL = DecoderModel(SMALL)
MESH = Mesh(("dp", "fsdp", "tp"), devices=range(8), shape=(2, 2, 2))


def optimizer_of(config: OptimizerConfig) -> Any:
    return make_optimizer(config, steps=10, clip_norm=1.0)[0]


ADAMW = optimizer_of(AdamWConfig())


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its path, PartitionSpecs being leaves."""
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, P)
    )
    for path, leaf in found:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


def moments(config: OptimizerConfig) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shape and layout of every leaf of an optimizer's state that is no scalar."""
    optimizer = optimizer_of(config)
    shapes = leaves(abstract_state(MODEL, optimizer).optimizer)
    specs = dict(leaves(state_specs(MODEL, optimizer, MESH).optimizer))
    return {path: (leaf.shape, specs[path]) for path, leaf in shapes if leaf.shape}


PARAMS = {path: leaf.shape for path, leaf in leaves(MODEL.abstract())}
LAYOUTS = dict(leaves(MODEL.layouts(MESH)))


# --- layouts


@pytest.mark.parametrize(
    ("config", "copies"),
    [
        (AdamWConfig(), 2),
        (AdamConfig(), 2),
        (LionConfig(), 1),
        (SgdConfig(), 1),
        (SgdConfig(momentum=0.0), 0),
        # No dim is long enough to be factored: second moments are whole.
        (AdafactorConfig(), 1),
    ],
    ids=["adamw", "adam", "lion", "momentum", "sgd", "adafactor"],
)
def test_moments_are_laid_out_like_their_parameters(config, copies):
    found = moments(config)
    alike = {
        path: (name, value)
        for path, value in found.items()
        for name in PARAMS
        if path.endswith(f"/{name}") and value[0] == PARAMS[name]
    }
    assert len(alike) == copies * len(PARAMS)
    for path, (name, (_, spec)) in alike.items():
        assert spec == LAYOUTS[name], path
    for path in found.keys() - alike.keys():
        assert found[path][1] == P(), path
    if copies:
        assert P("tp", "fsdp") in [spec for _, spec in found.values()]


def test_factored_moments_are_replicated():
    found = moments(AdafactorConfig(least_dim_to_factor=16))
    rows = {path: v for path, v in found.items() if "/v_row/" in path}
    assert rows["1/0/v_row/decoder/mlp/up/kernel"] == ((2, 32), P())
    assert {spec for _, spec in rows.values()} == {P()}
    # What is too small to be factored keeps its whole moments, laid out like it.
    small = "decoder/attention/query_norm/scale"
    assert found[f"1/0/v/{small}"] == (PARAMS[small], LAYOUTS[small])


def test_counters_and_the_loss_scale_are_replicated():
    specs = state_specs(MODEL, ADAMW, MESH, loss_scale=LossScale.dynamic())
    assert specs.step == P()
    assert jax.tree.leaves(specs.loss_scale) == [P()] * 4
    counts = [spec for path, spec in leaves(specs.optimizer) if "count" in path]
    assert counts
    assert set(counts) == {P()}


def test_specs_are_known_for_a_mesh_that_this_machine_lacks():
    mesh = Mesh(("tp", "fsdp"), devices=range(64), shape=(2, 32))
    specs = state_specs(MODEL, ADAMW, mesh)
    assert specs.params["embedding"] == P("tp", "fsdp")


# --- shapes


def test_the_abstract_state_of_a_large_model_allocates_nothing():
    before = jax.live_arrays()  # held, so that none of them goes meanwhile
    state = abstract_state(DecoderModel(config_of("gemma3_4b")), ADAMW)
    assert len(jax.live_arrays()) == len(before)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(state)]
    counters = 3
    assert sum(sizes) == 3 * 3_880_263_168 + counters
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    assert dtypes == {"float32", "int32"}


@pytest.mark.full
def test_the_abstract_state_is_that_of_the_real_one(state):
    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    expected = abstract_state(MODEL, ADAMW)
    assert described(state) == described(expected)


# --- a fresh state


@pytest.fixture(scope="module")
def state() -> TrainState:
    return init_state(MODEL, ADAMW, jax.random.key(0), MESH)


def test_every_leaf_lies_where_its_spec_says(state):
    specs = state_specs(MODEL, ADAMW, MESH)
    placed = jax.tree.map(lambda spec: NamedSharding(MESH.jax, spec), specs)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == placed


def test_each_device_holds_its_own_shard_only(state):
    table = state.params["embedding"]
    assert {shard.data.shape for shard in table.addressable_shards} == {(32, 16)}
    (moment,) = [
        leaf for path, leaf in leaves(state.optimizer) if path.endswith("mu/embedding")
    ]
    assert {shard.data.shape for shard in moment.addressable_shards} == {(32, 16)}


def test_it_begins_at_step_zero_with_empty_moments(state):
    assert int(state.step) == 0
    assert state.step.dtype == jnp.int32
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.optimizer))


def test_the_same_key_gives_the_same_parameters_on_every_mesh(state):
    one = Mesh(("fsdp",), devices=(0,))
    alone = init_state(MODEL, ADAMW, jax.random.key(0), one)
    for here, there in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True
    ):
        # Rounding of the last bit, where the partitioner fuses differently.
        np.testing.assert_allclose(here, there, rtol=3e-7, atol=1e-9)


def test_a_mesh_of_devices_that_are_not_here_cannot_hold_a_state():
    mesh = Mesh(("fsdp",), devices=range(16))
    with pytest.raises(AbstractMeshError) as caught:
        init_state(MODEL, ADAMW, jax.random.key(0), mesh)
    assert caught.value.code == "T105"
