# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: what counts, what is set aside, what is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.errors import CheckpointWriteError
from tessera.train.checkpoints import checkpoint_folder
from tessera.train.checkpoints.checkpoint_folder import (
    Checkpoint,
    complete_steps,
    damaged_checkpoints,
    prepare_root,
    quarantine,
    read_checkpoint,
    remove,
)
from tessera.train.checkpoints.manifest import LAST, NAME, write_manifest
from tessera.train.checkpoints.metadata import Metadata, write_metadata
from tessera.train.data.cursor import Cursor


def write(root: Path, step: int, *, complete: bool = True) -> Path:
    path = root / str(step)
    (path / "state").mkdir(parents=True)
    (path / "state" / "numbers").write_text("1 2 3")
    metadata = Metadata(step, {}, {"dp": 1}, 1, None, Cursor(0, {}), {}, "", {})
    write_metadata(path / LAST, metadata)
    if complete:
        write_manifest(path)
    return path


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_complete_ones_count_the_newest_first(tmp_path):
    for step in (9, 10, 100):
        write(tmp_path, step)
    write(tmp_path, 200, complete=False)
    write(tmp_path, 300).rename(tmp_path / "300.damaged")
    write(tmp_path, 400).rename(tmp_path / "0400")
    (tmp_path / "500").touch()
    assert complete_steps(tmp_path) == [100, 10, 9]
    assert complete_steps(tmp_path / "none") == []


def test_one_that_holds_is_read(tmp_path):
    path = write(tmp_path, 7)
    checkpoint = read_checkpoint(path)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.metadata.step == 7
    assert checkpoint.state == path / "state"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', "[" * 200_000]
)
def test_metadata_that_says_nothing_is_damage(tmp_path, text):
    path = write(tmp_path, 7, complete=False)
    (path / LAST).write_text(text)
    write_manifest(path)
    said = read_checkpoint(path)
    assert isinstance(said, str)
    assert said.startswith(f"{LAST} is not usable: ")


def test_one_in_the_place_of_another_is_damage(tmp_path):
    write(tmp_path, 6).rename(tmp_path / "8")
    assert read_checkpoint(tmp_path / "8") == (
        f"{LAST} is not usable: step 6, in the folder of step 8"
    )


def test_nothing_is_renamed_onto_something_else(tmp_path):
    for expected in ("7.damaged", "7.damaged.1", "7.damaged.2"):
        assert quarantine(write(tmp_path, 7)).name == expected
    assert len(damaged_checkpoints(tmp_path)) == 3


def test_one_that_is_removed_half_way_does_not_count(tmp_path, monkeypatch):
    path = write(tmp_path, 7)

    def fail(*_):
        raise OSError("stopped")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(OSError, match="stopped"):
        remove(path)
    assert complete_steps(tmp_path) == []
    monkeypatch.undo()
    assert prepare_root(tmp_path, 7, 0) == []
    assert names(tmp_path) == set()


def test_a_folder_is_made_ready(tmp_path):
    root = tmp_path / "a" / "checkpoints"
    assert prepare_root(root, None, 100) == []
    assert names(root) == set()


def test_what_is_unfinished_is_removed_and_what_is_later_is_kept(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path, step)
    write(tmp_path, 8, complete=False)
    shutil.rmtree(write(tmp_path, 10, complete=False) / "state")
    assert prepare_root(tmp_path, 4, 0) == [
        "the checkpoint of step 6 is later than step 4 and was renamed to 6.replaced",
        f"the checkpoint of step 8 has no {NAME}; it does not count and was renamed "
        "to 8.unfinished",
        "removed the unfinished checkpoint of step 10",
    ]
    assert names(tmp_path) == {"2", "4", "6.replaced", "8.unfinished"}
    assert damaged_checkpoints(tmp_path) == []


def test_what_a_link_leads_to_is_not_removed(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "checkpoints"
    write(outside, 2)
    write(outside, 4, complete=False)
    root.mkdir()
    for step in (2, 4):
        (root / str(step)).symlink_to(outside / str(step))
    assert complete_steps(root) == [2]
    prepare_root(root, 2, 0)
    assert names(root) == {"2", "4.unfinished"}
    remove(root / "2")
    assert names(root) == {"4.unfinished"}
    assert complete_steps(outside) == [2]
    assert (outside / "4/state/numbers").exists()


def test_a_folder_that_is_no_checkpoint_is_not_removed(tmp_path):
    photos = tmp_path / "2026"
    photos.mkdir()
    (photos / "sea.jpeg").touch()
    prepare_root(tmp_path, None, 0)
    assert names(tmp_path) == {"2026.unfinished"}
    assert names(tmp_path / "2026.unfinished") == {"sea.jpeg"}


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError) as caught:
        prepare_root(tmp_path / "file" / "checkpoints", None, 0)
    assert str(caught.value) == (
        "[T804] a checkpoint cannot be written\n"
        f"  got: {tmp_path}/file/checkpoints: Not a directory\n"
        "  fix: make room or allow writing there, or use another folder: "
        "hydra.run.dir=<folder>\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T804.html"
    )


def test_a_disk_without_room_for_one_is_said_at_once(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=3 << 20)
    monkeypatch.setattr(checkpoint_folder.shutil, "disk_usage", lambda _: usage)
    assert prepare_root(tmp_path, None, 3 << 20) == []
    with pytest.raises(CheckpointWriteError) as caught:
        prepare_root(tmp_path, None, 5 << 20)
    assert str(caught.value) == (
        f"[T804] there is no room for a checkpoint in {tmp_path}\n"
        "  got: a checkpoint takes 5.00 MiB, and 3.00 MiB are free\n"
        "  fix: make room, use another folder (hydra.run.dir=<folder>), or write no "
        "checkpoints: training.checkpoint_every=null\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T804.html"
    )
