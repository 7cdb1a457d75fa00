# SPDX-License-Identifier: Apache-2.0
"""What every device computes whole, for H100s: the kernels of two are those of four."""

import re
from collections import Counter
from functools import partial
from random import Random

import jax
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera.ops.operand_layouts import region_mesh
from tessera.targets.target import Target
from tessera.tracing.scope import round_alike
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.deterministic_sums import optimization_barrier
from tests.fuzz.layer_chains import LAYERS, WIDTH, drawn_loss
from tests.targets.compiled.programs import array, only_in_test_targets

pytestmark = only_in_test_targets

_WHERE = re.compile(r', (metadata|backend_config)=\{.*|, scheduling_name="[^"]*"')
_NAME = re.compile(r"%[\w.\-]+")


def kernels(devices, seed):
    """The computations of a drawn loss's gradient, without names."""
    mesh = mesh_of_shape([[devices], ["dp"]], target=Target.parse(f"h100:1x{devices}"))
    differentiated = jax.value_and_grad(drawn_loss(Random(seed)), has_aux=True)

    def step(weights, x):
        round_alike()
        whole = jax.shard_map(
            partial(optimization_barrier, differentiated),
            mesh=region_mesh(mesh),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        return whole(weights, x)

    function = ts.function(step, mesh=mesh, in_specs={"x": P("dp")})
    text = function.compile(array(LAYERS, WIDTH, WIDTH), array(64, WIDTH)).jax.as_text()
    computations = (c.strip() for c in text.split("\n\n"))
    return Counter(unnamed(c) for c in computations if c.startswith("%fused"))


def unnamed(computation):
    names: dict[str, str] = {}
    lines = _WHERE.sub("", computation).split("\n")[1:]
    return _NAME.sub(
        lambda name: names.setdefault(name[0], f"%{len(names)}"), "\n".join(lines)
    )


@pytest.mark.parametrize("seed", range(6))
def test_meshes_of_several_devices_have_the_same_kernels(seed):
    alike = kernels(2, seed)
    assert sum(alike.values()) > 5
    assert kernels(4, seed) == alike
