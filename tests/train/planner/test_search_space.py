# SPDX-License-Identifier: Apache-2.0
"""Which layouts the planner looks at."""

import pytest

from tessera.errors import BatchSizeError
from tessera.foundations.config_files import configs_dir
from tessera.train.config.command_line import compose
from tessera.train.planner.layout import Layout
from tessera.train.planner.search_space import Sizes, Space, divisors, factorings


def space(*words: str, pinned: tuple[str, ...] = (), batch: int = 16) -> Space:
    config = compose(["data=synthetic", *words], configs_dir()).config
    axes = ("pp", "dp", "fsdp", "cp", "tp")
    return Space(config, frozenset(pinned), axes, batch)


def layouts_on(found: Space, mesh: Sizes) -> list[Layout]:
    sizes = found.micro_batch_sizes(mesh)
    return [layout for size in sizes for layout in found.layouts(mesh, size)]


@pytest.mark.parametrize("number", [1, 7, 8, 12, 72])
def test_factorings_are_all_products_that_give_the_number(number):
    parts = [
        (a, b, c)
        for a in range(1, number + 1)
        for b in range(1, number + 1)
        for c in range(1, number + 1)
        if a * b * c == number
    ]
    assert sorted(factorings(number, 3)) == sorted(parts)


def test_divisors_ascend():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_every_mesh_has_all_devices_and_names_axes_that_split():
    meshes = list(space().meshes(8))
    assert len(meshes) == len(set(meshes)) == 35
    for mesh in meshes:
        assert Layout(mesh, 1, 1).num_devices == 8
        assert all(size > 1 for _, size in mesh)


def test_one_device_has_a_mesh():
    assert list(space().meshes(1)) == [(("fsdp", 1),)]


def test_a_mesh_of_the_command_line_stays():
    words = "model.mesh_shape=[[2,4],[dp,tp]]"
    (mesh,) = space(words, pinned=("model.mesh_shape",)).meshes(8)
    assert mesh == (("dp", 2), ("tp", 4))


def test_microbatches_share_the_global_batch():
    layouts = layouts_on(space(), (("dp", 2), ("tp", 4)))
    assert {layout.micro_batch_size for layout in layouts} == {1, 2, 4, 8}
    assert {layout.global_batch_size for layout in layouts} == {16}


def test_a_mesh_has_to_share_the_batch():
    with pytest.raises(BatchSizeError) as caught:
        space(batch=10).micro_batch_sizes((("fsdp", 4),))
    assert "training.global_batch_size=8 or 12" in caught.value.fix


def test_a_setting_of_the_command_line_stays():
    pinned = ("training.remat", "training.micro_batch_size", "training.loss_chunk")
    words = ("training.remat=dots", "training.micro_batch_size=6")
    layouts = list(layouts_on(space(*words, pinned=pinned), (("fsdp", 2),)))
    assert {layout.micro_batch_size for layout in layouts} == {4}  # 6 does not divide 8
    found = {
        v.remat
        for layout in layouts
        for v in Space.variants(space(*words, pinned=pinned), layout)
    }
    assert found == {"dots"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "gathers"),
    [
        ((("pp", 2), ("fsdp", 4)), {"microbatch", "step"}),
        ((("pp", 2), ("dp", 4)), {"microbatch"}),
        ((("fsdp", 8),), {"microbatch"}),
    ],
)
def test_only_pipelines_with_fsdp_may_gather_once(mesh, gathers):
    found = list(layouts_on(space(), mesh))
    assert {layout.gather for layout in found} == gathers
    for layout in found:
        words = layout.overrides()
        is_once = layout.gather == "step"
        assert ("training.pipeline_gather=step" in words) == is_once
        applied = layout.applied(space().config)
        assert Layout.of(applied).gather == layout.gather
    pinned = layouts_on(space(pinned=("training.pipeline_gather",)), mesh)
    assert {layout.gather for layout in pinned} == {"microbatch"}


def test_only_pipelines_have_schedules():
    assert {each.schedule for each in layouts_on(space(), (("fsdp", 8),))} == {None}
    found = {
        (e.schedule, e.chunks) for e in layouts_on(space(), (("pp", 2), ("fsdp", 4)))
    }
    assert found == {
        *(("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4))
    }


def test_a_schedule_of_the_command_line_has_its_chunks():
    words = "model.mesh_shape=[[2],[pp]] training.gradient_accumulation_steps=4 "
    words += "training.pipeline_schedule=dualpipev training.pipeline_chunks=2"
    for pinned in (
        ("training.pipeline_schedule",),
        ("training.pipeline_schedule", "training.pipeline_chunks"),
    ):
        found = layouts_on(space(*words.split(), pinned=pinned), (("pp", 2),))
        assert {(each.schedule, each.chunks) for each in found} == {("dualpipev", 2)}


def test_variants_save_more_and_more_memory():
    (layout, *_) = layouts_on(space(), (("dp", 4), ("tp", 2)))
    variants = list(space().variants(layout))
    assert [v.remat for v in variants[:16:4]] == ["none", "dots", "named", "full"]
    assert [v.zero_stage for v in variants[:4]] == [0, 1, 2, 3]
    assert variants[-2].loss_chunk == 256
    assert variants[-1].offload
