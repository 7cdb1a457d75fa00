# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose stages would wait for each other for ever is refused."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tessera.errors import StageCollectiveError
from tessera.graph.lower.stage_collectives import check_stages
from tessera.graph.pipelining.pipeline_primitive import SCOPE
from tessera.mesh import Mesh

MESH = Mesh(["pp", "tp"], devices=range(4), shape=(2, 2))
SWAP = [(0, 1), (1, 0)]


def compiled(*, inside: bool):
    """A program whose second stage alone works; it sends in the branch, or after it."""

    def device(x):
        def work(x):
            with jax.named_scope(SCOPE):
                return jax.lax.ppermute(x, "tp", SWAP) if inside else 2 * x

        x = jax.lax.cond(jax.lax.axis_index("pp") == 1, work, lambda x: x, x)
        with jax.named_scope(SCOPE):
            return x if inside else jax.lax.ppermute(x, "tp", SWAP)

    spec = P(("pp", "tp"))
    mapped = jax.shard_map(
        device, mesh=MESH.jax, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped).lower(jnp.arange(8.0)).compile()


def graph(platform="cpu"):
    return SimpleNamespace(mesh=MESH, platform=platform)


def test_a_permute_that_only_some_stages_reach_is_refused():
    with pytest.raises(StageCollectiveError, match=r"T314[\s\S]*over tp, caused at"):
        check_stages(graph(), compiled(inside=True))


def test_a_permute_that_every_device_reaches_may_stay():
    check_stages(graph(), compiled(inside=False))


def test_where_a_permute_waits_for_its_own_devices_alone_it_may_stay():
    check_stages(graph("cuda"), compiled(inside=True))
