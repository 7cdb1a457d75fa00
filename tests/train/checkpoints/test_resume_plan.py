# SPDX-License-Identifier: Apache-2.0
"""``tessera.resume_plan``: what would move, what is in the way."""

import dataclasses
import gc
import json
import shutil

import jax
import pytest
import yaml

import tessera
from tessera.errors import CheckpointMismatchError, CheckpointNotFoundError
from tessera.mesh import Mesh
from tessera.train.checkpoints.manifest import LAST, NAME
from tessera.train.checkpoints.resume_plan import resume_plan
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.data.cursor import Cursor
from tessera.train.loop.optimizers import SgdConfig


def text_of(job) -> str:
    """The settings of a job as the configuration of its run would be."""
    values = dataclasses.asdict(job.config)
    model = values["model"]
    model |= model.pop("config")
    sizes, axes = model["mesh_shape"]
    model["mesh_shape"] = [list(sizes), list(axes)]
    return yaml.safe_dump(values)


@pytest.fixture(scope="module")
def run(run_of, filled, tmp_path_factory):
    """A run with the checkpoint of step 4, saved on fsdp 2."""
    job, folder = run_of(fsdp=2), tmp_path_factory.mktemp("run")
    with Checkpoints(job, folder / "checkpoints", text_of(job)) as checkpoints:
        checkpoints.save(4, filled(job), Cursor(16, job.load_data().order))
    return folder


def moves(plan):
    return {move.name: move for move in plan.moves}


def test_it_is_on_the_facade():
    assert tessera.resume_plan is resume_plan


def test_a_plan_prints_meshes_and_arrays(run):
    plan = resume_plan(run, [[2, 2], ["fsdp", "tp"]])
    lines = str(plan).splitlines()
    assert lines[:4] == [
        f"resume plan: step 4, {run}/checkpoints/4",
        "from  fsdp mesh, 2",
        "onto  fsdp × tp mesh, 2 × 2",
        "data  continues at row 16, in steps of 4 rows",
    ]
    (line,) = [line for line in lines if line.startswith("params/decoder/mlp/up")]
    assert line.split("  ")[0] == "params/decoder/mlp/up/kernel"
    for part in ("float32[5,16,32]", "(-, fsdp 2, -)", "(-, fsdp 2, tp 2)"):
        assert part in line, line
    moved = sum(move.moves for move in plan.moves)
    assert lines[-1] == f"moves          {moved} of {len(plan.moves)} arrays"


def test_what_stays_as_it_is_does_not_move(run):
    assert not any(move.moves for move in resume_plan(run).moves)
    assert not any(move.moves for move in resume_plan(run, [[2], ["fsdp"]]).moves)
    moved = moves(resume_plan(run, [[4], ["fsdp"]]))
    assert moved["params/decoder/mlp/up/kernel"].moves
    assert not moved["params/final_norm/scale"].moves


def test_stages_are_regrouped_and_counted(run, run_of):
    plan = resume_plan(run, run_of(pp=2).config)
    kernel = moves(plan)["params/decoder/mlp/up/kernel"]
    assert kernel.change == "regroup"
    regrouped = sum(move.change == "regroup" for move in plan.moves)
    assert f"; {regrouped} regrouped by stage" in str(plan)
    assert "a step takes 8 rows, and took 4" in plan.data


def test_what_does_not_divide_is_in_the_way_and_no_error(run):
    plan = resume_plan(run, [[3], ["tp"]])
    assert plan.moves == ()
    (said,) = plan.problems
    assert said.startswith("[T402] 4 attention heads cannot be divided over mesh axis")
    assert str(plan).splitlines()[-1] == f"in the way     {said}"
    (said,) = resume_plan(run, [[5], ["fsdp"]]).problems
    assert said.startswith("[T201] ")
    assert "also parameter" in said


def test_what_does_not_fit_is_listed(run, run_of):
    plan = resume_plan(run, run_of(optimizer=SgdConfig()).config)
    assert plan.problems
    assert all(problem.startswith("optimizer/") for problem in plan.problems)


def test_an_array_with_another_rank_is_in_the_way_and_no_error(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    path, name = folder / "checkpoints/4/metadata.json", "params/decoder/mlp/up/kernel"
    values = json.loads(path.read_text())
    values["arrays"][name] |= {"shape": [4], "layout": [["fsdp"]]}
    path.write_text(json.dumps(values))
    plan = resume_plan(folder, [[2, 2], ["pp", "tp"]])
    assert f"{name}: saved float32[4], this run float32[5,16,32]" in plan.problems
    assert name not in moves(plan)


def test_devices_that_do_not_exist_can_be_planned_for(run):
    plan = resume_plan(run, Mesh(["dp", "fsdp"], devices=range(64), shape=(16, 4)))
    assert plan.problems == ()
    assert "onto  dp × fsdp mesh, 16 × 4" in str(plan)


@pytest.mark.full
def test_nothing_is_allocated(run):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    plan = resume_plan(run, [[2, 2], ["fsdp", "tp"]])
    assert plan.moves
    assert {id(array) for array in jax.live_arrays()} <= before


def test_a_folder_without_checkpoints_is_an_error(run, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no such folder"):
        resume_plan(tmp_path / "none")
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "checkpoints" / "4" / LAST).write_text("{")
    with pytest.raises(CheckpointNotFoundError, match="cannot be read"):
        resume_plan(copy)
    (copy / "checkpoints" / "4" / NAME).unlink()
    with pytest.raises(CheckpointNotFoundError, match="none is complete"):
        resume_plan(copy)


@pytest.mark.parametrize(
    "config",
    ["", "a: 1", "name: ${oc.env:HOME}", "!!python/object/apply:os.getcwd []", "[1]"],
)
def test_a_configuration_of_another_version_is_an_error_and_runs_nothing(
    run_of, filled, tmp_path, config
):
    job = run_of()
    with Checkpoints(job, tmp_path, config) as checkpoints:
        checkpoints.save(2, filled(job), Cursor(4, {}))
    with pytest.raises(CheckpointMismatchError, match="another version of Tessera"):
        resume_plan(tmp_path)
