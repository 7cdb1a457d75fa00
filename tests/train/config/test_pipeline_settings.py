# SPDX-License-Identifier: Apache-2.0
"""What the settings of a pipeline may be, alone and together."""

import pytest

from tessera.errors import TesseraError
from tessera.foundations.config_files import configs_dir
from tessera.train.config.command_line import compose
from tests.train.config.small_settings import check, settings

STAGES = ((2, 1), ("pp", "tp"))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 3),
        ("zero_bubble", 1),
        ("dualpipev", 2),
    ],
)
def test_every_schedule_is_legal(name, chunks):
    given = settings(
        mesh_shape=STAGES,
        pipeline_schedule=name,
        pipeline_chunks=chunks,
        gradient_accumulation_steps=4,
    )
    assert check(given) == []


@pytest.mark.parametrize(
    ("name", "chunks", "got"),
    [
        (
            "interleaved",
            1,
            "training.pipeline_schedule=interleaved; training.pipeline_chunks=1, and "
            "the schedule needs 2 or more",
        ),
        (
            "dualpipev",
            1,
            "training.pipeline_schedule=dualpipev; training.pipeline_chunks=1, and "
            "the schedule needs 2",
        ),
        (
            "dualpipev",
            3,
            "training.pipeline_schedule=dualpipev; training.pipeline_chunks=3, and "
            "the schedule needs 2",
        ),
        (
            "gpipe",
            2,
            "training.pipeline_chunks=2; training.pipeline_schedule=gpipe, which has "
            "one chunk",
        ),
    ],
)
def test_chunks_are_for_the_interleaved_schedule_which_needs_them(name, chunks, got):
    (error,) = check(
        settings(mesh_shape=STAGES, pipeline_schedule=name, pipeline_chunks=chunks)
    )
    assert (error.code, error.got) == ("T507", got)


def test_stages_exchange_gradients_once_in_a_step():
    accumulated = {"gradient_accumulation_steps": 4, "sync_gradients_every": 2}
    (error,) = check(settings(mesh_shape=STAGES, **accumulated))
    assert str(error) == (
        "[T507] training.sync_gradients_every cannot be used in this run\n"
        "  got: training.sync_gradients_every=2; model.mesh_shape=[[2,1],[pp,tp]], and "
        "the stages of pp add up gradients in f32 where they arise\n"
        "  fix: leave it out, or change model.mesh_shape\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )
    assert check(settings(mesh_shape=((2,), ("dp",)), **accumulated)) == []


def test_stages_with_experts_gather_parameters_where_they_compute():
    overrides = ("model=moe_tiny", "training.pipeline_gather=step")
    with pytest.raises(TesseraError) as caught:
        compose(["model.mesh_shape=[[2,2],[pp,fsdp]]", *overrides], configs_dir())
    assert str(caught.value) == (
        "[T507] training.pipeline_gather cannot be used in this run\n"
        "  got: training.pipeline_gather=step; num_experts=8, whose routers balance a "
        "whole batch\n"
        "  fix: leave it out\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )


def test_dualpipev_needs_two_microbatches_for_each_stage():
    (error,) = check(
        settings(
            mesh_shape=STAGES,
            pipeline_schedule="dualpipev",
            pipeline_chunks=2,
            gradient_accumulation_steps=3,
        )
    )
    assert error.code == "T311"
    assert "dualpipev" in str(error)


def test_interleaved_chunks_need_a_multiple_of_the_stages_as_microbatches():
    (error,) = check(
        settings(
            mesh_shape=STAGES,
            pipeline_schedule="interleaved",
            pipeline_chunks=2,
            gradient_accumulation_steps=5,
        )
    )
    assert str(error) == (
        "[T311] interleaved chunks need a multiple of the stages as microbatches\n"
        "  got: 5 microbatches, 2 stages: 5 % 2 = 1\n"
        "  fix: use 4 or 6 microbatches, or the schedule '1f1b'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


@pytest.mark.parametrize(
    ("size", "chunks", "stages"), [(7, {}, 7), (2, {"pipeline_chunks": 4}, 8)]
)
def test_every_stage_has_a_layer(size, chunks, stages):
    chunks = {"pipeline_schedule": "interleaved", **chunks} if chunks else {}
    (error,) = check(
        settings(mesh_shape=((size,), ("pp",)), gradient_accumulation_steps=8, **chunks)
    )
    assert str(error) == (
        "[T311] a pipeline has fewer layers than stages, so that a stage would be "
        "empty\n"
        f"  got: 6 layers, {stages} stages\n"
        "  fix: use at most 6 stages (devices x chunks), or at least "
        f"{stages} layers\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T311.html"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"pipeline_schedule": "1f2b"},
        {"pipeline_chunks": 0},
        {"gradient_accumulation_steps": 0},
    ],
)
def test_a_value_that_no_pipeline_has_is_one_mistake(wrong):
    (error,) = check(settings(mesh_shape=STAGES, **wrong))
    assert error.code == "T502"


def test_chunks_of_one_device_share_a_policy_too():
    (error,) = check(
        settings(
            mesh_shape=((1,), ("pp",)),
            pipeline_schedule="interleaved",
            pipeline_chunks=2,
            gradient_accumulation_steps=2,
            remat=["full", "none"] * 3,
        )
    )
    assert error.code == "T507"
