# SPDX-License-Identifier: Apache-2.0
"""A run's folder: made, written, and never mixed with an earlier run's."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.errors import OutputPathError
from tessera.train.loop import run_folder
from tessera.train.loop.run_folder import cannot_write, open_run_folder, write_durably


def test_the_folder_has_its_files_from_the_beginning(tmp_path):
    folder = open_run_folder(tmp_path / "a" / "b", "name: tiny\n")
    assert folder.config.read_text() == "name: tiny\n"
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"train.log", "metrics.jsonl", "tensorboard", "config.yaml"}


def test_an_earlier_run_is_kept_under_other_names(tmp_path):
    for number in range(3):
        folder = open_run_folder(tmp_path, f"run: {number}\n")
        folder.metrics.write_text(f"{number}\n")
    second = {"train.2.log", "metrics.2.jsonl", "tensorboard.2", "config.2.yaml"}
    assert {path.name for path in tmp_path.glob("*.2*")} == second
    assert folder.metrics.read_text() == "2\n"
    assert (tmp_path / "metrics.1.jsonl").read_text() == "0\n"
    assert (tmp_path / "metrics.2.jsonl").read_text() == "1\n"
    assert (tmp_path / "config.2.yaml").read_text() == "run: 1\n"


def test_files_of_one_earlier_run_get_one_number(tmp_path):
    (tmp_path / "metrics.1.jsonl").write_text("old\n")
    (tmp_path / "train.log").write_text("log\n")
    open_run_folder(tmp_path, "")
    assert [path.name for path in tmp_path.glob("*.2*")] == ["train.2.log"]
    assert (tmp_path / "metrics.1.jsonl").read_text() == "old\n"


def test_nothing_is_written_through_a_link_that_lies_there(tmp_path):
    victim = tmp_path / "victim"
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(victim)
    (run / "config.yaml").symlink_to(victim)
    folder = open_run_folder(run, "name: tiny\n")
    assert not victim.exists()
    assert not folder.config.is_symlink()
    assert (run / "config.1.yaml").is_symlink()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputPathError) as caught:
        open_run_folder(tmp_path / "file" / "run", "")
    assert str(caught.value) == (
        "[T504] the run cannot write its output\n"
        f"  got: {tmp_path}/file/run: Not a directory\n"
        "  fix: make room or give leave to write there, or take another folder: "
        "hydra.run.dir=<folder>\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )


@pytest.mark.parametrize("name", ["a\0b", "a" * 300])
def test_a_path_that_no_system_takes_is_refused(tmp_path, name):
    with pytest.raises(OutputPathError, match="cannot write its output"):
        open_run_folder(tmp_path / name, "")


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputPathError) as caught:
        open_run_folder(tmp_path, "")
    assert caught.value.got == f"{tmp_path}: No space left on device"


def test_an_error_without_a_file_names_the_path_that_was_tried():
    error = cannot_write(Path("x"), OSError(errno.EIO, "Input/output error"))
    assert error.got == "x: Input/output error"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_durably(path, ["old"])

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no"):
        write_durably(path, ["ne", "w"])
    assert path.read_text() == "old"


# --- a run that goes on


def test_a_run_that_goes_on_keeps_checkpoints_and_the_curve_so_far(tmp_path):
    folder = open_run_folder(tmp_path, "run: 0\n")
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    lines = [f'{{"step": {step}, "loss": 0.1}}\n' for step in (1, 2, 3)]
    folder.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    folder = open_run_folder(tmp_path, "run: 1\n", continued_step=2)
    assert folder.metrics.read_text() == "".join(lines[:2])
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert (tmp_path / "metrics.1.jsonl").read_text().endswith('"lo')
    first = {"train.1.log", "metrics.1.jsonl", "tensorboard.1", "config.1.yaml"}
    assert {path.name for path in tmp_path.glob("*.1*")} == first


def test_a_run_that_begins_anew_leaves_another_s_checkpoints_aside(tmp_path):
    open_run_folder(tmp_path, "run: 0\n")
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    open_run_folder(tmp_path, "run: 1\n")
    assert (tmp_path / "checkpoints.1" / "2").is_dir()
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_does_not_go_on_through_a_link_to_checkpoints_elsewhere(tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    open_run_folder(run, "run: 0\n")
    (run / "checkpoints").symlink_to(outside)
    with pytest.raises(OutputPathError) as caught:
        open_run_folder(run, "run: 1\n", continued_step=2)
    assert str(caught.value) == (
        "[T504] a run that goes on would write outside of its folder\n"
        f"  got: {run}/checkpoints is a link to {outside}\n"
        "  fix: put the folder itself there, or take the run's folder to where there "
        "is room: hydra.run.dir=<folder>\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T504.html"
    )
    assert (run / "config.yaml").read_text() == "run: 0\n"


def continued(folder: Path, content: bytes, step: int = 10) -> list[str]:
    """The numbers with which a run goes on that finds some there."""
    (folder / "metrics.jsonl").write_bytes(content)
    opened = open_run_folder(folder, "", continued_step=step)
    assert (folder / "metrics.1.jsonl").read_bytes() == content
    assert (folder / "metrics.jsonl").is_file()
    return opened.metrics.read_text().splitlines()


def row(step: int) -> bytes:
    return b'{"step": %d, "loss": 0.5}' % step


def test_a_last_line_without_its_end_is_not_glued_to_the_next(tmp_path):
    """A run may be killed between a line and its end."""
    assert continued(tmp_path, row(1) + b"\n" + row(2)) == [
        '{"step": 1, "loss": 0.5}',
        '{"step": 2, "loss": 0.5}',
    ]
    with (tmp_path / "metrics.jsonl").open() as file:
        assert file.read().endswith("}\n")


JUNK = {
    "nested": b"[" * 200_000,
    "nested in the right place": b'{"step": ' + b"[" * 200_000,
    "half a line": b'{"step": 4, "lo',
    "bytes": bytes(range(128, 256)),
    "another value": b"[1, 2]",
    "no step": b'{"loss": 1}',
    "a step that is none": b'{"step": true}',
    "a step below 0": b'{"step": -1}',
    "infinite": b'{"step": Infinity}',
    "large": b'{"step": 1e999}',
    "digits": b'{"step": ' + b"9" * 5000 + b"}",
    "twice": b'{"step": 1, "step": 2}',
    "long": b'{"step": 3, "x": "' + b"x" * 3_000_000 + b'{"step": 3}',
    "longer than is read at once": b"x" * (2**20) + row(3),
    "nothing": b"",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_a_line_that_is_none_costs_no_other(tmp_path, junk):
    lines = [row(1), junk, row(2), junk, row(11), row(3), junk]
    assert continued(tmp_path, b"\n".join(lines)) == [
        row(step).decode() for step in (1, 2, 3)
    ]


KILLED = """
import os, signal, sys, types
package = types.ModuleType("tessera")
package.__path__ = [sys.argv[2]]
sys.modules["tessera"] = package
from pathlib import Path
from tessera.train.loop import run_folder
calls = 0
def dies_at(number, act):
    def called(*given, **named):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*given, **named)
    return called
# Every way in which a file or its name comes to be, and the middle of the new file.
number = int(sys.argv[3])
names = "rename", "replace", "hardlink_to", "open", "touch", "mkdir", "write_text"
for name in names:
    setattr(Path, name, dies_at(number, getattr(Path, name)))
os.fsync = dies_at(number, os.fsync)
run_folder.parse_json = dies_at(number, run_folder.parse_json)
run_folder.open_run_folder(Path(sys.argv[1]), "", continued_step=20)
"""


@pytest.mark.full
def test_a_kill_at_any_moment_of_the_beginning_loses_no_number(tmp_path):
    """A process of its own is killed before each change that it makes, in turn."""
    package = str(Path(run_folder.__file__).parents[2])
    curve = "".join(row(step).decode() + "\n" for step in range(1, 23))
    first_20 = "".join(curve.splitlines(keepends=True)[:20])
    killed, number, found = True, 0, set[str]()
    while killed:
        number += 1
        run = tmp_path / str(number)
        open_run_folder(run, "").metrics.write_text(curve)
        command = [sys.executable, "-c", KILLED, str(run), package, str(number)]
        ended = subprocess.run(command, timeout=60, check=False)
        assert ended.returncode in (0, -signal.SIGKILL)
        killed = ended.returncode != 0
        found.add((run / "metrics.jsonl").read_text())
        folder = open_run_folder(run, "", continued_step=20)
        assert folder.metrics.read_text() == first_20, f"killed at {number}"
    # Before, inside and after what it does.
    assert number > 30
    assert found == {curve, first_20}


def test_numbers_are_kept_where_files_cannot_have_two_names(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert continued(tmp_path, row(1) + b"\n" + row(12)) == [row(1).decode()]


def test_a_folder_that_is_another_run_s_is_not_touched(tmp_path):
    def refuse():
        raise OutputPathError("it is not where it was")

    (tmp_path / "metrics.jsonl").write_text("as it was")
    with pytest.raises(OutputPathError, match="not where it was"):
        open_run_folder(tmp_path, "", check=refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
