# SPDX-License-Identifier: Apache-2.0
"""Which collectives are planned, as the compilers of GPUs and TPUs write them."""

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.analysis.collective_reasons import SHARDED_STORAGE, SUM
from tessera.analysis.ledger import collectives


class OfTarget:
    """The text of a program, with the layouts of its inputs and results."""

    def __init__(self, text, mesh, inputs, outputs):
        self.as_text = lambda: text
        self.input_shardings = [NamedSharding(mesh.jax, spec) for spec in inputs]
        self.output_shardings = [NamedSharding(mesh.jax, spec) for spec in outputs]


WHOLE = "(f32[64,64], f32[64,64])"
OVER_ALL = (
    "replica_groups=[1,8]<=[8], dimensions={0}, "
    'metadata={op_name="jit(step)/dot_general"}'
)


@pytest.mark.parametrize(("other", "reason"), [("down", SHARDED_STORAGE), ("sum", "")])
def test_gathers_that_are_combined_and_asynchronous_are_followed(
    dp_mesh, other, reason
):
    """What is combined is planned if all of it is."""
    text = f"""HloModule step, num_partitions=8
ENTRY main {{
  x = f32[4,64] parameter(0)
  up = f32[8,64] parameter(1)
  down = f32[8,64] parameter(2)
  sum = f32[8,64] dot(x, up)
  s = ((f32[8,64], f32[8,64]), {WHOLE}) all-gather-start(up, {other}), {OVER_ALL}
  d = {WHOLE} all-gather-done(s)
  g = f32[64,64] get-tuple-element(d), index=0
  h = f32[64,64] get-tuple-element(d), index=1
  y = f32[4,64] dot(x, g)
  ROOT r = f32[4,64] dot(y, h)
}}"""
    program = OfTarget(text, dp_mesh, [P("dp"), P("dp"), P("dp")], [P("dp")])
    (row,) = collectives(program, dp_mesh).rows
    assert row.reason == reason


STORES = 'metadata={op_name="jit(step)/dynamic_update_slice"}'


@pytest.mark.parametrize(
    ("computed", "reason"),
    [
        ("dot(x, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}", SUM),
        ("select(p, x, x)", ""),
    ],
)
def test_a_sum_that_has_the_name_of_what_stores_it_is_one(dp_mesh, computed, reason):
    # Where an all-reduce stands for a copy, all devices but one add zeros.
    text = f"""HloModule m, num_partitions=8
ENTRY e {{
  x = f32[8,8] parameter(0), sharding={{devices=[8,1]<=[8]}}
  p = pred[8,8] constant({{...}})
  d = f32[8,8] {computed}
  c = f32[8,8] copy(d)
  ROOT r = f32[8,8] all-reduce(c), replica_groups=[1,8]<=[8], {STORES}
}}"""
    program = OfTarget(text, dp_mesh, [P("dp")], [P()])
    (row,) = collectives(program, dp_mesh).rows
    assert row.reason == reason


def test_an_all_reduce_of_which_each_device_keeps_a_part_is_marked(dp_mesh):
    text = """HloModule m, num_partitions=8
ENTRY e {
  x = f32[64,8] parameter(0)
  s = f32[64,8] all-reduce(x), replica_groups=[1,8]<=[8]
  i = u32[] partition-id()
  j = s32[] convert(i)
  z = s32[] constant(0)
  ROOT r = f32[8,8] dynamic-slice(s, j, z), dynamic_slice_sizes={8,8}
}"""
    found = collectives(text, dp_mesh)
    assert found.rows[0].keeps_slice
    assert "all-reduce, sliced" in found.as_text()
    whole = text.replace("ROOT r =", "r =").replace(
        "}\n}", "}\n  ROOT t = (f32[64,8], f32[8,8]) tuple(s, r)\n}"
    )
    assert not collectives(whole, dp_mesh).rows[0].keeps_slice
