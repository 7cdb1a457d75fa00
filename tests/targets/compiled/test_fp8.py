# SPDX-License-Identifier: Apache-2.0
"""``training.mixed_precision=fp8`` in programs for H100: matmuls and collectives."""

from collections import Counter

import jax
import pytest

from tessera.analysis.hlo import parse
from tessera.train.models.decoder.fp8_matmul import fp8_tensordot
from tests.targets.compiled.programs import (
    H100,
    MATRICES,
    NUM_LAYERS,
    array,
    dtypes,
    on_one_device,
    only_in_test_targets,
    rows,
    trainer_step,
)

pytestmark = only_in_test_targets

E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
PROJECTIONS = 7


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp"])
def test_the_three_products_of_each_projection_have_8_bit_operands(layout):
    compiled = trainer_step(H100, layout, "fp8")
    found = Counter(
        tuple(sorted(shape.dtype for shape in computation.operand_shapes(each)))
        for computation in parse(compiled.as_text()).computations.values()
        for each in computation.instructions.values()
        if each.opcode == "dot"
    )
    # Forward, and again for the backward pass, which begins before its loop and so has
    # everything twice; a pipeline's stage has one more.
    times = 4 if layout == "pp" else 3
    assert found[E4M3, E4M3] == times * PROJECTIONS
    assert found[E4M3, E5M2] == 2 * 2 * PROJECTIONS
    # Of the logits and their gradients.
    assert found.keys() == {(E4M3, E4M3), (E4M3, E5M2), ("bf16", "bf16")}


@pytest.mark.parametrize("sizes", [(4, 512, 512, 2048), (3, 51, 37, 101)])
def test_cublas_multiplies_8_bit_operands_of_any_size(sizes):
    """Autotuning chooses between its kernels and Triton's; XLA pads to 16 for it."""
    batch, length, inner, outer = sizes

    def products(x, weight, gradient):
        result, transpose = jax.vjp(lambda *a: fp8_tensordot(*a, 1), x, weight)
        return result, transpose(gradient)

    arguments = (batch, length, inner), (inner, outer), (batch, length, outer)
    compiled = on_one_device(H100, products, *(array(*shape) for shape in arguments))
    program = compiled.traced.lower().jax.compile({"xla_gpu_enable_triton_gemm": False})
    assert program.as_text().count('"__cublas$lt$matmul$f8"') == 3


def test_fsdp_gathers_parameters_of_8_bits_and_sums_gradients_in_f32():
    compiled = trainer_step(H100, "fsdp", "fp8")
    assert compiled.collectives.unplanned == ()
    gathers = rows(compiled, "all-gather", "fsdp")
    of_layers = [row for row in gathers if row.calls > 1]
    assert [(dtypes(row), row.nbytes) for row in of_layers] == 2 * [({E4M3}, MATRICES)]
    # The backward pass begins before its loop, with a layer beside the table.
    (rest,) = [row for row in gathers if row not in of_layers]
    assert dtypes(rest) == {E4M3, "bf16", "s32"}
    scattered = rows(compiled, "reduce-scatter", "fsdp")
    in_loop, before, _ = sorted(scattered, key=lambda row: -row.total_bytes)
    for row in (in_loop, before):
        assert (dtypes(row), row.nbytes) == ({"f32"}, 4 * MATRICES)
    # The largest number of each array, and the gradients of norms.
    maxima = [r for r in rows(compiled, "all-reduce", "fsdp") if dtypes(r) == {"bf16"}]
    assert maxima
    assert all(row.nbytes <= 2 * 2 * PROJECTIONS for row in maxima)
    assert {row.calls for row in maxima} == {NUM_LAYERS, NUM_LAYERS - 1, 1}
