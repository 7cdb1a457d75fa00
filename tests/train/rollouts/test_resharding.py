# SPDX-License-Identifier: Apache-2.0
"""What moves between the layouts of training and of sampling."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tessera.foundations.tree import Tree
from tessera.mesh import Mesh
from tessera.train.models import DecoderModel, config_of
from tessera.train.rollouts import Sampler
from tessera.train.rollouts.resharding import moved_bytes, reshard

SIZES = {"num_layers": 1, "d_model": 16, "mlp_dim": 16, "vocab_size": 16}
MODEL = DecoderModel(replace(config_of("tiny"), head_dim=4, **SIZES))


def mesh_of(fsdp: int, tp: int) -> Mesh:
    return Mesh(("fsdp", "tp"), devices=range(4), shape=(fsdp, tp))


def received(before: Tree, after: Tree) -> dict[int, int]:
    """By device, the elements of its new blocks that it did not have, times 4."""
    found = dict.fromkeys(range(4), 0)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        numbers = np.arange(old.size).reshape(old.shape)
        own = {
            shard.device.id: {*numbers[shard.index].ravel().tolist()}
            for shard in old.addressable_shards
        }
        for shard in new.addressable_shards:
            now = {*numbers[shard.index].ravel().tolist()}
            found[shard.device.id] += 4 * len(now - own[shard.device.id])
    return found


@pytest.mark.slow(reason="it counts the elements of a model")
def test_a_device_receives_what_it_lacks_of_its_new_blocks() -> None:
    source, target = mesh_of(4, 1), mesh_of(1, 4)
    params = MODEL.init(jax.random.key(0), source)
    moved = reshard(MODEL, params, target)
    expected = received(params, moved)
    assert moved_bytes(MODEL, source, target) == (
        sum(expected.values()),
        max(expected.values()),
    )
    assert moved_bytes(MODEL, source, source).total == 0
    for before, after in zip(
        jax.tree.leaves(params), jax.tree.leaves(moved), strict=True
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.full
def test_a_sampler_takes_parameters_of_another_mesh() -> None:
    params = MODEL.init(jax.random.key(0), mesh_of(4, 1))
    prompts, key = [[1, 2, 3], [4]], jax.random.key(0)
    sizes = {"num_tokens": 4, "max_length": 16, "slots": 4}
    made, expected = (
        Sampler(MODEL, mesh, **sizes).complete(params, prompts, key)
        for mesh in (mesh_of(1, 4), mesh_of(4, 1))
    )
    for one, other in zip(made, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
