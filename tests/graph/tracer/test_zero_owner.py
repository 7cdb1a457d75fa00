# SPDX-License-Identifier: Apache-2.0
"""Updates for one owner of each parameter, on devices that share all of them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tessera as ts
from tessera import dist
from tessera.errors import CollectiveError, StrategyError
from tessera.graph.tracer.zero_owner import OwnerRank

DRAW = np.random.default_rng(0)
WEIGHTS = {
    name: jnp.asarray(DRAW.normal(size=shape), jnp.float32)
    for name, shape in {"up": (8, 16), "down": (16, 8), "bias": (3,)}.items()
}
STATE = jax.tree.map(lambda w: {"square": w * w + 0.1}, WEIGHTS)


def updated(weight, gradient, state):
    return weight - 0.1 * gradient / jnp.sqrt(state["square"])


def update(weights, gradients, optimizer_state):
    new = {}
    for name, gradient in gradients.items():
        mesh = ts.mesh.current()
        owner = hash(name) % mesh.size
        if mesh.rank == owner:
            new[name] = updated(weights[name], gradient, optimizer_state[name])
        else:
            new[name] = dist.recv_from(owner, name)
    return new


def expected():
    return {name: updated(w, w, STATE[name]) for name, w in WEIGHTS.items()}


def assert_alike(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_device_has_the_update_of_one_device(stage, dp_mesh):
    said = {"gradients": "gradients", "optimizer_state": "optimizer_state"}
    strategy = "zero_redundancy_optimizer"
    step = ts.distribute(strategy, stage=stage, **said if stage == 1 else {})(update)
    with dp_mesh:
        new = step(WEIGHTS, WEIGHTS, STATE)
        again = step(new, WEIGHTS, STATE)  # laid out as the step takes them
    assert_alike(new, expected())
    assert step.num_programs() <= 2
    assert again["up"].sharding == new["up"].sharding
    specs = {v.name: v.spec for v in step.last.traced.graph.inputs}
    assert specs["optimizer_state/up/square"] == P(None, "dp")
    assert specs["optimizer_state/bias/square"] == P()
    assert specs["weights/up"] == (P(None, "dp") if stage == 3 else P())
    assert new["up"].sharding.spec == specs["weights/up"]


def test_without_a_mesh_all_devices_are_owners():
    step = ts.function(ts.distribute(strategy="zero_redundancy_optimizer")(update))
    assert_alike(step(WEIGHTS, WEIGHTS, STATE), expected())
    assert step.last.traced.graph.mesh.size == jax.device_count()


def test_owners_are_along_the_axis_of_the_strategy(grid_mesh):
    sizes = []

    @ts.distribute("zero_redundancy_optimizer")
    def step(weights, optimizer_state):
        mesh = ts.mesh.current()
        sizes.append((mesh.size, mesh.axes, mesh == grid_mesh, mesh.jax.shape))
        return weights

    with grid_mesh:
        step(WEIGHTS, STATE)
    assert sizes[-1] == (2, ("dp", "tp"), True, {"dp": 2, "tp": 4})
    assert dist.Mesh.of(grid_mesh.jax).rank == 0


def test_in_a_step_it_is_part_of_that_step(dp_mesh):
    inner = ts.distribute("zero_redundancy_optimizer")(update)
    with dp_mesh:
        step = ts.function(lambda w, s: inner(w, w, s))
        assert_alike(step(WEIGHTS, STATE), expected())


PROGRAM = """
import jax, jax.numpy as jnp, tessera as ts
jax.config.update("jax_num_cpu_devices", 4)

@ts.distribute("zero_redundancy_optimizer")
def update(weights, optimizer_state):
    new = {}
    for name in weights:
        if ts.mesh.current().rank == hash(name) % ts.mesh.current().size:
            new[name] = weights[name] - optimizer_state[name]
        else:
            new[name] = ts.distributed.recv_from(0, name)
    return new

trees = {name: jnp.ones(8) for name in "abcdef"}
print(update.trace(trees, trees).graph.as_text().partition("equations:")[2])
"""


@pytest.mark.full
def test_processes_whose_hashes_differ_have_one_program():
    def program(seed):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={
                **os.environ,
                "PYTHONHASHSEED": str(seed),
                "PATH": "",
                "JAX_PLATFORMS": "cpu",
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert program(1) == program(2) != ""


# --- the rank of an owner


def test_the_owners_rank_is_every_rank_that_there_is():
    rank = OwnerRank(4)
    assert [rank == other for other in (-1, 0, 3, 4)] == [False, True, True, False]
    assert [other != rank for other in (0, 4)] == [False, True]
    assert rank == OwnerRank(4)


@pytest.mark.parametrize(
    "use",
    [
        lambda rank: rank + 1,
        lambda rank: rank < 2,
        lambda rank: [1, 2][rank],
        lambda rank: jnp.asarray(rank),
        lambda rank: rank == jnp.int32(1),
        bool,
    ],
)
def test_a_rank_that_is_used_as_a_number_is_refused(use):
    with pytest.raises(StrategyError, match="compared with an owner's"):
        use(OwnerRank(4))


def test_nobody_sends_what_is_waited_for_elsewhere():
    with pytest.raises(CollectiveError) as caught:
        dist.recv_from(2, "up")
    assert str(caught.value) == (
        "[T206] no rank sends the value that recv_from(2, …) receives\n"
        "  got: name 'up'\n"
        "  fix: in a function with the strategy zero_redundancy_optimizer, write it "
        "after 'else' of 'if ts.mesh.current().rank == owner:'\n"
        "  fix: in an SPMD region, give it the array: recv_from(source, x), or use "
        "dist.broadcast(x, axis, root=source)\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T206.html"
    )
    with pytest.raises(CollectiveError, match="outside of any SPMD region"):
        dist.recv_from(2, jnp.ones(3))


def test_in_a_region_a_block_is_received(dp_mesh):
    rows = jax.device_put(
        jnp.arange(8.0), jax.sharding.NamedSharding(dp_mesh.jax, P("dp"))
    )
    received = ts.op.kernel(lambda x: dist.recv_from(3, x))
    assert received(rows).tolist() == [3.0]
