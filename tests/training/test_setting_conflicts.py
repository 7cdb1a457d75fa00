# SPDX-License-Identifier: Apache-2.0
"""Settings that exclude each other."""

import pytest

from tessera.errors import TesseraError
from tests.training.command_lines import composed

NARROW = "training.mixed_precision={computation: bf16, reduction: bf16}"


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (
            (
                "model.mesh_shape=[[2],[pp]]",
                "training.gradient_accumulation_steps=2",
            ),
            "the mesh axis 'pp', whose stages add up microbatches",
        ),
        (("training.numerics=deterministic",), "training.numerics=deterministic"),
        (
            ("training.gradient_compression=int8", "model.mesh_shape=[[2],[dp]]"),
            "training.gradient_compression=int8",
        ),
        (
            (
                "training.gradient_accumulation_steps=2",
                "training.sync_gradients_every=2",
            ),
            "training.sync_gradients_every=2",
        ),
    ],
)
def test_gradients_that_something_else_adds_up_are_not_reduced_in_bf16(given, got):
    with pytest.raises(TesseraError) as caught:
        composed(NARROW, *given)
    assert caught.value.code == "T507"
    assert caught.value.what == "gradients are reduced in f32 here"
    assert caught.value.got.endswith(got)


def test_alone_it_is_taken():
    assert composed(NARROW, "model.mesh_shape=[[2],[fsdp]]")
