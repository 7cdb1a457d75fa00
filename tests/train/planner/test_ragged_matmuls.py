# SPDX-License-Identifier: Apache-2.0
"""What the planner expects of experts, against compiled programs."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.tracing import scope
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.loop.build_run import Run
from tessera.train.planner.communication import StepCollectives
from tessera.train.planner.layout import Layout
from tessera.train.planner.step_time import StepModel
from tessera.train.planner.workload import workload

pytestmark = pytest.mark.full

SHARED = Layout((("fsdp", 8),), 16, 1, remat="full")
ONE_EACH = replace(SHARED, mesh=(("ep", 8),))
BOTH = replace(SHARED, mesh=(("fsdp", 2), ("ep", 4)))


@cache
def config():
    words = ("data=synthetic", "model=moe_tiny", "training.sequence_length=64")
    return compose([*words, "training.loss_chunk=none"], configs_dir()).config


@cache
def model() -> StepModel:
    target = Target.parse("cpu:8")
    return StepModel(config(), workload(config(), target, ("none", "full")), target)


@cache
def compiled(layout: Layout):
    settings = layout.applied(config())
    return Run(settings, mesh_of_shape(settings.model.mesh_shape)).compiled


@pytest.mark.parametrize(
    "layout",
    [replace(SHARED, remat="none"), replace(ONE_EACH, remat="none"), BOTH],
    ids=str,
)
def test_memory_is_that_of_the_compiled_step(layout):
    """Masks of all experts, buffers of the exchange: up to half of it all."""
    peak = compiled(layout).memory.peak
    assert model().memory(layout).total == pytest.approx(peak, rel=0.2)


def test_rows_take_the_time_of_all_experts_of_a_device_where_xla_has_no_kernel():
    shared, own = (
        model().device_work(layout)[0].compute(16, "none").layers_forward
        for layout in (SHARED, ONE_EACH)
    )
    assert shared > 1.5 * own  # though buffers of the exchange have twice the rows


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:1x8"])
def test_rows_take_the_time_of_their_own_experts_on_an_accelerator(target):
    stepper = StepModel(config(), model().work, Target.parse(target))
    shared, own = (
        stepper.device_work(layout)[0].compute(16, "none").layers_forward
        for layout in (replace(SHARED, mesh=(("dp", 8),)), ONE_EACH)
    )
    assert shared < own  # which has twice the rows in its buffers
    ragged = stepper.device_work(SHARED)[0].ragged
    assert all(ragged.matrices(each) == 1 for each in stepper.work.products)


def test_blocks_for_a_gpu_are_found_as_ragged_matmuls(monkeypatch):
    """The first rows of each expert, an even share and an eighth, in eights."""
    ragged = model().work
    h100 = SimpleNamespace(platform="gpu", device_kind="", compute_capability="9.0")
    monkeypatch.setattr(scope, "device", lambda: h100)
    training = replace(config().training, sequence_length=256)
    longer = replace(config(), training=training)
    blocks = workload(longer, Target.parse("cpu:8"), ("none",))
    found, wanted = (
        {each.path: each for each in work.products if each.groups > 1}
        for work in (blocks, ragged)
    )
    assert found.keys() == wanted.keys() != set()
    for path, each in found.items():
        same = replace(wanted[path], rows=each.rows, source=each.source)
        assert (each, each.rows) == (same, 8 * 72)


def test_matrices_are_split_by_the_name_of_their_dim():
    """And not because they are as many as experts, or on a mesh with their axis."""
    ragged = model().device_work(BOTH)[0].ragged
    experts = next(each for each in model().work.products if each.groups > 1)
    others = replace(experts, outer_names=(None, "mlp"))
    assert (ragged.matrices(experts), ragged.matrices(others)) == (2, 8)
    assert (ragged.rows(experts), ragged.rows(others)) == (256, 128)


def test_rows_are_exchanged_in_buffers_that_the_first_round_fills_by_half():
    device, _ = model().device_work(BOTH)
    (first, *others) = [
        each.nbytes
        for each in StepCollectives(device, BOTH).of_microbatch()
        if each.kind == "all-to-all" and each.axes == ("ep",)
    ]
    rows = compiled(BOTH).collectives.rows
    buffers = {r.nbytes for r in rows if (r.kind, r.axes) == ("all-to-all", ("ep",))}
    assert max(buffers) == first
    assert set(others) == {first}
