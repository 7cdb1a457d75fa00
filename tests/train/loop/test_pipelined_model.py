# SPDX-License-Identifier: Apache-2.0
"""What the step of a model in stages holds and sends.

Its gradients are compared with the plain model's in ``tests/parity``.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tessera.errors import PipelineSizeError
from tessera.graph.compile_stages import Compiled
from tessera.mesh import Mesh
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config, ModelConfig, TrainingConfig
from tessera.train.loop.build_run import Run
from tessera.train.loop.pipelined_model import PipelinedModel, schedule_of
from tessera.train.models import DecoderConfig, DecoderModel
from tessera.train.models.pipeline_stages import StageSplit, split_of
from tests.graph.pipelines import cases

MICROBATCHES, ROWS, LENGTH = 4, 2, 8
CONFIG = DecoderConfig(
    vocab_size=32,
    d_model=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    window=8,
    query_pre_attn_scalar=8,
    global_every=3,
)


def mesh_of(**sizes: int) -> Mesh:
    devices = range(math.prod(sizes.values()))
    return Mesh(tuple(sizes), devices=devices, shape=tuple(sizes.values()))


def batch_of() -> dict[str, jax.ShapeDtypeStruct]:
    names = ("tokens", "targets", "segment_ids", "positions")
    shape = (MICROBATCHES, ROWS, LENGTH)
    return dict.fromkeys(names, jax.ShapeDtypeStruct(shape, jnp.int32))


def pipelined(config: DecoderConfig, mesh: Mesh, name: str) -> PipelinedModel:
    table = schedule_of(mesh, name, 1, MICROBATCHES)
    assert table is not None
    return PipelinedModel(
        DecoderModel(config, split=split_of(mesh, config, 1)), mesh, table
    )


@pytest.mark.full
@pytest.mark.parametrize("name", cases(["gpipe", "zero_bubble"], "gpipe"))
def test_the_program_is_no_longer_for_more_layers_in_a_stage(name):
    def length(num_layers: int) -> int:
        config = dataclasses.replace(CONFIG, num_layers=num_layers)
        whole = pipelined(config, mesh_of(pp=2), name)
        params = whole.model.abstract()
        program = jax.make_jaxpr(whole.gradients)(params, batch_of(), jnp.float32(1))
        return str(program).count("\n")

    assert length(4) == length(16) > 1000


# --- the trainer's step


def run_of(*axes: tuple[str, int], **training: Any) -> Run:
    """A run whose activations are large beside its weights."""
    names, shape = zip(*axes, strict=True)
    training = {"sequence_length": 64, "micro_batch_size": 4, **training}
    settings = Config(
        name="small",
        model=ModelConfig(name="small", mesh_shape=(shape, names), config=CONFIG),
        training=TrainingConfig(**training),
    )
    return Run(settings, mesh_of_shape(settings.model.mesh_shape))


@cache
def compiled(name: str, microbatches: int) -> Compiled:
    return run_of(
        ("pp", 2), pipeline_schedule=name, gradient_accumulation_steps=microbatches
    ).compiled


@pytest.mark.full
def test_memory_of_1f1b_does_not_grow_with_microbatches_and_is_below_gpipe():
    few, many = (compiled("1f1b", count).memory.temporaries for count in (8, 64))
    assert many <= 1.02 * few
    wire = 4 * 64 * 16 * 4
    assert compiled("gpipe", 64).memory.temporaries - many >= 61 * wire


@pytest.mark.full
def test_each_tick_sends_one_activation_and_one_gradient():
    rows = compiled("1f1b", 64).collectives.rows
    sent = [row for row in rows if row.kind == "collective-permute"]
    wire = 4 * 64 * 16 * 4
    assert [(row.axes, row.nbytes, row.calls) for row in sent] == [
        (("pp",), wire, 64 + 2)
    ] * 2


@pytest.mark.full
@pytest.mark.usefixtures("compiled_here")  # reasons are found by lines
@pytest.mark.parametrize(("length", "parts"), [(64, 2), (63, 1)])
def test_each_device_of_tp_sends_its_part_of_a_sequence_if_they_divide(length, parts):
    """The whole is gathered once where it arrives: no layer has less than it had."""
    run = run_of(
        *(("pp", 2), ("tp", 2)), sequence_length=length, gradient_accumulation_steps=4
    )
    ledger = run.compiled.collectives
    sent = [row for row in ledger.rows if row.kind == "collective-permute"]
    wire = 4 * length * 16 * 4
    assert [(row.axes, row.nbytes) for row in sent] == [(("pp",), wire // parts)] * 2
    gathered = [row for row in ledger.rows if row.kind == "all-gather"]
    of_wires = [row for row in gathered if row.axes == ("tp",) and row.nbytes == wire]
    assert all(row.calls == 4 + 2 for row in of_wires)
    assert bool(of_wires) == (parts > 1)
    assert not ledger.unplanned


@pytest.mark.full
def test_gradients_cross_dp_once_in_a_step():
    run = run_of(("dp", 2), ("pp", 2), gradient_accumulation_steps=8)
    rows = run.compiled.collectives.rows
    params = jax.tree.leaves(run.abstract_state.params)
    held = sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in params)
    table = 4 * CONFIG.vocab_size * CONFIG.d_model  # its gradient is not yet split
    over_dp = sum(row.total_bytes for row in rows if "dp" in row.axes)
    assert held <= over_dp <= held + table + 100


@pytest.mark.full
def test_stages_gather_and_reduce_once_in_a_step():
    run = run_of(
        *(("pp", 2), ("fsdp", 2)),
        pipeline_gather="step",
        gradient_accumulation_steps=4,
    )
    rows = run.compiled.collectives.rows
    stage = run.model.abstract()["decoder"]
    layouts = run.model.layouts(run.mesh)["decoder"]
    parts = zip(jax.tree.leaves(stage), jax.tree.leaves(layouts), strict=True)
    split = sum(math.prod(leaf.shape) for leaf, spec in parts if "fsdp" in spec) // 2
    for kind in ("all-gather", "reduce-scatter"):
        over_fsdp = [row for row in rows if (row.kind, row.axes) == (kind, ("fsdp",))]
        assert sum(row.total_bytes for row in over_fsdp) == 4 * split
    # No collective of parameters is left in the loop.
    table = 4 * CONFIG.vocab_size * CONFIG.d_model
    in_loop = [row for row in rows if row.calls != 1 and "fsdp" in row.axes]
    assert sum(row.nbytes for row in in_loop) < table


# --- which schedule and which stages


def test_a_mesh_without_pp_has_no_schedule_and_no_stages():
    assert schedule_of(mesh_of(dp=2), "interleaved", 2, 4) is None
    assert split_of(mesh_of(dp=2), CONFIG, 2) is None


def test_a_mesh_with_pp_has_as_many_stages():
    table = schedule_of(mesh_of(pp=2, tp=2), "interleaved", 2, 4)
    assert (table.stages, table.chunks, table.microbatches) == (2, 2, 4)
    assert split_of(mesh_of(pp=2, tp=2), CONFIG, 2) == StageSplit.of(CONFIG, 2, 2)
    assert schedule_of(mesh_of(pp=1), "1f1b", 1, 4).stages == 1


def test_a_schedule_that_has_no_chunks_gets_none():
    with pytest.raises(PipelineSizeError) as caught:
        schedule_of(mesh_of(pp=2), "gpipe", 2, 4)
    assert (
        caught.value.what == "the schedule 'gpipe' has one chunk of layers per device"
    )


def test_the_state_of_a_job_is_stored_by_stage():
    run = run_of(("pp", 2), ("tp", 2), gradient_accumulation_steps=4)
    kernel = run.abstract_state.params["decoder"]["mlp"]["up"]["kernel"]
    assert kernel.shape == (1, 2, 2, 16, 32)
    assert kernel.sharding.spec == P(None, "pp", None, None, "tp")
