# SPDX-License-Identifier: Apache-2.0
"""``training.remat=auto``: the policy that keeps most of those that surely fit."""

from dataclasses import replace

import pytest

from tessera.errors import PlanError, TesseraError
from tessera.foundations.config_files import configs_dir
from tessera.targets.target import Target
from tessera.train.config.command_line import compose
from tessera.train.planner import step_time
from tessera.train.planner.auto_layout import AUTO_REMAT, choose_remat, with_layout
from tessera.train.planner.layout import Layout
from tessera.train.planner.memory_model import MARGIN
from tessera.train.planner.search_space import REMAT
from tessera.train.planner.step_time import StepModel

MESH = "model.mesh_shape=[[2,-1],[fsdp,tp]]"
WORDS = [MESH, "data=synthetic", "training.micro_batch_size=8"]
TARGET = "h100:1x4"


@pytest.fixture(scope="module")
def predicted():
    """What is expected of a step on the mesh that ``WORDS`` mean there."""
    known = [WORDS[0].replace("-1", "2"), *WORDS[1:], "training.dry_run=true"]
    config = compose([*known, f"runtime.target={TARGET}"], configs_dir()).config
    return StepModel.of(config, Target.parse(TARGET))


@pytest.fixture
def traced_before(monkeypatch, predicted):
    """The trace of the model, which neither layout nor batch nor memory changes."""
    monkeypatch.setattr(step_time, "workload", lambda *_: predicted.work)


def with_memory(nbytes):
    target = Target.parse(TARGET)
    return replace(
        target, machine=replace(target.machine, memory_bytes=int(nbytes) + 1)
    )


def test_no_policy_is_chosen_for_deterministic_numerics():
    with pytest.raises(PlanError, match=r"(?s)T714.*numerics=deterministic"):
        choose_remat([*WORDS, "training.numerics=deterministic"], Target.parse(TARGET))


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_the_first_policy_that_surely_fits_is_chosen(predicted):
    layout = Layout.of(predicted.config)
    sizes = [predicted.memory(replace(layout, remat=each)).total for each in REMAT]
    assert sizes == sorted(sizes, reverse=True)
    for policy, nbytes in zip(REMAT, sizes, strict=True):
        chosen, note = choose_remat(WORDS, with_memory(nbytes * MARGIN["gpu"]))
        assert chosen == policy
        assert f"chose {policy}, which keeps most of those that surely fit" in note


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_where_none_surely_fits_the_smallest_is_chosen():
    chosen, note = choose_remat(WORDS, with_memory(2**20))
    assert chosen == "full"
    assert "keeps least, and does not surely fit 1.00 MiB" in note


@pytest.mark.full
def test_the_policy_takes_the_place_of_auto():
    target = f"runtime.target={TARGET}"
    words, notes = with_layout([*WORDS, AUTO_REMAT, target, "training.dry_run=true"])
    assert words == [*WORDS, "training.remat=none", target, "training.dry_run=true"]
    assert notes[0].startswith("training.remat=auto chose none")


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_run_is_on_the_devices_that_are_here():
    words, _ = with_layout([AUTO_REMAT, *WORDS, f"runtime.target={TARGET}"])
    assert words == ["training.remat=none", *WORDS]


@pytest.mark.full
@pytest.mark.usefixtures("traced_before")
def test_a_planned_layout_has_a_policy_of_its_own():
    words = ["model.mesh_shape=auto", AUTO_REMAT, *WORDS[1:], "runtime.target=cpu:1"]
    assert AUTO_REMAT not in with_layout(words)[0]


def test_bad_settings_are_refused_as_those_of_a_run():
    with pytest.raises(TesseraError) as caught:
        with_layout(
            [AUTO_REMAT, "model.mesh_shape=[[3],[fsdp,tp]]", "runtime.target=cpu:1"]
        )
    assert caught.value.code == "T101"
