# SPDX-License-Identifier: Apache-2.0
"""Runs whose vocabulary ``tp`` does not divide, on several meshes."""

import dataclasses

import jax
import pytest

from tests.train.loop.short_runs import CONFIG, run_of, settings_of, train

WORDS = 263
MODEL = dataclasses.replace(CONFIG, vocab_size=WORDS, tied_head=False)
ONE = ((1,), ("fsdp",))


def settings(mesh, **changed):
    base = settings_of()
    training = dataclasses.replace(
        base.training,
        **{
            "steps": 3,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "validate_every": 0,
            "sample_length": 4,
            **changed,
        },
    )
    model = dataclasses.replace(base.model, mesh_shape=mesh, config=MODEL)
    return dataclasses.replace(base, model=model, training=training)


def losses(ran):
    return [line["loss"] for line in ran.steps]


def test_the_arrays_of_a_checkpoint_are_those_of_every_mesh():
    meshes = ONE, ((2, 2), ("fsdp", "tp")), ((2, 4), ("dp", "tp"))
    shapes = [
        jax.tree.map(lambda leaf: leaf.shape, run_of(settings(mesh)).abstract_state)
        for mesh in meshes
    ]
    assert shapes[0].params["embedding"] == (WORDS, MODEL.d_model)
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.usefixtures("compiled_here")  # lines of another source are not its own
@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "changed"),
    [
        (((2, 2), ("fsdp", "tp")), {"micro_batch_size": 4}),
        (((2, 4), ("dp", "tp")), {"micro_batch_size": 2, "zero_stage": 2}),
        (((2, 4), ("dp", "tp")), {"micro_batch_size": 4, "zero_stage": 3}),
        (((2, 2), ("dp", "tp")), {"micro_batch_size": 4, "zero_stage": 1}),
        (((2, 2, 2), ("dp", "fsdp", "tp")), {"micro_batch_size": 2, "zero_stage": 3}),
        (((2, 2), ("pp", "tp")), {"micro_batch_size": 2}),
        (((2, 2, 2), ("pp", "dp", "tp")), {"micro_batch_size": 2, "zero_stage": 2}),
        (((2, 2, 2), ("pp", "fsdp", "tp")), {"micro_batch_size": 2}),
        (
            ((2, 2, 2), ("pp", "fsdp", "tp")),
            {"micro_batch_size": 2, "pipeline_gather": "step"},
        ),
        (((2, 2), ("fsdp", "tp")), {"micro_batch_size": 4, "mixed_precision": "bf16"}),
        (((2, 2), ("cp", "tp")), {"micro_batch_size": 8, "sequence_length": 16}),
        (((2, 2), ("dp", "tp")), {"micro_batch_size": 4, "loss_chunk": "none"}),
    ],
    ids=str,
)
def test_a_run_has_the_losses_of_one_device(tmp_path, mesh, changed):
    tolerance = 5e-3 if "mixed_precision" in changed else 2e-5
    expected = train(run_of(settings(ONE, micro_batch_size=8)), tmp_path / "one")
    ran = train(run_of(settings(mesh, **changed)), tmp_path / "mesh")
    assert losses(ran) == pytest.approx(losses(expected), rel=tolerance)
    assert ran.validations[-1]["val_loss"] == pytest.approx(
        expected.validations[-1]["val_loss"], rel=tolerance
    )
    assert ran.state.params["head"].shape == (WORDS, MODEL.d_model)
    if "pp" not in mesh[1] and changed.keys() == {"micro_batch_size"}:
        assert not ran.run.compiled.collectives.unplanned
