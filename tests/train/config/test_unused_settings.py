# SPDX-License-Identifier: Apache-2.0
"""Settings that a run would not read: refused where they are given.

``tests/fuzz/test_setting_effects.py`` looks for others, in every combination.
"""

from dataclasses import replace

import pytest

from tessera.errors import TesseraError
from tessera.train.data.data_config import DataConfig
from tests.train.config.command_lines import composed
from tests.train.config.small_settings import check, settings

SGD = ("optimizer=sgd", "optimizer.momentum=0")
NO_VALIDATION = "data.validation_fraction=0"
SYNTHETIC = "data=synthetic"

# What is given -> the setting of it that has no effect, and why.
UNUSED = {
    ("model.experts_per_token=3",): "model.num_experts=0",
    ("model.router_balance_weight=0",): "model.num_experts=0",
    ("model.router_z_weight=0.1",): "model.num_experts=0",
    ("model.context_parallel=all_to_all",): "has no axis cp",
    ("model.sequence_parallel=true", "model.mesh_shape=[[2],[dp]]"): "has no axis tp",
    ("training.pipeline_schedule=gpipe",): "has no axis pp",
    ("training.pipeline_chunks=2",): "has no axis pp",
    ("training.pipeline_gather=step",): "has no axis pp",
    ("training.pipeline_gather=step", "model.mesh_shape=[[1],[pp]]"): "no axis fsdp",
    ("training.profile_wait=2",): "training.profile_communication=false",
    ("training.profile_warmup=2",): "training.profile_communication=false",
    ("training.profile_active=2",): "training.profile_communication=false",
    ("training.keep=2", "training.checkpoint_every=null"): "checkpoint_every=null",
    ("training.validate_every=5", NO_VALIDATION): "data.validation_fraction=0.0",
    ("training.validation_sequences=5", NO_VALIDATION): "data.validation_fraction=0.0",
    ("training.sample_prompt=a", "training.sample_length=0"): "sample_length=0",
    ("training.sample_prompt=a", SYNTHETIC): "data.name=synthetic, which is no text",
    (
        "training.max_skipped_steps=5",
        "training.mixed_precision=fp16",
    ): "training.on_spike=none: the bound is the smallest loss scale",
    ("training.spike_threshold=3",): "training.on_spike=none",
    ("training.spike_window=9",): "training.on_spike=none",
    ("optimizer.nesterov=true", *SGD): "optimizer.momentum=0.0",
}
# The same settings where something reads them.
USED = [
    ("model=moe_tiny", "model.experts_per_token=3"),
    ("model=moe_tiny", "model.router_balance_weight=0", "model.router_z_weight=0.1"),
    ("model.context_parallel=all_to_all", "model.mesh_shape=[[2],[cp]]"),
    ("model.sequence_parallel=true", "model.mesh_shape=[[2],[tp]]"),
    ("training.pipeline_schedule=gpipe", "model.mesh_shape=[[2],[pp]]"),
    ("training.profile_communication=true", "training.profile_wait=2"),
    ("training.keep=2", "training.checkpoint_every=0"),
    ("training.validate_every=5", "training.validation_sequences=5"),
    ("training.sample_prompt=a", "data=text", "data.path=books"),
    ("training.max_skipped_steps=5", "training.mixed_precision=bf16"),
    (
        *("training.max_skipped_steps=5", "training.mixed_precision=fp16"),
        *("training.on_spike=skip", "training.spike_threshold=3"),
    ),
    ("optimizer=sgd", "optimizer.nesterov=true"),
    # A value that is the default asks for nothing.
    ("model.experts_per_token=2", "training.pipeline_schedule=1f1b"),
]


@pytest.mark.parametrize("given", UNUSED, ids=" ".join)
def test_a_setting_that_nothing_reads_is_refused(given):
    with pytest.raises(TesseraError) as caught:
        composed(*given)
    key = given[0].partition("=")[0]
    assert caught.value.code == "T507"
    assert caught.value.what == f"{key} has no effect in this run"
    assert caught.value.got.endswith(UNUSED[given])


@pytest.mark.parametrize("given", USED, ids=" ".join)
def test_where_something_reads_it_it_is_taken(given):
    assert composed(*given)


def test_a_float_may_be_written_as_an_int():
    given = settings(validate_every=5)
    (error,) = check(replace(given, data=DataConfig(validation_fraction=0)))
    assert error.got == "training.validate_every=5; data.validation_fraction=0"


def test_several_for_one_reason_are_one_mistake():
    with pytest.raises(TesseraError) as caught:
        composed("model.experts_per_token=4", "model.router_z_weight=0.5")
    assert str(caught.value) == (
        "[T507] model.experts_per_token and model.router_z_weight have no effect in "
        "this run\n"
        "  got: model.experts_per_token=4, model.router_z_weight=0.5; "
        "model.num_experts=0\n"
        "  fix: leave them out, or change model.num_experts\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T507.html"
    )
