# SPDX-License-Identifier: Apache-2.0
"""Two ranks in folders of their own, which have the same settings and other files."""

import subprocess
import sys

import pytest

from tessera.train.runtime.launcher import free_port
from tests.faults.trainer import PROGRAM, SMALL, environ

SETTINGS = (
    *SMALL,
    *("data=text", "data.path=text", "data.synthetic.tokens=2000000"),
    *("data.synthetic.vocab_size=null", "data.validation_fraction=0.2"),
    *("model.mesh_shape=[[2,1],[fsdp,tp]]", "training.steps=1"),
)
MODULE = "own = {}\n"


def run_ranks(tmp_path, *settings):
    """The exit code and the error output of each rank."""
    port, folders = free_port(), (f"hydra.run.dir={tmp_path / 'run'}",)
    folders += ("data.cache_dir=cache",)
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *SETTINGS, *folders, *settings],
            cwd=tmp_path / f"rank_{rank}",
            env=environ(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                WORLD_SIZE="2",
            ),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def write_files(tmp_path, rank, changed=""):
    folder = tmp_path / f"rank_{rank}"
    (folder / "text").mkdir(parents=True)
    for number in range(20):
        text = f"file {number}: " + "some words " * 30
        (folder / f"text/{number}.txt").write_text(text)
    if changed:
        (folder / f"text/{changed}").write_text("x" * 330)
    (folder / "mine.py").write_text(MODULE.format(rank))
    return folder


@pytest.mark.full
def test_ranks_that_read_other_files_are_refused(tmp_path):
    for rank in range(2):
        write_files(tmp_path, rank, changed="3.txt" if rank else "")
    for code, error in run_ranks(tmp_path):
        assert code == 76
        assert "[T707] the ranks read different data\n" in error
        assert "data: fingerprint is " in error
        assert "data: training text of text is 16 documents, " in error
        assert "data: validation text" not in error
        assert " on rank 0; " in error
    assert not (tmp_path / "run/config.yaml").exists()


@pytest.mark.full
def test_ranks_that_import_other_modules_are_refused_before_they_read(tmp_path):
    for rank in range(2):
        write_files(tmp_path, rank)
    for code, error in run_ranks(tmp_path, "--module", "mine"):
        assert code == 76
        assert "[T707] the ranks import different modules\n" in error
        assert "got: modules: mine is " in error


@pytest.mark.full
def test_ranks_with_copies_of_the_same_files_train(tmp_path):
    for rank in range(2):
        write_files(tmp_path, rank)
        (tmp_path / f"rank_{rank}/mine.py").write_text("own = 1\n")
    assert [code for code, _ in run_ranks(tmp_path, "--module", "mine")] == [0, 0]
