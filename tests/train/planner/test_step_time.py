# SPDX-License-Identifier: Apache-2.0
"""What the planner expects of a step, against counts and against compiled programs."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tessera.analysis.flops import count
from tessera.foundations.config_files import configs_dir
from tessera.targets.link_times import span
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config
from tessera.train.loop.build_run import Run
from tessera.train.planner.communication import StepCollectives
from tessera.train.planner.device_work import PassSeconds
from tessera.train.planner.layout import Layout
from tessera.train.planner.step_time import StepModel
from tessera.train.planner.workload import workload

WORDS = (
    *("data=synthetic", "training.sequence_length=64", "training.loss_chunk=none"),
    "recipe=none",
)
FULL = Layout((("fsdp", 8),), 2, 1, remat="full")
LARGE = Layout((("fsdp", 8),), 16, 1)
PIPELINE = Layout((("pp", 2), ("fsdp", 4)), 2, 4, schedule="1f1b")
PARTLY = [
    pytest.param("model.lora.rank=4", marks=pytest.mark.full),
    "training.trainable=[decoder/attention/**]",
]


@cache
def config(*words: str):
    return compose([*WORDS, *words], configs_dir()).config


def traced(settings: Config, target: Target, *policies: str) -> StepModel:
    """Less than ``StepModel.of``, which traces the gradients of each policy twice."""
    return StepModel(settings, workload(settings, target, policies), target)


@cache
def model(*words: str) -> StepModel:
    return traced(config(*words), Target.parse("cpu:8"), "none", "dots", "full")


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> None:
    model()


@cache
def gemma() -> StepModel:
    words = ("model=gemma3_270m", "training.sequence_length=2048")
    settings = compose([*words, "training.mixed_precision=bf16"], configs_dir()).config
    return traced(settings, Target.parse("cpu:8"), "none", "full")


@cache
def compiled(layout: Layout, *words: str):
    settings = layout.applied(config(*words))
    run = Run(settings, mesh_of_shape(settings.model.mesh_shape))
    return run.compiled


def seconds(layout: Layout) -> float:
    return model().predict(layout).seconds


@pytest.mark.full
def test_products_in_layers_alone_run_at_the_peak_of_fp8():
    def compute(precision: str) -> PassSeconds:
        words = ("model=llama3.2_1b", f"training.mixed_precision={precision}")
        settings = compose(words, configs_dir()).config
        found = traced(settings, Target.parse("h100:1x8", "cpu"), "full")
        return found.device_work(FULL)[0].compute(8, "full")

    bf16, fp8 = compute("bf16"), compute("fp8")
    assert 0.5 < fp8.layers_forward / bf16.layers_forward < 0.85
    assert 0.5 < fp8.layers_backward / bf16.layers_backward < 0.85
    assert (fp8.ends_forward, fp8.ends_backward) == (
        bf16.ends_forward,
        bf16.ends_backward,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "remat", [pytest.param("none", marks=pytest.mark.full), "full"]
)
def test_flops_are_those_of_the_traced_step(remat):
    """But for masked blocks of attention, which are skipped or not: half count here."""
    layout = replace(FULL, remat=remat)
    found = count(compiled(layout).traced.graph.program).matmul
    work = model().work
    again = work.recomputed[remat]
    in_layers = sum(p.flops for p in work.products if p.path in work.layered())
    each = work.flops + again.products * in_layers + again.inner_flops
    assert 16 * each == pytest.approx(found, rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("words", PARTLY, ids=str)
def test_flops_are_those_of_a_step_that_trains_some_parameters(words):
    found = count(compiled(LARGE, words).traced.graph.program).matmul
    assert 128 * model(words).work.flops == pytest.approx(found, rel=0.06)


@pytest.mark.full
@pytest.mark.parametrize("words", PARTLY, ids=str)
def test_memory_is_that_of_a_step_that_trains_some_parameters(words):
    """Gradients that nobody asked for are not in it: they grow with the batch here."""
    peak = compiled(LARGE, words).memory.peak
    assert model(words).memory(LARGE).total == pytest.approx(peak, rel=0.2)


GOLDEN = {
    # Of gemma3_270m on eight H100, sequences of 2,048 tokens, bf16: MiB of collectives
    # in the step that the CUDA compiler of JAX 0.10.2 writes.
    Layout((("fsdp", 8),), 8, 1, remat="full"): {"fsdp": 1797},
    Layout((("fsdp", 4), ("tp", 2)), 8, 1, remat="full"): {"fsdp": 957, "tp": 2548},
    Layout((("fsdp", 4), ("tp", 2)), 4, 1): {"fsdp": 915, "tp": 914},
}


@pytest.mark.full
@pytest.mark.parametrize("layout", GOLDEN, ids=str)
def test_collectives_are_those_of_the_compiler_of_gpus(layout):
    device, _ = gemma().device_work(layout)
    predicted: dict[str, float] = {}
    for each in StepCollectives(device, layout).of_microbatch():
        axes = "×".join(each.axes)
        nbytes = each.nbytes * each.times / 2**20
        predicted[axes] = predicted.get(axes, 0.0) + nbytes
    for axes, mebibytes in GOLDEN[layout].items():
        assert predicted[axes] == pytest.approx(mebibytes, rel=0.02), axes


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(("fsdp", 8),), (("dp", 8),)], ids=str)
def test_collectives_are_those_of_the_compiled_step(mesh):
    layout = Layout(mesh, 2, 1)
    ((axis, _),) = mesh
    device, _ = model().device_work(layout)
    transfers = StepCollectives(device, layout).of_microbatch()
    predicted = sum(each.nbytes * each.times for each in transfers)
    rows = compiled(layout).collectives.rows
    found = sum(r.nbytes * r.counted_calls for r in rows if r.axes == (axis,))
    assert predicted == pytest.approx(found, rel=0.15)


@pytest.mark.full
def test_gradients_of_a_pipeline_are_summed_once_by_the_devices_of_a_stage():
    layout = replace(PIPELINE, mesh=(("pp", 2), ("dp", 4)))
    device, _ = model().device_work(layout)
    predicted: dict[str, float] = {}
    for each in StepCollectives(device, layout).of_step():
        (axis,) = each.axes
        predicted[axis] = predicted.get(axis, 0.0) + each.nbytes * each.times
    rows = compiled(layout).collectives.rows
    summed = sum(r.nbytes for r in rows if r.kind == "all-reduce" and "dp" in r.axes)
    gathered = sum(r.nbytes for r in rows if r.kind == "all-gather")
    assert predicted["dp"] == pytest.approx(summed, rel=0.05)
    assert predicted["pp"] == pytest.approx(2 * gathered, rel=0.01)


@pytest.mark.full
def test_stages_send_and_gather_what_the_compiled_step_does():
    layout = Layout((("pp", 2), ("tp", 2)), 2, 4, "named", schedule="1f1b")
    device, _ = model().device_work(layout)
    sent, gathered = StepCollectives(device, layout).of_tick()
    rows = compiled(layout).collectives.rows
    permutes = [row for row in rows if row.kind == "collective-permute"]
    ticks = 4 + 2 * (2 - 1)
    assert sent.axes == ("pp",)
    assert [(row.nbytes, row.calls) for row in permutes] == [(sent.nbytes, ticks)] * 2
    wires = [row for row in rows if (row.kind, row.axes) == ("all-gather", ("tp",))]
    assert gathered.axes == ("tp",)
    assert gathered.nbytes in {row.nbytes for row in wires}
    assert gathered.nbytes == 2 * sent.nbytes


@pytest.mark.full
def test_a_pipeline_that_gathers_once_sends_that_in_each_step():
    layout = replace(PIPELINE, gather="step")
    device, _ = model().device_work(layout)
    comms, predicted = StepCollectives(device, layout), Counter[tuple[Any, ...]]()
    assert not comms.of_microbatch()
    for each in comms.of_step():
        predicted[each.axes, each.kind] += each.nbytes * each.times
    found = Counter[tuple[Any, ...]]()
    for row in compiled(layout).collectives.rows:
        found[row.axes, row.kind] += row.total_bytes
    for axes in (("fsdp",), ("pp", "fsdp")):
        for kind in ("all-gather", "reduce-scatter"):
            nbytes = predicted.pop((axes, kind))
            assert nbytes == pytest.approx(found[axes, kind], rel=0.01)
            assert nbytes > 2**16
    assert sum(predicted.values()) < 2**16  # norms


@pytest.mark.full
def test_a_pipeline_that_gathers_once_takes_less_time_and_more_memory():
    """A copy of the stage's parameters, and gradients of one microbatch and of all."""
    often, step = (
        replace(PIPELINE, gather=gather) for gather in ("microbatch", "step")
    )
    assert model().predict(step).exposed < model().predict(often).exposed
    more = model().memory(step).total - model().memory(often).total
    found = compiled(step).memory.peak - compiled(often).memory.peak
    assert more == pytest.approx(found, rel=0.2)


@pytest.mark.full
def test_recomputation_takes_time_and_saves_memory():
    none, full = (model().predict(replace(FULL, remat=r)) for r in ("none", "full"))
    assert full.memory_bytes < none.memory_bytes
    assert full.compute > none.compute - 1e-12


@pytest.mark.slow(reason="it traces two models")
def test_of_copied_keys_and_values_those_in_use_are_named():
    """Of two heads on four devices each has a copy, and its queries use one."""
    kept = {}
    for heads in (2, 4):
        settings = config("model.num_heads=4", f"model.num_kv_heads={heads}")
        made = traced(settings, Target.parse("cpu:8"), "none", "named", "dots")
        for policy in ("named", "dots"):
            layout = Layout((("fsdp", 2), ("tp", 4)), 1, 1, remat=policy)
            kept[heads, policy] = made.memory(layout).kept
    assert kept[2, "named"] == pytest.approx(kept[4, "named"], rel=0.02)
    assert kept[2, "dots"] > 1.04 * kept[4, "dots"]


def test_a_pipeline_waits_less_with_more_microbatches():
    few, many = (
        model().predict(Layout((("pp", 2), ("dp", 4)), 1, n, schedule="1f1b"))
        for n in (2, 8)
    )
    assert few.bubble / few.seconds > many.bubble / many.seconds > 0


def test_slow_links_show_where_an_axis_crosses_hosts():
    """On two hosts, an axis that crosses them is slower than one inside."""
    stepper = StepModel(config(), model().work, Target.parse("h100:2x4"))
    inside = stepper.predict(Layout((("dp", 2), ("tp", 4)), 512, 1))
    across = stepper.predict(Layout((("tp", 4), ("dp", 2)), 512, 1))
    assert across.exposed > inside.exposed


@pytest.mark.parametrize(
    ("target", "size", "has_windows"),
    [("v5e:2x4", 8, True), ("v5e:8x8", 64, False), ("h100:1x8", 8, False)],
)
def test_a_tpu_adds_up_the_parts_of_windowed_matmuls(target, size, has_windows):
    """Where weights are gathered over all axes of the batch, and these are few."""
    meshes = (("fsdp", size),), (("dp", 2), ("fsdp", size // 2))
    stepper = StepModel(config(), model().work, Target.parse(target))
    whole, part = (
        stepper.device_work(Layout(mesh, size, 1))[0].compute(size, "none")
        for mesh in meshes
    )
    assert whole.layers_backward == part.layers_backward
    assert (whole.layers_forward > part.layers_forward) == has_windows


def test_offloading_the_optimizer_frees_its_memory():
    plain = Layout((("dp", 8),), 1, 1)
    kept, moved = (model().memory(replace(plain, offload=o)) for o in (False, True))
    assert moved.optimizer < kept.optimizer
    assert moved.parameters == kept.parameters
    assert moved.on_host == kept.optimizer


@pytest.mark.full
@pytest.mark.parametrize("words", PARTLY, ids=str)
def test_what_is_offloaded_comes_back_an_array_at_a_time(words):
    layout = Layout((("dp", 8),), 1, 1, offload=True)
    trained = (each.size for each in model(words).work.parameters if each.is_trained)
    assert model(words).memory(layout).optimizer == 8 * max(trained)


def test_offloading_the_optimizer_takes_time():
    plain = Layout((("dp", 8),), 1, 1)
    kept, moved = (model().predict(replace(plain, offload=o)) for o in (False, True))
    assert moved.overhead > kept.overhead


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        ("adamw", 8),  # two moments in f32
        pytest.param("lion", 4, marks=pytest.mark.full),  # one, as that of sgd
        # a mean of each row and column
        pytest.param("adafactor", 4 / 128 + 4 / 512, marks=pytest.mark.full),
    ],
)
def test_an_update_moves_what_the_optimizer_keeps(optimizer, nbytes):
    settings = compose([*WORDS, f"optimizer={optimizer}"], configs_dir()).config
    found = traced(settings, Target.parse("cpu:8"), "none")
    (mlp,) = (each for each in found.work.parameters if "down" in each.path)
    assert mlp.state_bytes == pytest.approx(nbytes, rel=0.01)
    layout = replace(FULL, remat="none")
    device, _ = found.device_work(layout)
    rate = device.machine.memory_bandwidth * device.machine.efficiency["memory"]
    moved = 12 * sum(each.size for each in found.work.parameters) / 8
    moved += 2 * found.memory(layout).optimizer
    assert device.optimizer_seconds(1) == pytest.approx(moved / rate, rel=0.02)


def test_zero_splits_what_its_stage_says():
    stages = [
        model().memory(Layout((("dp", 8),), 1, 1, zero_stage=s)) for s in range(4)
    ]
    assert stages[1].optimizer < stages[0].optimizer / 7
    assert stages[2].gradients <= stages[1].gradients
    assert stages[3].parameters < stages[2].parameters / 7


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        FULL,
        PIPELINE,
        *(
            pytest.param(layout, marks=pytest.mark.full)
            for layout in (
                Layout((("dp", 8),), 2, 1, zero_stage=1),
                Layout((("dp", 4), ("tp", 2)), 2, 1, zero_stage=3),
                # Four stages for six layers: a third more is stored.
                replace(PIPELINE, schedule="interleaved", chunks=2),
            )
        ),
    ],
    ids=str,
)
def test_the_state_is_that_of_the_compiled_step(layout):
    """Arguments are the state, a batch of integers and some counters."""
    arguments = compiled(layout).memory.arguments
    assert model().memory(layout).state == pytest.approx(arguments, rel=0.02)


@pytest.mark.parametrize("name", ["h100:3x4", "gb200:18x4*2"])
def test_groups_lie_on_the_links_as_their_devices_do(name):
    target = Target.parse(name)
    step = StepModel(config(), model().work, target)
    for mesh in [(("a", 3), ("b", 2), ("c", 2)), (("a", 2), ("b", 6), ("c", 12))]:
        sizes = [size for _, size in mesh]
        if math.prod(sizes) != target.num_devices:
            continue
        ids = np.arange(target.num_devices).reshape(sizes)
        for axes in [("a",), ("b",), ("c",), ("a", "c"), ("b", "c"), ("a", "b", "c")]:
            at = tuple(slice(None) if axis in axes else 0 for axis, _ in mesh)
            assert step._span(mesh, axes) == span(target, ids[at].ravel().tolist())
