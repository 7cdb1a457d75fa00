# SPDX-License-Identifier: Apache-2.0
"""Runs of ``preference.reference=precomputed`` compare with their first weights."""

import shutil

import jax
import numpy as np
import pytest

from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DataChangedError,
)
from tests.train.loop.post_training_runs import (
    ONE,
    TWO_BY_TWO,
    lines_of,
    pairs_run,
    train_pairs,
    write_pairs,
)

# Almost three passes over 17 rows; evaluations read one of three.
STEPS = 12
SETTINGS = {
    **{"steps": STEPS, "checkpoint_every": 4, "keep": None, "validate_every": 4},
    **{"validation_sequences": 1, "numerics": "deterministic", "reduction_parts": 4},
}
MEASURED = ("loss", "val_loss", "reward_margin", "val_reward_margin", "grad_norm")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 20)


def numbers(folder, after=0):
    return [
        {name: line[name] for name in MEASURED if name in line}
        for line in lines_of(folder / "metrics.jsonl")
        if line["step"] > after
    ]


def run_of(pairs, reference="precomputed", mesh=ONE, **settings):
    data = {"validation_fraction": 0.2}
    return pairs_run(pairs, reference, mesh, data, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    folder, run = tmp_path_factory.mktemp("whole"), run_of(pairs)
    return run, train_pairs(run, folder), folder


def again(run, **settings):
    """A run that shares the compiled programs of another."""
    other = run_of(run.config.data.path, **settings)
    names = "step", "compiled", "compiled_scores", "score_reference", "evaluate"
    vars(other).update({name: getattr(run, name) for name in names})
    return other


def same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.full
def test_each_step_has_the_bits_of_a_run_with_a_copy(whole, pairs, tmp_path):
    run, trainer, folder = whole
    assert trainer.position.state.reference is None
    copied = train_pairs(run_of(pairs, "copy"), tmp_path)
    assert numbers(folder) == numbers(tmp_path)
    same_bits(trainer.position.state.params, copied.position.state.params)
    (source,) = trainer.corpus.sources
    assert (len(source.train_rows), len(source.validation_rows)) == (17, 3)
    first, *_, last = numbers(folder)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert abs(last["val_reward_margin"]) > 0.1
    log = (folder / "train.log").read_text()
    assert log.count("scored 0 of 20 rows") == log.count("scored all rows") == 1
    with pytest.raises(CheckpointMismatchError, match="reference/") as caught:
        train_pairs(run_of(pairs, "copy"), tmp_path / "other", str(folder))
    assert "tessera export" in caught.value.fix
    # Whose checkpoints have another copy of the weights, and no file.
    refused = again(run)
    with pytest.raises(CheckpointMismatchError, match=r"preference\.reference=copy"):
        train_pairs(refused, tmp_path / "other", str(tmp_path / "checkpoints" / "4"))
    assert not (tmp_path / "other").exists()


@pytest.mark.full
@pytest.mark.parametrize("step", [4, 8])
def test_a_checkpoint_that_was_taken_elsewhere_resumes_with_the_same_bits(
    whole, tmp_path, step
):
    run, trainer, folder = whole
    moved = shutil.copytree(folder / "checkpoints" / str(step), tmp_path / str(step))
    resumed = train_pairs(again(run), tmp_path / "run", str(moved))
    assert numbers(tmp_path / "run") == numbers(folder, after=step)
    same_bits(resumed.position.state, trainer.position.state)
    assert "scored" not in (tmp_path / "run" / "train.log").read_text()
    # What it saves has the numbers as well.
    last = train_pairs(again(run), tmp_path / "last", str(tmp_path / "run"))
    assert last.step == STEPS


@pytest.mark.full
def test_another_mesh_goes_on_with_the_same_bits(whole, pairs, tmp_path):
    _, _, folder = whole
    other = run_of(pairs, mesh=TWO_BY_TWO)
    train_pairs(other, tmp_path / "go", str(folder / "checkpoints" / "4"))
    assert numbers(tmp_path / "go") == numbers(folder, after=4)


@pytest.mark.full
def test_a_file_that_was_written_half_is_never_read(whole, tmp_path):
    run, _, folder = whole
    path = shutil.copytree(folder / "checkpoints" / "4", tmp_path / "4")
    content = (path / "reference.npz").read_bytes()
    (path / "reference.npz").write_bytes(content[: len(content) // 2])
    for _ in range(2):
        with pytest.raises(CheckpointNotFoundError, match=r"reference\.npz"):
            train_pairs(again(run), tmp_path / "run", str(path))
        (path / "reference.npz").unlink(missing_ok=True)


@pytest.mark.full
def test_a_fresh_start_on_other_data_is_refused(whole, tmp_path):
    _, _, folder = whole
    other = write_pairs(tmp_path / "others.jsonl", 24)
    changed = run_of(other, resume_data="restart")
    with pytest.raises(DataChangedError, match="scored other rows"):
        train_pairs(changed, tmp_path / "run", str(folder))


@pytest.mark.full
def test_an_evaluation_of_a_checkpoint_has_its_reference(whole, tmp_path):
    run, _, folder = whole
    alone = again(run, eval_only=True)
    train_pairs(alone, tmp_path / "run", str(folder / "checkpoints" / "8"))
    (found,) = numbers(tmp_path / "run")
    (expected,) = (
        {name: line[name] for name in found}
        for line in lines_of(folder / "metrics.jsonl")
        if line["step"] == 8 and "val_loss" in line
    )
    assert found == expected


@pytest.mark.full
def test_a_run_that_stops_while_it_scores_begins_again(whole, tmp_path):
    run, _, folder = whole
    answers = iter([True, False])
    stopped = train_pairs(again(run), tmp_path, should_continue=lambda: next(answers))
    assert (stopped.is_stopped, stopped.step) == (True, 0)
    train_pairs(again(run), tmp_path, "auto")
    assert numbers(tmp_path) == numbers(folder)
