# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is gone on with: the newest that holds, said loudly if it is not."""

import random
import shutil

import pytest

from tessera.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DataChangedError,
)
from tessera.foundations.tree import named_leaves
from tessera.train.checkpoints.checkpoint_folder import Checkpoint
from tessera.train.checkpoints.choose_checkpoint import changed_settings, choose
from tessera.train.checkpoints.manifest import LAST, NAME
from tessera.train.checkpoints.restore_arrays import Restoration
from tessera.train.checkpoints.saving import Checkpoints
from tessera.train.config.optimizer_config import SgdConfig
from tessera.train.data.cursor import Cursor

CONFIG = "training:\n  steps: 8\n  resume: none\nmodel: {name: small}\n"


@pytest.fixture(scope="module")
def written(run_of, filled, tmp_path_factory):
    """A run with the checkpoints of steps 2, 4 and 6."""
    job, folder = run_of(), tmp_path_factory.mktemp("run")
    corpus, state = job.load_data(), filled(job)
    with Checkpoints(job, folder / "checkpoints", CONFIG) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, state, Cursor(2 * step, corpus.order))
    return folder


@pytest.fixture
def run(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def files(checkpoint):
    found = [path for path in checkpoint.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.stat().st_size)


# --- which one


def test_none_and_auto_begin_anew_where_there_is_nothing(tmp_path):
    assert choose("none", tmp_path).checkpoint is None
    choice = choose("auto", tmp_path)
    assert choice.checkpoint is None
    assert choice.own_step is None
    assert choice.warnings == (
        f"training.resume=auto: there is no checkpoint in {tmp_path}, and the run "
        "starts at step 0; hydra.run.dir=<folder> names the folder to search",
    )


def test_auto_takes_the_newest_of_the_run_s_own_folder(run):
    choice = choose("auto", run)
    assert choice.checkpoint.path == run / "checkpoints" / "6"
    assert choice.own_step == 6
    assert choice.root == run / "checkpoints"
    assert choice.warnings == ()
    assert choose("none", run).checkpoint is None


@pytest.mark.parametrize("of", ["", "checkpoints", "checkpoints/4"])
def test_a_path_is_a_run_its_checkpoints_or_one_of_them(run, tmp_path, of):
    choice = choose(str(run / of), tmp_path / "other")
    assert choice.checkpoint.metadata.step == (4 if of.endswith("4") else 6)
    assert choice.own_step is None
    assert choice.output_dir == tmp_path / "other"


def test_an_earlier_one_of_the_run_s_own_folder_is_its_own(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    choice = choose("run/checkpoints/4", run)
    assert choice.own_step == 4


def test_a_link_to_the_run_s_own_folder_is_its_own(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    for resume in (tmp_path / "link", run / ".." / run.name):
        assert choose(str(resume), run).own_step == 6


@pytest.mark.parametrize("resume", ["nowhere", "run/checkpoints/5", "empty"])
def test_a_path_without_checkpoints_is_an_error(run, tmp_path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError) as caught:
        choose(resume, tmp_path / "other")
    got = "no complete checkpoint" if resume == "empty" else "no such folder"
    assert str(caught.value) == (
        f"[T801] there is no intact checkpoint in {tmp_path / resume}\n"
        f"  got: {got}\n"
        "  fix: name the folder of a run, of its checkpoints or of one checkpoint: "
        "training.resume=<folder>; or start at step 0: training.resume=none\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T801.html"
    )


# --- damage


@pytest.mark.slow(reason="it reads the arrays' record of a checkpoint fifty times")
def test_fifty_flipped_bits_never_get_into_a_run(written, run, run_of):
    """Any bit of any file of a real checkpoint, fifty times."""
    draw, root = random.Random(1), run / "checkpoints"
    for _ in range(50):
        path = draw.choice(files(root / "6"))
        content = bytearray(path.read_bytes())
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        choice = choose("auto", run)
        assert choice.checkpoint.metadata.step == 4, path
        (said,) = choice.warnings
        assert said.startswith("THE CHECKPOINT OF STEP 6 IS DAMAGED: ")
        shutil.rmtree(root / "6.damaged")
        shutil.copytree(written / "checkpoints" / "6", root / "6")
    assert choose("auto", run).checkpoint.metadata.step == 6


@pytest.mark.parametrize("damage", ["shorter", "missing", "metadata", "no metadata"])
def test_the_one_before_is_used(run, run_of, damage):
    path = run / "checkpoints" / "6"
    longest = max(files(path), key=lambda file: file.stat().st_size)
    match damage:
        case "shorter":
            longest.write_bytes(longest.read_bytes()[:-1])
        case "missing":
            longest.unlink()
        case "metadata":
            (path / LAST).write_text("{}")
        case "no metadata":
            (path / LAST).unlink()
    broken = LAST if "metadata" in damage else longest.relative_to(path)
    what = "is missing" if "missing" in damage or "no " in damage else ""
    choice = choose("auto", run)
    assert choice.checkpoint.path == run / "checkpoints" / "4"
    assert choice.warnings == (
        f"THE CHECKPOINT OF STEP 6 IS DAMAGED: {broken} "
        f"{what or 'is not what was written'}. It was renamed to 6.damaged and "
        "does not count; the one before it is tried.",
    )
    assert (run / "checkpoints" / "6.damaged").is_dir()
    job = run_of()
    state = Restoration(choice.checkpoint.metadata, job).restore(choice.checkpoint)
    assert named_leaves(state).keys() == named_leaves(job.abstract_state).keys()


def test_one_without_a_manifest_never_counts(run):
    (run / "checkpoints" / "6" / NAME).unlink()
    choice = choose("auto", run)
    assert choice.checkpoint.metadata.step == 4
    assert choice.warnings == ()  # said when the run makes its folder ready
    assert (run / "checkpoints" / "6").is_dir()


def test_where_none_holds_nothing_begins_anew_in_silence(run):
    for step in (2, 4, 6):
        (run / "checkpoints" / str(step) / LAST).write_text("{}")
    for _ in range(2):  # all have been set aside by then
        with pytest.raises(CheckpointNotFoundError) as caught:
            choose("auto", run)
        assert "6.damaged" in caught.value.got
        assert "training.resume=none" in caught.value.fix


def test_in_the_folder_of_another_run_nothing_is_renamed(run, tmp_path):
    """That run may be going on, and just removing an old one."""
    (run / "checkpoints" / "6" / LAST).write_text("{}")
    choice = choose(str(run), tmp_path / "other")
    assert choice.checkpoint.metadata.step == 4
    assert choice.warnings == (
        f"THE CHECKPOINT OF STEP 6 IS DAMAGED: {LAST} is not what was written. It "
        "stays and does not count; the one before it is tried.",
    )
    assert (run / "checkpoints" / "6").is_dir()


def test_one_that_is_named_and_damaged_is_an_error_and_stays(run):
    path = run / "checkpoints" / "4"
    (path / LAST).write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="is not what was written"):
        choose(str(path), run)
    assert path.is_dir()


# --- what is said before anything is compiled


def test_what_a_run_goes_on_with_is_said(run, run_of):
    job = run_of(steps=6)
    now = CONFIG.replace("8", "6").replace("none", "auto")
    assert choose("auto", run).check(job, job.load_data(), now) == [
        f"resuming from {run}/checkpoints/6, at row 12",
        "changed settings: training.steps: 8 -> 6",
        "all 6 steps are done; raise training.steps to continue",
    ]
    assert choose("none", run).check(job, job.load_data(), now) == []


def test_other_data_and_another_optimizer_are_refused(run, run_of):
    choice = choose("auto", run)
    seeded = run_of(seed=1)
    with pytest.raises(DataChangedError, match=r"training\.seed: 0 -> 1"):
        choice.check(seeded, seeded.load_data(), CONFIG)
    anew = run_of(seed=1, resume_data="restart")
    assert "at row 0" in choice.check(anew, anew.load_data(), CONFIG)[0]
    other = run_of(optimizer=SgdConfig())
    with pytest.raises(CheckpointMismatchError):
        choice.check(other, other.load_data(), CONFIG)


def test_settings_are_compared_one_by_one():
    before = "a: 1\nb: {c: [1, 2], d: x}\ntraining: {resume: none, steps: 3}\n"
    now = "a: 1\nb: {c: [1, 3], e: y}\ntraining: {resume: auto, steps: 3}\n"
    assert list(changed_settings(before, now)) == [
        "b.c: [1, 2] -> [1, 3]",
        "b.d: x -> None",
        "b.e: None -> y",
    ]


def test_a_configuration_that_is_none_runs_nothing():
    hostile = "!!python/object/apply:os.getcwd []"
    assert list(changed_settings(hostile, CONFIG)) == [
        "the configuration in the checkpoint is malformed"
    ]


def test_a_checkpoint_knows_its_run(run):
    checkpoint = choose("auto", run).checkpoint
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.metadata.config == CONFIG
    assert checkpoint.metadata.cursor.rows == 12
