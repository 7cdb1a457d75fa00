# SPDX-License-Identifier: Apache-2.0
"""The ledger of the model ``tiny`` against bytes that are computed by hand.

Each formula is written from the sizes of the model and of the batch alone, for what
each kind of parallelism has to send. A float32 has four bytes, a mesh has two devices.
"""

from pathlib import Path

import pytest

from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run

# What was compiled elsewhere has the lines of elsewhere, which say what is planned.
pytestmark = pytest.mark.usefixtures("compiled_here")

CONFIGS = Path(__file__).parents[3] / "configs"
F32 = 4
V, D, LAYERS, HEADS, KV_HEADS, K, F = 264, 128, 6, 4, 2, 32, 512
B, S, MICROBATCHES, STAGES = 8, 128, 4, 2

EMBEDDING = V * D
# Queries, output; keys, values; gate, up, down.
KERNELS = 2 * D * HEADS * K + 2 * D * KV_HEADS * K + 3 * D * F
# Before and after attention and MLP; of queries and of keys.
SCALES = 4 * D + 2 * K
PARAMETERS = EMBEDDING + LAYERS * (KERNELS + SCALES) + D
# Arrays: those of one kind are stacked over the layers. The scales are never split.
KERNEL_ARRAYS, SCALE_ARRAYS = 7, 6
# The norm of the gradients is taken once, to be shown and to clip them: of each array
# that is split, the square of its norm is summed over the devices.
NORMS = 1
ACTIVATION = B * S * D


def ledger(axis, *more):
    overrides = ["model=tiny", f"model.mesh_shape=[[2],[{axis}]]", *more]
    settings = compose(overrides, CONFIGS).config
    run = Run(settings, mesh_of_shape(settings.model.mesh_shape))
    return run.compiled.collectives


def sent(found):
    """Bytes by kind, and everything is planned and over one axis."""
    assert found.unplanned == ()
    assert not any(row.copies_whole for row in found.rows)
    (axes,) = found.by_axis()
    return {kind: total.nbytes for (_, kind), total in found.totals().items()}, axes


def test_the_sizes_are_those_of_the_model():
    assert PARAMETERS == 1_511_936


@pytest.mark.full
def test_data_parallelism_sends_each_gradient_and_the_sums_of_the_batch():
    # The embedding's gradient is two: of looking up, and of the logits.
    gradients = PARAMETERS + EMBEDDING
    sums = 2  # the loss and the number of its tokens
    found = ledger("dp")
    assert sent(found) == ({"all-reduce": F32 * (gradients + sums)}, ("dp",))
    assert not found.unplanned


@pytest.mark.full
def test_fsdp_also_gathers_each_layers_kernels_twice_and_the_embedding_once():
    sums = 2 + NORMS * (KERNEL_ARRAYS + 1)
    ids = 2 * B * S  # of all tokens, whose rows each device has in part
    gathered = EMBEDDING + 2 * LAYERS * KERNELS + ids
    assert sent(ledger("fsdp")) == (
        {
            "all-gather": F32 * gathered,
            "all-reduce": F32 * (PARAMETERS + sums),
            # The rows that tokens look up, and their gradients.
            "all-to-all": F32 * 2 * ACTIVATION,
        },
        ("fsdp",),
    )


@pytest.mark.full
def test_tensor_parallelism_sends_activations_and_no_kernel():
    forward = 1 + 2 * LAYERS  # the lookup; attention and MLP of each layer
    # By gate and up, by queries, keys and values, and by the logits; the gradient of
    # the lookup; and what norms follow, which is computed again.
    backward = LAYERS * (2 + 3) + 1 + 1 + 2 * LAYERS
    # Of queries and keys, whose heads are split.
    scales = LAYERS * 2 * K
    # Logits are split over the vocabulary: their maximum, their sum, the label's.
    loss = 3 * B * S
    norms = NORMS * (KERNEL_ARRAYS + 1)
    total = (forward + backward) * ACTIVATION + scales + loss + norms
    assert sent(ledger("tp")) == ({"all-reduce": F32 * total}, ("tp",))


@pytest.mark.full
def test_a_pipeline_sends_activations_and_cotangents_once_a_tick():
    found = ledger("pp", f"training.gradient_accumulation_steps={MICROBATCHES}")
    (both_ways, axes) = sent(found)
    # Each runs one forward and one backward at most; the last microbatch has to get
    # to the last stage and back.
    ticks = MICROBATCHES + 2 * (STAGES - 1)
    assert axes == ("pp",)
    assert both_ways["collective-permute"] == F32 * ticks * 2 * ACTIVATION
    # The embedding is sharded over the stages; both ends of the pipeline use it.
    assert both_ways["all-gather"] == F32 * EMBEDDING
    # Whole layers are split over the stages, with all that belongs to them.
    sums = 1 + NORMS * (KERNEL_ARRAYS + SCALE_ARRAYS + 1)
    assert both_ways["all-reduce"] == F32 * (EMBEDDING + D + sums)
