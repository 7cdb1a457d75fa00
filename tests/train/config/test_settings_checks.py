# SPDX-License-Identifier: Apache-2.0
"""What the settings may be, alone and together."""

from dataclasses import replace

import pytest

from tessera import errors
from tessera.train.config.optimizer_config import SgdConfig
from tessera.train.config.run_config import (
    Config,
    RuntimeConfig,
    TrainingConfig,
)
from tessera.train.config.setting_fields import as_yaml
from tessera.train.data.data_config import DataConfig
from tests.train.config.small_settings import TINY, check, settings


def test_the_defaults_are_legal():
    assert check(settings()) == []


@pytest.mark.parametrize(
    "mesh_shape",
    [
        ((4, 1), ("fsdp", "tp")),
        ((1, 4), ("fsdp", "tp")),
        ((2, 2), ("tp", "dp")),
        ((2, 2, 2), ("dp", "fsdp", "tp")),
        ((8,), ("dp",)),
        ((-1, 2), ("fsdp", "tp")),
        ((72, 4), ("dp", "tp")),
    ],
)
def test_any_subset_and_order_of_axes_is_legal_also_where_devices_lack(mesh_shape):
    assert check(settings(mesh_shape=mesh_shape)) == []


@pytest.mark.parametrize(
    ("mesh_shape", "expected"),
    [
        (((4, 2), ("fsdp", "tp")), 8),
        (((-1, 2), ("fsdp", "tp")), 2),
        (((-1,), ("dp",)), 1),
    ],
)
def test_a_size_to_infer_counts_as_one_device(mesh_shape, expected):
    assert replace(TINY, mesh_shape=mesh_shape).num_devices == expected


@pytest.mark.parametrize(
    ("mesh_shape", "code", "what"),
    [
        ((4, 1), "T101", "a mesh shape is a pair of sizes and axis names"),
        (((4, 1),), "T101", "a mesh shape is a pair of sizes and axis names"),
        ((None, ("fsdp",)), "T101", "a mesh shape is a pair of sizes and axis names"),
        (((4, 1), ("fsdp",)), "T101", "a mesh has one size per axis"),
        (
            (("a", 1), ("fsdp", "tp")),
            "T101",
            "axis sizes are positive whole numbers, and at most one is -1",
        ),
        (((2, 2), ("tp", "tp")), "T102", "a mesh names one axis twice"),
        (((2, 2), ("fdsp", "tp")), "T103", "the model has no use for mesh axes 'fdsp'"),
        (
            ((3,), ("tp",)),
            "T402",
            "4 attention heads cannot be divided over mesh axis 'tp'",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh_shape, code, what):
    (error,) = check(settings(mesh_shape=mesh_shape))
    assert (error.code, error.what) == (code, what)


def test_an_axis_that_the_model_does_not_know_gets_a_hint():
    (error,) = check(settings(mesh_shape=((2, 2), ("fdsp", "tp"))))
    assert str(error) == (
        "[T103] the model has no use for mesh axes 'fdsp'\n"
        "  got: model.mesh_shape=[[2,2],[fdsp,tp]]\n"
        "  fix: did you mean 'fsdp'? Known: 'dp', 'fsdp', 'ep_outer', 'ep', "
        "'cp', 'tp', 'pp'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T103.html"
    )


@pytest.mark.parametrize(
    ("total", "every", "fix"),
    [(4, 3, "2 or 4"), (6, 5, "3 or 6"), (2, 9, "2"), (7, 3, "1 or 7")],
)
def test_gradients_are_exchanged_a_whole_number_of_times(total, every, fix):
    (error,) = check(
        settings(gradient_accumulation_steps=total, sync_gradients_every=every)
    )
    assert str(error) == (
        "[T503] training.sync_gradients_every does not divide "
        "training.gradient_accumulation_steps\n"
        f"  got: {total} / {every} leaves {total % every}\n"
        f"  fix: use training.sync_gradients_every={fix}\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_sequence_parallelism_needs_sequences_that_tp_divides():
    given = settings(mesh_shape=((4,), ("tp",)), sequence_length=33)
    assert check(given) == []
    model = replace(given.model, sequence_parallel=True)
    (error,) = check(replace(given, model=model))
    assert str(error) == (
        "[T503] sequences cannot be split evenly: 4 parts for "
        "model.sequence_parallel=true over tp\n"
        "  got: training.sequence_length=33: 33 / 4 leaves 1\n"
        "  fix: use training.sequence_length=32 or 36\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_the_ring_takes_two_chunks_for_each_device_of_cp():
    given = settings(mesh_shape=((4, 2), ("cp", "tp")), sequence_length=36)
    (error,) = check(given)
    assert str(error) == (
        "[T503] sequences cannot be split evenly: 8 parts for "
        "model.context_parallel=ring over cp\n"
        "  got: training.sequence_length=36: 36 / 8 leaves 4\n"
        "  fix: use training.sequence_length=32 or 40\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )
    exchanged = replace(given.model, context_parallel="all_to_all")
    (error,) = check(replace(given, model=exchanged))
    assert (error.code, error.got) == (
        "T402",
        "2 query heads and 1 key/value heads on each device, axis size 4",
    )
    split = replace(
        given.model, sequence_parallel=True, mesh_shape=((3, 2), ("cp", "tp"))
    )
    assert [(e.code, e.got) for e in check(replace(given, model=split))] == []
    split = replace(split, mesh_shape=((2, 4), ("cp", "tp")))
    (error,) = check(replace(given, model=split))
    assert str(error) == (
        "[T503] sequences cannot be split evenly: 8 parts for "
        "model.sequence_parallel=true over cp and tp\n"
        "  got: training.sequence_length=36: 36 / 8 leaves 4\n"
        "  fix: use training.sequence_length=32 or 40\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T503.html"
    )


def test_an_attention_that_does_not_exist():
    given = settings(mesh_shape=((2,), ("cp",)))
    (error,) = check(
        replace(given, model=replace(given.model, context_parallel="rings"))
    )
    assert str(error) == (
        "[T502] model.context_parallel does not take this value\n"
        "  got: model.context_parallel=rings\n"
        "  fix: did you mean 'ring'? use ring or all_to_all\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T502.html"
    )


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "-x", "a\0b", "a b", "a" * 101, "é"]
)
def test_a_name_cannot_leave_the_output_folder(name):
    (error,) = check(settings(name=name))
    assert str(error) == (
        "[T504] name does not take this value\n"
        f"  got: name={as_yaml(name)}\n"
        "  fix: use letters, digits, '.', '_' and '-', beginning with a letter or "
        "digit, at most 100\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )


@pytest.mark.parametrize("name", ["tiny", "gemma3_1b", "a.b-c_d", "7"])
def test_plain_names_are_taken(name):
    assert check(settings(name=name)) == []


@pytest.mark.parametrize(
    ("training", "got", "fix"),
    [
        ({"steps": 0}, "training.steps=0", "use a number from 1 to 2147483647"),
        (
            {"mixed_precision": "bf6"},
            "training.mixed_precision=bf6",
            "did you mean 'bf16'? Known: 'f32', 'bf16', 'fp16', 'fp8'",
        ),
        (
            {"mixed_precision": {"compute": "bf16"}},
            "training.mixed_precision={'compute': 'bf16'}",
            "did you mean 'computation'? Known: 'parameters', 'computation', "
            "'reduction'",
        ),
        (
            {"mixed_precision": {"parameters": "bf16"}},
            "training.mixed_precision={'parameters': 'bf16'}",
            "Known: 'f32'",
        ),
        (
            {"mixed_precision": {"reduction": "bf16"}},
            "training.mixed_precision={'reduction': 'bf16'}",
            "use reduction: f32, or computation: bf16",
        ),
        ({"clip_norm": 0.0}, "training.clip_norm=0.0", "use a number above 0"),
        ({"seed": -1}, "training.seed=-1", "use a number from 0 to 4294967295"),
        (
            {"micro_batch_size": 0},
            "training.micro_batch_size=0",
            "use a number from 1 to 1048576",
        ),
    ],
)
def test_values_out_of_range_name_the_legal_ones(training, got, fix):
    (error,) = check(settings(**training))
    assert (type(error), error.got, error.fix) == (errors.SettingValueError, got, fix)


def test_not_clipping_is_legal():
    assert check(settings(clip_norm=None)) == []


def test_every_group_is_checked():
    given = Config(
        name="..",
        model=replace(TINY, mesh_shape=((2, 2), ("x", "tp"))),
        training=TrainingConfig(steps=0),
        data=DataConfig(name="text"),
        optimizer=SgdConfig(schedule="none"),
        runtime=RuntimeConfig(platform="abacus"),
    )
    assert [error.code for error in check(given)] == [
        "T504",
        "T103",
        "T502",
        "T502",
        "T502",
        "T505",
    ]


@pytest.mark.parametrize(
    ("axes", "groups"),
    [({"fsdp": 4, "tp": 2}, 4), ({"dp": 2, "fsdp": 2, "tp": 2}, 4), ({"tp": 8}, 1)],
)
def test_a_microbatch_is_counted_for_each_data_parallel_group(axes, groups):
    given = settings(micro_batch_size=3, gradient_accumulation_steps=5)
    assert given.rows_per_microbatch(axes) == 3 * groups
    assert given.rows_per_step(axes) == 15 * groups


# --- memory


def test_split_gradients_cannot_be_exchanged_seldom():
    given = {"gradient_accumulation_steps": 4, "sync_gradients_every": 2}
    assert check(settings(zero_stage=1, **given)) == []
    (error,) = check(settings(zero_stage=2, **given))
    assert str(error) == (
        "[T507] training.sync_gradients_every cannot be used in this run\n"
        "  got: training.sync_gradients_every=2; training.zero_stage=2 splits "
        "gradients over dp, which have to be whole on each device for this\n"
        "  fix: leave it out, or change training.zero_stage\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )


def test_there_is_no_fourth_stage():
    (error,) = check(settings(zero_stage=4))
    assert (error.code, error.fix) == ("T502", "use a number from 0 to 3")


@pytest.mark.parametrize("chunk", ["auto", "none", 1, 512])
def test_logits_are_made_for_so_many_tokens_at_a_time(chunk):
    assert check(settings(loss_chunk=chunk)) == []


@pytest.mark.parametrize("chunk", [0, -1, "all"])
def test_a_chunk_of_logits_that_is_none(chunk):
    (error,) = check(settings(loss_chunk=chunk))
    assert error.code == "T502"
    assert error.got == f"training.loss_chunk={chunk}"
    assert error.fix == "use a number from 1 to 2147483647, auto or none"


@pytest.mark.parametrize(
    "remat", ["none", "full", "dots_saveable", ["full", "none"] * 3, {"global": "full"}]
)
def test_layers_are_recomputed_by_a_policy_of_any_form(remat):
    assert check(settings(remat=remat)) == []


def test_a_policy_that_does_not_exist_is_refused():
    (error,) = check(settings(remat="dot"))
    assert (error.code, error.what) == ("T502", "there is no remat policy 'dot'")
    assert error.fix.startswith("did you mean 'dots'?")


def test_the_stages_of_a_pipeline_share_a_policy():
    mesh_shape = ((2, 2), ("pp", "tp"))
    given = {"gradient_accumulation_steps": 4, "mesh_shape": mesh_shape}
    assert check(settings(remat="full", **given)) == []
    (error,) = check(settings(remat={"global": "full"}, **given))
    assert error.code == "T507"


def test_a_run_is_longer_than_what_is_let_pass_before_it_is_profiled():
    before = {"profile_communication": True, "profile_wait": 2, "profile_warmup": 3}
    assert check(settings(steps=6, **before)) == []
    (error,) = check(settings(steps=5, **before))
    assert str(error) == (
        "[T507] training.profile_communication cannot be used in this run\n"
        "  got: training.profile_communication=true; training.profile_wait=2, "
        "training.profile_warmup=3, training.steps=5: the run ends before the steps "
        "that are profiled\n"
        "  fix: leave it out, or change training.profile_wait or "
        "training.profile_warmup or training.steps\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )
