# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from tessera.analysis import hlo
from tessera.analysis.dataflow import Dataflow
from tessera.analysis.device_variance import DeviceVariance
from tessera.analysis.hlo_walk import Node, executions
from tessera.mesh import Mesh

GROUPS = {
    "tp": "replica_groups=[2,4]<=[8]",
    "dp": "replica_groups=[4,2]<=[2,4]T(1,0)",
    "half of tp": "replica_groups=[4,2]<=[8]",
}


@pytest.fixture
def mesh():
    return Mesh(["dp", "tp"], devices=range(8), shape=[2, 4])


def over(mesh, *lines, more=()):
    """The axes over which the last line's result varies; ``x`` varies over both."""
    text = [
        "HloModule m, num_partitions=8",
        *more,
        "ENTRY e {",
        "  x = f32[4,8] parameter(0)",
        "  c = f32[4,8] parameter(1)",
        *lines,
        "}",
    ]
    module = hlo.parse("\n".join(text))
    entry = module.computations["e"]
    inputs = [frozenset(("dp", "tp")), frozenset()]
    variance = DeviceVariance(Dataflow(module), mesh.shape, inputs)
    return sorted(variance.over(Node(((entry, entry.root),))))


def test_what_is_computed_varies_where_its_operands_do(mesh):
    assert over(mesh, "  ROOT r = f32[4,8] add(c, c)") == []
    assert over(mesh, "  ROOT r = f32[4,8] add(c, x)") == ["dp", "tp"]
    assert over(mesh, "  ROOT r = u32[] partition-id()") == ["dp", "tp"]


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_reduction_and_a_gather_end_it_along_their_axes(mesh, kind):
    assert over(mesh, f"  ROOT r = f32[4,8] {kind}(x), {GROUPS['tp']}") == ["dp"]
    assert over(mesh, f"  ROOT r = f32[4,8] {kind}(x), {GROUPS['dp']}") == ["tp"]


def test_a_part_of_an_axis_does_not_end_it(mesh):
    line = f"  ROOT r = f32[4,8] all-reduce(x), {GROUPS['half of tp']}"
    assert over(mesh, line) == ["dp", "tp"]


def test_what_is_scattered_varies(mesh):
    line = f"  ROOT r = f32[1,8] reduce-scatter(c), {GROUPS['tp']}, dimensions={{0}}"
    assert over(mesh, line) == ["tp"]


def test_arrays_of_a_combined_reduction_are_told_apart(mesh):
    lines = (
        f"  s = f32[4,8] all-reduce(x), {GROUPS['tp']}",
        f"  a = (f32[4,8], f32[4,8]) all-reduce(s, x), {GROUPS['tp']}",
        "  n = (f32[4,8], f32[4,8]) tuple(c, x)",
        "  ROOT r = f32[4,8] get-tuple-element(n), index=0",
    )
    assert over(mesh, *lines) == []
    assert over(mesh, *lines[:2], lines[3].replace("(n)", "(a)")) == ["dp"]


def test_a_loop_is_followed_until_nothing_changes(mesh):
    """The first element gets the second's axes in the second iteration only."""
    body = (
        "body {",
        "  p = (f32[4,8], f32[4,8], f32[4,8]) parameter(0)",
        "  b = f32[4,8] get-tuple-element(p), index=1",
        "  d = f32[4,8] get-tuple-element(p), index=2",
        "  ROOT t = (f32[4,8], f32[4,8], f32[4,8]) tuple(b, d, d)",
        "}",
    )
    lines = (
        "  t = (f32[4,8], f32[4,8], f32[4,8]) tuple(c, c, x)",
        "  w = (f32[4,8], f32[4,8], f32[4,8]) while(t), condition=body, body=body",
        "  ROOT r = f32[4,8] get-tuple-element(w), index=0",
    )
    assert over(mesh, *lines, more=body) == ["dp", "tp"]


def test_a_branch_varies_with_what_it_is_chosen_by(mesh):
    branch = ("b {", "  ROOT p = f32[4,8] parameter(0)", "}")
    line = "  ROOT r = f32[4,8] conditional({}, c, c), branch_computations={{b, b}}"
    chosen = f"  s = f32[4,8] all-reduce(x), {GROUPS['dp']}"
    assert over(mesh, chosen, line.format("c"), more=branch) == []
    assert over(mesh, chosen, line.format("s"), more=branch) == ["tp"]


def test_programs_of_this_jax_are_read(mesh):
    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(layer, x, w)[0])

    def placed(*spec):
        return NamedSharding(mesh.compile_mesh, PartitionSpec(*spec))

    arrays = (
        jax.ShapeDtypeStruct((3, 8, 8), jnp.float32, sharding=placed(None, "tp")),
        jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=placed("dp")),
    )
    compiled = jax.jit(jax.grad(loss)).lower(*arrays).compile()
    module = hlo.parse(compiled.as_text() or "")
    entry = module.computations[module.entry]
    inputs = [frozenset(["tp"]), frozenset(["dp"])]
    variance = DeviceVariance(Dataflow(module), mesh.shape, inputs)
    dots = [
        variance.over(execution)
        for execution in executions(module)
        if execution.instruction.opcode == "dot"
    ]
    assert {"dp", "tp"} in dots
    # A gradient is reduced over the batch, and as split as its parameter or not at all.
    assert variance.over(Node(((entry, entry.root),))) <= {"tp"}
