# SPDX-License-Identifier: Apache-2.0
"""Checkpoints behind the loop: what is safe when, how many stay, what fails how."""

import asyncio
import gc
import logging
import resource
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tessera.errors import CheckpointWriteError
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints import manifest, saving
from tessera.train.checkpoints.checkpoint_folder import (
    Checkpoint,
    complete_steps,
    read_checkpoint,
    read_verified_step,
    write_verified_step,
)
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints, metadata_of
from tessera.train.data.cursor import Cursor

CURSOR = Cursor(12, {"text": "a", "seed": 0})


@pytest.fixture(scope="module")
def job(run_of):
    return run_of()


@pytest.fixture
def state(job, filled):
    return filled(job)


def test_a_checkpoint_says_what_it_is_of(job, state, tmp_path):
    with Checkpoints(job, tmp_path, "name: small\n") as checkpoints:
        checkpoints.save(4, state, CURSOR)
        checkpoints.wait()
        assert checkpoints.durable_step == 4
    metadata = read_checkpoint(tmp_path / "4").metadata
    assert metadata == metadata_of(job, 4, CURSOR, "name: small\n")
    assert metadata.mesh == {"fsdp": 1}
    assert metadata.random == {"seed": 0, "kind": "threefry2x32"}
    assert metadata.versions.keys() >= {"tessera", "jax", "orbax-checkpoint", "grain"}
    assert metadata.arrays.keys() == named_leaves(state).keys()
    kernel = metadata.arrays["params/decoder/mlp/up/kernel"]
    assert (kernel.shape, kernel.dtype) == ((5, 16, 32), "float32")


def test_one_counts_only_when_its_manifest_is_there(job, state, tmp_path, monkeypatch):
    go_on, reached = threading.Event(), threading.Event()

    def slowly(path):
        reached.set()
        assert go_on.wait(60)
        return manifest.write_manifest(path)

    monkeypatch.setattr(
        saving, "manifest", SimpleNamespace(LAST=manifest.LAST, write_manifest=slowly)
    )
    with Checkpoints(job, tmp_path, "") as checkpoints:
        checkpoints.save(2, state, CURSOR)
        assert reached.wait(60)
        assert (tmp_path / "2" / "state").is_dir()
        assert checkpoints.durable_step is None
        assert complete_steps(tmp_path) == []
        go_on.set()
        checkpoints.wait()
        assert checkpoints.durable_step == 2


def test_the_state_may_be_donated_as_soon_as_the_save_returns(job, state, tmp_path):
    expected = {name: np.array(leaf) for name, leaf in named_leaves(state).items()}
    grow = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    with Checkpoints(job, tmp_path, "") as checkpoints:
        checkpoints.save(2, state, CURSOR)
        for _ in range(20):
            state = grow(state)
        jax.block_until_ready(state)
    checkpoint = read_checkpoint(tmp_path / "2")
    assert isinstance(checkpoint, Checkpoint)
    restored = named_leaves(Restoration(checkpoint.metadata, job).restore(checkpoint))
    for name, array in expected.items():
        assert np.asarray(restored[name]).tobytes() == array.tobytes(), name


@pytest.mark.full
def test_the_newest_ones_are_kept(job, replaced, state, tmp_path):
    for keep, kept in ((2, [8, 6]), (None, [16, 14, 12, 10, 8, 6])):
        job = replaced(job, keep=keep)
        resumed = max(complete_steps(tmp_path), default=None)
        with Checkpoints(job, tmp_path, "", resumed) as checkpoints:
            for step in range((resumed or 0) + 2, (resumed or 0) + 10, 2):
                checkpoints.save(step, state, CURSOR)
        assert complete_steps(tmp_path) == kept
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, kept))


def test_an_old_one_that_cannot_be_removed_costs_no_new_one(
    job, replaced, state, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(saving.checkpoint_folder, "remove", fail)
    with Checkpoints(replaced(job, keep=1), tmp_path, "") as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state, CURSOR)
    assert complete_steps(tmp_path) == [4, 2]
    assert "the checkpoint of step 2 is not removed: " in caplog.text


@pytest.mark.parametrize(
    ("every", "due"), [(3, [3, 6, 8]), (0, [8]), (8, [8]), (100, [8]), (None, [])]
)
def test_checkpoints_are_due_every_so_often_and_after_the_last_step(
    job, replaced, tmp_path, every, due
):
    checkpoints = Checkpoints(replaced(job, checkpoint_every=every), tmp_path, "")
    assert [step for step in range(1, 9) if checkpoints.is_due(step)] == due


@pytest.mark.parametrize("setting", [{"checkpoint_every": None}, {"eval_only": True}])
def test_a_run_that_keeps_none_makes_no_folder(job, replaced, tmp_path, setting):
    Checkpoints(replaced(job, **setting), tmp_path / "none", "")
    assert not (tmp_path / "none").exists()


def test_what_is_later_than_the_last_verified_step_is_set_aside(job, state, tmp_path):
    with Checkpoints(job, tmp_path, "") as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, state, CURSOR)
            if step == 4:
                checkpoints.mark_verified(step)
        checkpoints.discard_unverified()
    assert complete_steps(tmp_path) == [4, 2]
    assert (tmp_path / "6.replaced").is_dir()


def test_a_run_has_verified_no_step_after_its_first(job, tmp_path):
    write_verified_step(tmp_path, 6)
    for resumed, verified in ((8, 6), (4, 4), (None, 0)):
        Checkpoints(job, tmp_path, "", resumed)
        assert read_verified_step(tmp_path) == verified


def test_a_step_is_saved_once_and_in_order(job, state, tmp_path):
    with Checkpoints(job, tmp_path, "", 4) as checkpoints:
        assert not checkpoints.is_due(4)
        for step in (2, 4):
            with pytest.raises(CheckpointWriteError) as caught:
                checkpoints.save(step, state, CURSOR)
        assert str(caught.value) == (
            "[T804] a checkpoint of step 4 cannot follow one of step 4\n"
            f"  got: step 4, in {tmp_path}\n"
            "  fix: save each step once, in ascending order\n"
            "  docs: https://tessera-spmd.github.io/tessera/errors/T804.html"
        )


def save_one(job, state, root, then=lambda: None):
    with Checkpoints(job, root, "") as checkpoints:
        checkpoints.save(2, state, CURSOR)
        then()


def fail(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.full
def test_one_that_fails_is_said_and_removed_and_the_next_is_tried(
    job, state, tmp_path, monkeypatch, caplog
):
    with caplog.at_level(logging.INFO, "tessera"):
        with Checkpoints(job, tmp_path, "") as checkpoints:
            checkpoints.save(2, state, CURSOR)
            checkpoints.wait()
            monkeypatch.setattr(saving, "write_metadata", fail)
            checkpoints.save(4, state, CURSOR)
            checkpoints._join()
            assert not (tmp_path / "4").exists()
            assert checkpoints.durable_step == 2
            monkeypatch.undo()
            checkpoints.save(6, state, CURSOR)
        assert complete_steps(tmp_path) == [6, 2]
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"{tmp_path}/4: No space left on device" in said
    assert f"the last complete checkpoint is {tmp_path}/2" in said
    assert "the checkpoint of step 6 is complete" in caplog.text


@pytest.mark.full
def test_a_last_one_that_fails_is_an_error(job, state, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "write_metadata", fail)
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        save_one(job, state, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_run_is_not_hidden_and_the_last_one_is_named(
    job, state, tmp_path, caplog
):
    with pytest.raises(ZeroDivisionError):
        save_one(job, state, tmp_path, then=lambda: 1 // 0)
    assert complete_steps(tmp_path) == [2]
    assert f"the last complete checkpoint is {tmp_path}/2" in caplog.text


@pytest.fixture
def small_files():
    """No file grows above four kilobytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.full
def test_orbax_s_own_errors_are_ours(job, state, tmp_path, caplog, small_files):
    checkpoints = Checkpoints(job, tmp_path, "")
    checkpoints.save(2, state, CURSOR)
    with pytest.raises(CheckpointWriteError, match="File too large"):
        checkpoints.wait()
    assert {record.name for record in caplog.records} == {"tessera"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "names"),
    [("/runs/2/state.orbax-checkpoint-tmp/d/ab", set()), ("/orbax/ab", {"asyncio"})],
)
def test_an_array_whose_error_nobody_awaits_is_logged_unless_it_is_orbax_s(
    job, state, tmp_path, caplog, path, names
):
    with Checkpoints(job, tmp_path, "") as checkpoints:
        checkpoints.save(2, state, CURSOR)
    loop = asyncio.new_event_loop()
    loop.create_future().set_exception(ValueError(f"Failed writing: {path}"))
    loop.close()
    gc.collect()
    assert {record.name for record in caplog.records} == names
