# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of single operations, counted by hand from their shapes."""

import pytest

from tessera.analysis.hlo import parse
from tessera.analysis.timeline.operation_work import is_free, work

PARAMETERS = """
  a = bf16[4,8] parameter(0)
  b = bf16[8,16] parameter(1)
  table = f32[1000,8] parameter(2)
  i = s32[] parameter(3)
  row = f32[1,8] parameter(4)
"""
READS_OF_AB = 2 * (4 * 8 + 8 * 16)


def entry_of(line, fused=""):
    module = parse(f"HloModule m\n{fused}\nENTRY e {{{PARAMETERS}  ROOT r = {line}\n}}")
    return module, module.computations[module.entry]


def work_of(line, fused=""):
    module, entry = entry_of(line, fused)
    return work(module, entry, entry.root)


DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
CUBLAS = (
    'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"]}}}'
)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        (f"f32[4,16] dot(a, b), {DOT}", 4 * 64),
        # A call of cuBLAS also has a workspace.
        (f"(f32[4,16], s8[100]) custom-call(a, b), {CUBLAS}", 4 * 64 + 100),
    ],
    ids=["dot", "cuBLAS"],
)
def test_a_matmul_has_two_flops_for_each_product(line, written):
    found = work_of(line)
    assert found.kind == "matmul"
    assert found.products == (("bfloat16", 2.0 * 4 * 16 * 8),)
    assert found.nbytes == READS_OF_AB + written


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("f32", "float32"), ("f8e4m3fn", "float8"), ("f8e5m2", "float8")],
)
def test_the_dtype_of_the_operands_decides_at_which_peak_a_matmul_runs(dtype, name):
    fused = f"f {{\n  p = {dtype}[4,8] parameter(0)\n  ROOT d = f32[4,4] dot(p, p), "
    fused += "lhs_contracting_dims={1}\n}"
    found = work_of("f32[4,4] fusion(a), kind=kCustom, calls=f", fused)
    assert found.products == ((name, 2.0 * 4 * 4 * 8),)


def test_a_fusion_counts_the_matmul_and_the_elementwise_operations_in_it():
    fused = f"""f {{
  p = bf16[4,8] parameter(0)
  q = bf16[8,16] parameter(1)
  d = f32[4,16] dot(p, q), {DOT}
  t = f32[4,16] tanh(d)
  ROOT s = f32[4,16] add(t, t)
}}"""
    found = work_of("f32[4,16] fusion(a, b), kind=kCustom, calls=f", fused)
    assert found.products == (("bfloat16", 1024.0),)
    assert found.elementwise == 2 * 64
    assert found.nbytes == READS_OF_AB + 4 * 64


def test_a_fusion_reads_of_a_table_only_the_rows_that_it_slices():
    fused = """f {
  p = f32[1000,8] parameter(0)
  n = s32[] parameter(1)
  z = s32[] constant(0)
  c = f32[1,8] dynamic-slice(p, n, z), dynamic_slice_sizes={1,8}
  ROOT s = f32[1,8] negate(c)
}"""
    found = work_of("f32[1,8] fusion(table, i), kind=kLoop, calls=f", fused)
    assert found.nbytes == 32 + 4 + 32


def test_an_update_in_place_writes_only_the_update():
    fused = """f {
  p = f32[1000,8] parameter(0)
  n = s32[] parameter(1)
  u = f32[1,8] parameter(2)
  z = s32[] constant(0)
  ROOT s = f32[1000,8] dynamic-update-slice(p, u, n, z)
}"""
    found = work_of("f32[1000,8] fusion(table, i, row), kind=kLoop, calls=f", fused)
    assert found.nbytes == 4 + 32 + 32
    alone = work_of("f32[1000,8] dynamic-update-slice(table, row, i, i)")
    assert alone.nbytes == 2 * 32


def test_an_update_of_what_the_fusion_makes_writes_all_of_it():
    fused = """f {
  u = f32[1,8] parameter(0)
  z = s32[] constant(0)
  o = f32[] constant(0)
  p = f32[1000,8] broadcast(o), dimensions={}
  ROOT s = f32[1000,8] dynamic-update-slice(p, u, z, z)
}"""
    found = work_of("f32[1000,8] fusion(row), kind=kLoop, calls=f", fused)
    assert found.nbytes == 32 + 32_000


def fmha(target, mask):
    return (
        f'(f32[2,4,64,16], u8[0]) custom-call(a, b), custom_call_target="{target}", '
        'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":'
        '{"element_type":"BF16","dimensions":["2","4","64","32"]},'
        f'"mask_type":"{mask}"}}}}'
    )


@pytest.mark.parametrize(
    ("target", "mask", "flops"),
    [
        # Two matmuls of [64, D] and [D, 32] forward, five backward, for 2 × 4 heads.
        ("__cudnn$fmhaSoftmax", "NO_MASK", 4),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 10),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 2),
        ("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 5),
    ],
)
def test_attention_of_cudnn_is_counted_from_its_scores(target, mask, flops):
    found = work_of(fmha(target, mask))
    # The queries are [2, 4, 64, D]; here D is 4 · 8 / (2 · 4 · 64).
    assert found.kind == "attention"
    assert found.products == (("bfloat16", flops * 2 * 4 * 64 * 32 * (32 / 512)),)


@pytest.mark.parametrize(("kernel", "matmuls"), [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_splash_attention_is_counted_from_the_blocks_that_it_visits(kernel, matmuls):
    module = parse(f"""HloModule m
ENTRY e {{
  t = s8[1,8,8] parameter(0)
  q = bf16[2,4,64,16] parameter(1)
  k = bf16[2,2,32,16] parameter(2)
  ROOT r = bf16[2,4,64,16] custom-call(t, t, q, k, k), \
custom_call_target="tpu_custom_call", metadata={{op_name=\
"jit(f)/tessera_visits_3_of_8/jit(_splash_attention)/splash_mha_{kernel}_residuals"}}
}}""")
    entry = module.computations["e"]
    found = work(module, entry, entry.root)
    assert found.kind == "attention"
    everything = 2 * 4 * 64 * 32 * 16 * 2 * matmuls
    assert found.products == (("bfloat16", everything * 3 / 8),)


def test_a_convolution_sums_over_the_window_and_the_input_features():
    lines = """HloModule m
ENTRY e {
  x = bf16[2,10,3] parameter(0)
  k = bf16[5,3,7] parameter(1)
  ROOT r = bf16[2,10,7] convolution(x, k), window={size=5}, dim_labels=b0f_0io->b0f
}"""
    module = parse(lines)
    entry = module.computations["e"]
    found = work(module, entry, entry.root)
    assert found.products == (("bfloat16", 2.0 * (2 * 10 * 7) * (5 * 3)),)


@pytest.mark.parametrize(
    ("line", "free"),
    [
        ("bf16[8,4] bitcast(a)", True),
        ('f32[8] custom-call(), custom_call_target="AllocateBuffer"', True),
        ('f32[8] custom-call(a), custom_call_target="mosaic_gpu"', False),
        ("bf16[4,8] copy(a)", False),
    ],
)
def test_what_only_names_a_value_is_free(line, free):
    _, entry = entry_of(line)
    assert is_free(entry.root) == free
