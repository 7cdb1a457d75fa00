# SPDX-License-Identifier: Apache-2.0
import pytest

from tessera.analysis.hlo import parse
from tessera.analysis.windowed_matmuls import windowed_kinds

MATMUL = 'metadata={op_name="jit(step)/mlp/dot_general" stack_frame_id=178}'
OTHER = MATMUL.replace("178", "180")


def program(body):
    return parse(f"""HloModule m
{body} {{
  x = f32[4] parameter(0)
  ROOT inside = f32[4] collective-permute(x), source_target_pairs={{{{0,1}}}}, {MATMUL}
}}

ENTRY e {{
  x = f32[4] parameter(0)
  before = f32[4] collective-permute(x), source_target_pairs={{{{0,1}}}}, {MATMUL}
  w = f32[4] while(before), condition=c, body={body}, {MATMUL}
  other = f32[4] collective-permute(w), source_target_pairs={{{{0,1}}}}, {OTHER}
  ROOT bare = f32[4] collective-permute(other), source_target_pairs={{{{0,1}}}}
}}""")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("wide.windowed_dot_general_body_ag.1.clone.sunk", "all-gather"),
        ("windowed_dot_general_body_rs", "reduce-scatter"),
        ("region_3.21", None),
    ],
)
def test_the_permutes_of_a_windowed_matmul_are_known_by_its_line(body, kind):
    module = program(body)
    found = windowed_kinds(module)
    kinds = {
        instruction.name: found.get(instruction.attributes.get("metadata", ""))
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "collective-permute"
    }
    assert kinds == {"inside": kind, "before": kind, "other": None, "bare": None}
