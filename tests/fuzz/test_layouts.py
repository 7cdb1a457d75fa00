# SPDX-License-Identifier: Apache-2.0
"""Random machines, batches and settings: what the planner looks at, and what it finds.

Meshes are compared with a naive enumeration, and the memory of the checks with the
checks of a run themselves.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from random import Random

import pytest

from tessera.errors import TesseraError
from tessera.foundations.config_files import configs_dir
from tessera.targets.machine import machine
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.layout_checks import build_model, layout_problems
from tessera.train.config.mesh_shape import mesh_of_shape
from tessera.train.config.run_config import Config, data_parallel_groups
from tessera.train.config.settings_checks import check
from tessera.train.planner.layout import Layout
from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.search import search
from tessera.train.planner.search_space import AXES, Space
from tessera.train.planner.step_time import StepModel

DENSE = tuple(axis for axis in AXES if axis != "ep")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 30, 48, 64)


@cache
def traced(name: str) -> StepModel:
    words = [f"model={name}", "data=synthetic", "training.sequence_length=40"]
    config = compose(words, configs_dir()).config
    return StepModel.of(config, Target.parse("cpu:1"))


def model_on(name: str, count: int, memory: int, **training) -> StepModel:
    """The model on so many devices of so much memory, with other settings."""
    model = traced(name)
    config = replace(model.config, training=replace(model.config.training, **training))
    kind = replace(machine("cpu"), memory_bytes=memory)
    return StepModel(config, model.work, Target(kind, (count,), "cpu"))


def problems_of(config: Config, layout: Layout) -> list[TesseraError]:
    """What a run with a layout is told before it starts."""
    settings = layout.applied(config)
    if problems := check(settings):
        return problems
    problems = layout_problems(settings)
    try:
        mesh = mesh_of_shape(settings.model.mesh_shape)
        build_model(settings, mesh).layouts(mesh)
    except TesseraError as error:
        problems.append(error)
    return problems


@pytest.mark.full
@pytest.mark.fuzz(sample=15, whole=500)
def test_meshes_are_those_of_a_naive_enumeration(seed):
    draw = Random(seed)
    count = draw.choice(COUNTS)
    axes = tuple(axis for axis in AXES if draw.random() < 0.7) or ("fsdp",)
    meshes = list(Space(traced("tiny").config, frozenset(), axes, 8).meshes(count))
    naive = (
        {
            tuple((a, size) for a, size in zip(axes, sizes, strict=True) if size > 1)
            for sizes in itertools.product(range(1, count + 1), repeat=len(axes))
            if math.prod(sizes) == count
        }
        if count ** len(axes) <= 10**6
        else None
    )
    assert len(meshes) == len(set(meshes))
    if naive is not None:
        assert {mesh for mesh in meshes if count > 1} == naive - {()}


@pytest.mark.full
@pytest.mark.fuzz(sample=15, whole=5000)
def test_remembered_checks_say_what_the_checks_say(seed):
    draw = Random(seed)
    name = draw.choice(["tiny", "moe_tiny"])
    training = {
        "numerics": draw.choice(["fast", "fast", "deterministic"]),
        "reduction_parts": 8,
    }
    config = traced(name).config
    config = replace(config, training=replace(config.training, **training))
    legality = Legality(config)
    for _ in range(10):
        layout = random_layout(draw, AXES if name == "moe_tiny" else DENSE)
        # Others that differ in little, which a check may not tell apart.
        others = [random_layout(draw, ()) for _ in range(4)]
        changes = [draw.choice(fields(Layout)).name for _ in others]
        for each in [
            layout,
            *(
                replace(layout, **{name: getattr(other, name)})
                for name, other in zip(changes, others, strict=True)
                if name not in ("mesh", "schedule")
            ),
            replace(layout, mesh=random_layout(draw, dict(layout.mesh), 1.0).mesh),
        ]:
            problem, problems = legality.problem(each), problems_of(config, each)
            assert (problem is None) == (not problems), (each, problem, problems)
            if problem is not None:
                assert problem.code in {error.code for error in problems}, each


def random_layout(draw: Random, axes: Iterable[str], share: float = 0.5) -> Layout:
    """One of any settings, legal or not."""
    chosen = [axis for axis in axes if draw.random() < share] or ["dp"]
    is_pipeline = "pp" in chosen
    return Layout(
        tuple((axis, draw.choice([1, 2, 3, 4, 8])) for axis in chosen),
        micro_batch_size=draw.choice([1, 2, 3, 8]),
        microbatches=draw.choice([1, 2, 3, 4, 8]),
        remat=draw.choice(["none", "dots", "full", "nothing_saveable", "some"]),
        zero_stage=draw.randrange(4),
        offload=draw.random() < 0.3,
        loss_chunk=draw.choice(["auto", "none", 256]),
        schedule=draw.choice(["1f1b", "interleaved"]) if is_pipeline else None,
        chunks=draw.choice([1, 2, 4]) if is_pipeline else 1,
        sequence_parallel=draw.random() < 0.3,
    )


@pytest.mark.full
@pytest.mark.fuzz(sample=6, whole=300)
def test_every_layout_that_is_found_passes_the_checks_of_a_run(seed):
    draw = Random(seed)
    name = draw.choice(["tiny", "moe_tiny"])
    batch = draw.choice([1, 4, 6, 16, 60])
    pinned, training = set(), {}
    for setting, values in {
        "remat": ["none", "dots", "full"],
        "zero_stage": [0, 2],
        "micro_batch_size": [1, 2, 5],
        "numerics": ["deterministic"],
    }.items():
        if draw.random() < 0.2:
            training[setting] = draw.choice(values)
            pinned.add(f"training.{setting}")
    memory = draw.choice([2**22, 2**25, 2**30])
    model = model_on(name, draw.choice(COUNTS[:8]), memory, **training)
    axes = AXES if name == "moe_tiny" else DENSE
    found = search(Space(model.config, frozenset(pinned), axes, batch), model)
    for each in found.best:
        layout = each.layout
        assert problems_of(model.config, layout) == [], layout
        assert layout.num_devices == model.target.num_devices
        assert layout.global_batch_size == batch
        assert each.prediction.memory_bytes <= memory
        assert all(
            getattr(layout.applied(model.config).training, k) == v
            for k, v in training.items()
            if k != "micro_batch_size"
        )
        if "training.micro_batch_size" in pinned:
            assert layout.micro_batch_size <= training["micro_batch_size"]
    if not found.best:
        assert found.too_large or found.rejected
    groups = {data_parallel_groups(each.layout.sizes) for each in found.best}
    assert all(batch % count == 0 for count in groups)
