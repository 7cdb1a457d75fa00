# SPDX-License-Identifier: Apache-2.0
"""What settings stand for, and what is refused before anything compiles."""

import dataclasses
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tessera.errors import (
    DataNotFoundError,
    EmptyDataError,
    HeadCountError,
    ShardDivisibilityError,
    TesseraWarning,
    VocabularyError,
)
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.optimizer_config import AdamWConfig, SgdConfig
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.data.data_config import DataConfig, SyntheticConfig
from tessera.train.loop.build_run import Run
from tests.small_model import SMALL

CONFIG = SMALL
SYNTHETIC = DataConfig(name="synthetic", synthetic=SyntheticConfig(tokens=2000))


def run_of(
    *axes: tuple[str, int],
    data: DataConfig = SYNTHETIC,
    sizes: dict[str, Any] | None = None,
    **training: Any,
) -> Run:
    """A run on a mesh such as ``("fsdp", 2), ("tp", 2)``."""
    names, shape = zip(*axes or [("fsdp", 1)], strict=True)
    training = {"sequence_length": 16, "micro_batch_size": 4, **training}
    settings = Config(
        name="small",
        model=ModelConfig(
            name="small",
            mesh_shape=(shape, names),
            config=dataclasses.replace(CONFIG, **(sizes or {})),
        ),
        training=TrainingConfig(**training),
        data=data,
    )
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


# --- what settings stand for


def test_a_microbatch_has_its_rows_for_each_data_parallel_group():
    run = run_of(("dp", 2), ("fsdp", 2), ("tp", 2), gradient_accumulation_steps=3)
    assert run.abstract_batch.keys() == {
        "tokens",
        "targets",
        "segment_ids",
        "positions",
    }
    tokens = run.abstract_batch["tokens"]
    assert (tokens.shape, tokens.dtype) == ((3, 4 * 2 * 2, 16), "int32")
    assert tokens.sharding.spec == P(None, ("dp", "fsdp"))
    assert tokens.sharding.shard_shape(tokens.shape) == (3, 4, 16)


def test_every_state_has_a_loss_scale_of_its_own():
    """A step donates its state, and another one may begin after it."""
    run = run_of(mixed_precision="fp16")
    for leaf in jax.tree.leaves(run.fresh_parts()):
        leaf.delete()
    assert float(run.fresh_parts()["loss_scale"].value) == 32768.0


def test_the_step_config_is_what_the_settings_say():
    config = run_of(
        ("dp", 2),
        gradient_accumulation_steps=4,
        sync_gradients_every=2,
        mixed_precision="fp16",
    ).step_config
    assert (config.accumulation, config.sync_every) == (4, 2)
    assert config.model.dtype == "float16"
    assert config.data_axes == ("dp",)


def test_deterministic_numerics_compute_the_loss_in_one_piece():
    assert run_of(loss_chunk=8).step_config.loss_chunk == 8
    run = run_of(loss_chunk=8, numerics="deterministic", reduction_parts=4)
    assert run.step_config.loss_chunk == "none"


@pytest.mark.parametrize(
    ("precision", "scale"), [("f32", None), ("bf16", None), ("fp16", 32768.0)]
)
def test_only_fp16_scales_its_loss(precision, scale):
    run = run_of(mixed_precision=precision)
    held = run.loss_scale
    assert (None if held is None else float(held.value)) == scale
    assert (run.abstract_state.loss_scale is None) == (scale is None)


def test_sequence_and_context_parallelism_reach_the_model():
    run = run_of(("tp", 2))
    model = dataclasses.replace(
        run.config.model, sequence_parallel=True, context_parallel="all_to_all"
    )
    settings = dataclasses.replace(run.config, model=model)
    reached = Run(settings, run.mesh).model
    assert (reached.sequence_parallel, reached.context_parallel) == (True, "all_to_all")
    assert (run.model.sequence_parallel, run.model.context_parallel) == (False, "ring")


def test_a_job_on_a_mesh_that_is_not_here_has_shapes_and_layouts():
    run = run_of(("fsdp", 32), ("tp", 2))
    before = jax.live_arrays()  # held, so that none of them goes meanwhile
    run.check()
    table = run.abstract_state.params["embedding"]
    assert table.sharding.spec == P("tp", "fsdp")
    assert table.sharding.shard_shape(table.shape) == (32, 1)
    assert run.abstract_batch["tokens"].shape == (1, 128, 16)
    assert len(jax.live_arrays()) == len(before)


def test_the_clip_norm_and_the_steps_reach_the_optimizer():
    rate = run_of(steps=50).step_config.learning_rate
    assert float(rate(49)) == pytest.approx(3e-4)
    assert float(rate(19)) == pytest.approx(3e-3)


def test_the_learning_rate_is_scaled_by_the_groups_that_split_the_batch():
    run = run_of(("dp", 2), ("fsdp", 2), ("tp", 2))
    optimizer = AdamWConfig(scale_learning_rate="sqrt")
    scaled = dataclasses.replace(run.config, optimizer=optimizer)
    rate = Run(scaled, run.mesh).step_config.learning_rate
    assert float(rate(19)) == pytest.approx(2 * 3e-3)


# --- what is refused


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(HeadCountError) as caught:
        run_of(("fsdp", 2), ("tp", 3)).check()
    assert caught.value.code == "T402"


def test_every_parameter_that_cannot_be_split_is_named():
    with pytest.raises(ShardDivisibilityError) as caught:
        run_of(("fsdp", 1), ("tp", 2), sizes={"mlp_dim": 65}).check()
    assert caught.value.code == "T201"
    for name in ("mlp/gate", "mlp/up", "mlp/down"):
        assert name in str(caught.value)


def test_a_mesh_that_cannot_use_the_devices_names_those_that_can():
    with pytest.raises(ShardDivisibilityError) as caught:
        run_of(("fsdp", 3), ("tp", 2)).check()
    error = caught.value
    assert error.what.startswith("the mesh leaves 2 of 8 devices idle, and parameter ")
    assert error.got.startswith("fsdp × tp mesh, 3 × 2 = 6, and 8 devices\n")
    assert error.fix.startswith(
        "use model.mesh_shape=[[4,2],[fsdp,tp]] or [[2,4],[fsdp,tp]]\nor use "
    )


def test_data_that_is_not_there_is_refused(tmp_path):
    missing = DataConfig(name="text", path=str(tmp_path / "nothing"))
    with pytest.raises(DataNotFoundError) as caught:
        run_of(data=missing, sizes={"vocab_size": 264}).load_data()
    assert caught.value.code == "T601"


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    text = DataConfig(name="text", path=str(tmp_path))
    with pytest.raises(VocabularyError) as caught:
        run_of(data=text).load_data()
    assert caught.value.code == "T603"


def test_data_of_less_than_one_step_is_refused_before_the_step_is_compiled():
    few = DataConfig(name="synthetic", synthetic=SyntheticConfig(tokens=500))
    assert run_of(("fsdp", 2), data=few).load_data()
    run = run_of(("fsdp", 2), data=few, gradient_accumulation_steps=4)
    with pytest.raises(EmptyDataError) as caught:
        run.load_data()
    assert caught.value.what == "the training data is smaller than one batch"
    assert caught.value.got.endswith("= 26 rows, and a batch takes 32")


# --- memory


def test_memory_settings_reach_the_step_config_the_model_and_the_state():
    run = run_of(("dp", 8), zero_stage=1, offload_optimizer=True, remat="full")
    assert (run.step_config.zero_stage, run.step_config.offload_optimizer) == (1, True)
    assert run.model.remat == "full"
    run.check()
    moments = [x for x in jax.tree.leaves(run.abstract_state.optimizer) if x.shape]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    assert all("dp" in x.sharding.spec for x in moments)
    assert all(
        x.sharding.spec == P() for x in jax.tree.leaves(run.abstract_state.params)
    )


@pytest.mark.parametrize(
    ("axes", "training", "note"),
    [
        (
            [("fsdp", 8)],
            {"zero_stage": 2},
            "zero_stage 2 changes nothing: there are no copies along 'dp' to split; "
            "what 'fsdp' splits is split at every stage",
        ),
        (
            [("dp", 3)],
            {"zero_stage": 1},
            "zero_stage 1 leaves 15 parameters (81.2 KiB) with a copy on each device "
            "of 'dp': it divides none of their dims",
        ),
        (
            [("dp", 2)],
            {"offload_optimizer": True},
            "offload_optimizer saves nothing on cpu: its devices' memory is the host's",
        ),
        (
            [("tp", 2)],
            {"gradient_accumulation_steps": 2, "sync_gradients_every": 2},
            "sync_gradients_every 2 changes nothing: there is one data-parallel group",
        ),
    ],
)
def test_a_setting_that_changes_nothing_says_so(axes, training, note):
    assert note in run_of(*axes, **training).layout_notes()
    assert note not in run_of(*axes).layout_notes()


def test_an_optimizer_without_arrays_leaves_nothing_to_split_or_to_move():
    run = run_of(("dp", 2), zero_stage=1, offload_optimizer=True)
    settings = dataclasses.replace(run.config, optimizer=SgdConfig(momentum=0.0))
    notes = Run(settings, run.mesh).layout_notes()
    assert "zero_stage 1 changes nothing: this optimizer keeps no arrays" in notes
    assert "offload_optimizer changes nothing: this optimizer keeps no arrays" in notes


def test_one_group_has_no_number_to_scale_the_rate_by():
    run = run_of(("tp", 2))
    scaled = SgdConfig(scale_learning_rate="linear")
    settings = dataclasses.replace(run.config, optimizer=scaled)
    assert (
        "scale_learning_rate linear changes nothing: there is one data-parallel group"
    ) in Run(settings, run.mesh).layout_notes()


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        (
            {"global_every": 1},
            "window, rope_base_local and rope_scale_local change nothing: no layer is "
            "local",
        ),
        (
            {"global_every": 9, "rope_base_global": 500.0},
            "rope_base_global and rope_scale_global change nothing: no layer is global",
        ),
    ],
)
def test_sizes_of_layers_that_the_model_does_not_have_change_nothing(sizes, note):
    assert note in run_of(sizes=sizes).layout_notes()
    assert note not in run_of(sizes={**sizes, "global_every": 2}).layout_notes()
    # As published models have it, whose settings nobody has typed.
    bases = {"rope_base_local": 500.0, "rope_base_global": 500.0}
    no_window = {"window": None} if "local" in note else {}
    assert run_of(sizes={**sizes, **bases, **no_window}).layout_notes() == []


# --- pipelines


def test_a_pipeline_says_how_its_layers_are_split_and_how_long_devices_wait():
    large = {"num_layers": 8, "vocab_size": 2048}
    run = run_of(("pp", 2), sizes=large, gradient_accumulation_steps=4)
    # A layer costs 32 x (2 x (4 + 2) x 8 + 3 x 64), the logits 32 x 2048.
    assert run.layout_notes() == [
        "stage 0: layers 0-6, cost 0.46; stage 1: layer 7, cost 0.54",
        "1f1b: 2 stages, 4 microbatches, 6 ticks, idle 20.0 %",
    ]
    assert [list(run) for run in run.model.split.layers] == [[*range(7)], [7]]


def test_the_schedule_and_its_chunks_reach_the_step_config_and_the_model():
    run = run_of(
        ("pp", 2),
        sizes={"num_layers": 4},
        pipeline_schedule="interleaved",
        pipeline_chunks=2,
        gradient_accumulation_steps=4,
    )
    table = run.step_config.schedule
    assert (table.name, table.stages, table.microbatches) == ("interleaved", 2, 4)
    assert (table.chunks, run.model.split.chunks) == (2, 2)
    run.check()


def test_fewer_microbatches_than_stages_are_a_warning_that_says_what_they_cost():
    run = run_of(("pp", 4), sizes={"num_layers": 4}, gradient_accumulation_steps=2)
    with pytest.warns(TesseraWarning) as caught:
        run.layout_notes()
    (warning,) = caught
    assert str(warning.message) == (
        "2 microbatches for 4 pipeline stages: under '1f1b' the devices wait for 60 % "
        "of the time; use at least 4 microbatches, better several times as many"
    )
