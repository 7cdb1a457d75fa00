# SPDX-License-Identifier: Apache-2.0
"""Which layouts the planner advises, and why it rejects others."""

from dataclasses import replace
from functools import cache

import pytest

from tessera.foundations.config_files import configs_dir
from tessera.targets.machine import machine
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.config.layout_checks import layout_problems
from tessera.train.planner import search as search_module
from tessera.train.planner.layout_legality import Legality
from tessera.train.planner.search import search
from tessera.train.planner.search_space import AXES, Space
from tessera.train.planner.step_time import StepModel

WORDS = ("data=synthetic", "training.sequence_length=64")


@cache
def config():
    return compose(WORDS, configs_dir()).config


@cache
def model() -> StepModel:
    return StepModel.of(config(), Target.parse("cpu:8"))


def space(batch: int = 16) -> Space:
    axes = tuple(axis for axis in AXES if axis != "ep")
    return Space(config(), frozenset(), axes, batch)


def found(batch: int = 16, *, memory: float | None = None):
    """A search on eight CPU devices, with as much memory each."""
    stepper = model()
    if memory is not None:
        kind = replace(machine("cpu"), memory_bytes=int(memory))
        target = replace(stepper.target, machine=kind)
        stepper = StepModel(config(), stepper.work, target)
    return search(space(batch), stepper)


@cache
def roomy():
    return search(space(), model(), most=40)


@pytest.fixture(scope="module", autouse=True)
def _traced_and_searched_once() -> None:
    roomy()


def test_the_fastest_layout_is_first():
    seconds = [each.prediction.seconds for each in roomy().best]
    assert seconds == sorted(seconds)
    assert len(seconds) > 20


def test_the_best_are_those_of_a_search_that_leaves_no_mesh_out(monkeypatch):
    """To the last digit, of those that surely fit."""
    monkeypatch.setattr(search_module, "_BEST", 4)
    legality = Legality(config())
    every = search_module._Search(space(), model(), legality, 10**6, surely=True).run()
    some = search(space(), model(), most=4)
    slowest = some.best[-1].prediction.seconds
    assert some.best == [e for e in every.best if e.prediction.seconds <= slowest]
    assert len(some.best) == 4
    assert all(each.is_safe for each in some.best)
    assert some.looked_at < every.looked_at


def test_layouts_that_may_not_fit_are_ranked_where_few_surely_do():
    least, _ = found(memory=1000).smallest
    tight = found(memory=1.2 * least).best
    assert tight
    assert not any(each.is_safe for each in tight)
    assert all(each.prediction.memory_bytes <= 1.2 * least for each in tight)


def test_a_layout_that_surely_fits_is_not_hidden_by_a_faster_one_that_may_not():
    """Of the same mesh and policy, where both are ranked."""
    least, _ = found(memory=1000).smallest
    ranked = found(memory=2 * least).best
    safe = [each for each in ranked if each.is_safe]
    assert 0 < len(safe) < 10
    pairs = {(each.layout.mesh, each.layout.remat) for each in safe}
    assert any(
        (each.layout.mesh, each.layout.remat) in pairs
        for each in ranked
        if not each.is_safe
    )


def test_every_layout_passes_the_checks_of_a_run():
    for each in roomy().best:
        assert layout_problems(each.layout.applied(config())) == []
        assert each.layout.num_devices == 8
        assert each.layout.global_batch_size == 16


@pytest.mark.full
def test_what_is_not_legal_is_counted_by_its_error():
    rejected = found(batch=6).rejected
    codes = {code for code, _ in rejected}
    assert {"T402", "T503"} <= codes
    assert all(count > 0 for count in rejected.values())


@pytest.mark.full
def test_layouts_fit_the_memory_of_a_device():
    most = max(each.prediction.memory_bytes for each in roomy().best)
    least = min(each.prediction.memory_bytes for each in roomy().best)
    room = (most + least) / 2
    tight = found(memory=room)
    assert tight.too_large > 0
    assert all(each.prediction.memory_bytes <= room for each in tight.best)


def test_meshes_on_which_no_choice_is_legal_are_rejected():
    """Four chunks on each of eight stages are more than the model has layers."""
    training = replace(config().training, pipeline_chunks=4)
    pinned = frozenset({"training.pipeline_chunks", "model.mesh_shape"})
    settings = replace(config(), training=training)
    settings = replace(
        settings, model=replace(settings.model, mesh_shape=((8,), ("pp",)))
    )
    nothing = search(Space(settings, pinned, ("pp",), 16), model())
    assert nothing.best == []
    assert {code for code, _ in nothing.rejected} == {"T311"}


def test_without_room_the_smallest_layout_is_known():
    nothing = found(memory=1000)
    assert nothing.best == []
    assert nothing.smallest is not None
    assert nothing.smallest[0] > 1000
