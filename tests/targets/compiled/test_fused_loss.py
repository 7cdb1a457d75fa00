# SPDX-License-Identifier: Apache-2.0
"""The fused loss for GPUs and TPUs: its memory is that of a chunk of the logits."""

from functools import cache

import jax
import pytest

from tessera import op
from tests.targets.compiled.programs import (
    array,
    compile_without_spills,
    on_one_device,
    only_in_test_targets,
)

pytestmark = only_in_test_targets

TARGETS = ["h100:1x1", "v5e:2x2"]
VOCABULARY, WIDTH, TOKENS, CHUNK = 32768, 256, 8192, 512
LOGITS = 2 * TOKENS * VOCABULARY  # bytes in bf16
CHUNK_LOGITS = 4 * CHUNK * VOCABULARY  # bytes in f32


def fused(hidden, weight, labels):
    return op.fused_linear_cross_entropy(hidden, weight, labels, chunk_size=CHUNK)


def separate(hidden, weight, labels):
    return op.cross_entropy(hidden @ weight.T, labels)


@cache
def gradients(target, loss, tokens):
    """The loss and its gradients."""
    operands = array(tokens, WIDTH), array(VOCABULARY, WIDTH)
    labels = array(tokens, dtype="int32")
    run = jax.value_and_grad(loss, argnums=(0, 1))
    return on_one_device(target, run, *operands, labels)


@pytest.mark.parametrize("target", TARGETS)
def test_temporaries_are_those_of_a_chunk(target):
    temporaries = gradients(target, fused, TOKENS).memory.temporaries
    weight_gradient = 4 * VOCABULARY * WIDTH
    assert temporaries < 2 * CHUNK_LOGITS + weight_gradient
    assert temporaries < LOGITS / 3


@pytest.mark.parametrize("target", TARGETS)
def test_more_tokens_add_no_logits(target):
    more, fewer = (
        gradients(target, fused, tokens).memory.temporaries
        for tokens in (TOKENS, TOKENS // 2)
    )
    assert more - fewer <= 2 * 4 * WIDTH * TOKENS // 2


@pytest.mark.parametrize("target", TARGETS)
def test_a_matmul_and_a_loss_need_all_logits(target):
    assert gradients(target, separate, TOKENS).memory.temporaries >= LOGITS


def test_its_kernels_spill_no_registers():
    compile_without_spills(gradients("h100:1x1", fused, TOKENS))
