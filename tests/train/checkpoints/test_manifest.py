# SPDX-License-Identifier: Apache-2.0
"""Manifests: what they hold, and everything that they find."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tessera.train.checkpoints.manifest import (
    LAST,
    NAME,
    find_damage,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "4"
    (path / "state" / "d").mkdir(parents=True)
    for number in range(3):
        (path / "state" / "d" / f"{number:x}a").write_bytes(random.randbytes(1000))
    (path / "state" / "empty").touch()
    (path / LAST).write_text('{"step": 4}\n')
    return path


def test_a_manifest_has_every_file_and_the_metadata_last(folder):
    assert write_manifest(folder) == 3012
    lines = (folder / NAME).read_text().splitlines()
    names = [line.split("  ")[1] for line in lines]
    assert names == ["state/d/0a", "state/d/1a", "state/d/2a", "state/empty", LAST]
    assert find_damage(folder) is None


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum")
def test_a_manifest_is_what_sha256sum_reads(folder):
    write_manifest(folder)
    command = ["sha256sum", "--strict", "-c", NAME]
    assert subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def test_fifty_flipped_bits_anywhere_are_all_found(folder):
    write_manifest(folder)
    draw = random.Random(0)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(50):
        path = draw.choice([path for path in files if path.stat().st_size])
        content = path.read_bytes()
        flip(path, draw.randrange(8 * len(content)))
        assert find_damage(folder) is not None, path
        path.write_bytes(content)
    assert find_damage(folder) is None


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_bit_of_the_manifest_itself_counts(folder):
    write_manifest(folder)
    path = folder / NAME
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 9):  # each byte, and each of its bits
        flip(path, bit)
        assert find_damage(folder) is not None, bit
        path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 1, 100, 300, -67, -1])
def test_a_manifest_that_lost_its_end_is_not_complete(folder, size):
    write_manifest(folder)
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:size])
    assert find_damage(folder) == f"{NAME} is not complete"


def test_a_manifest_that_goes_on_after_its_end_is_not_complete(folder):
    write_manifest(folder)
    with (folder / NAME).open("a") as file:
        file.write("0" * 20)
    assert find_damage(folder) == f"{NAME} is not complete"


def test_a_missing_shorter_or_longer_file_is_named(folder):
    write_manifest(folder)
    path = folder / "state/d/1a"
    content = path.read_bytes()
    for other in (content[:-1], content[:0], content + b"\0"):
        path.write_bytes(other)
        assert find_damage(folder) == "state/d/1a is not what was written"
    path.unlink()
    assert find_damage(folder) == "state/d/1a is missing"
    path.mkdir()
    assert find_damage(folder) == "state/d/1a is not a regular file"


def test_a_file_more_is_no_damage(folder):
    write_manifest(folder)
    (folder / ".DS_Store").touch()
    assert find_damage(folder) is None


def test_nothing_outside_of_the_checkpoint_is_read(folder):
    (folder.parent / "secret").write_text("x")
    for name in ("../secret", "/etc/hostname"):
        write_manifest(folder)
        lines = (folder / NAME).read_text().splitlines(keepends=True)
        (folder / NAME).write_text(f"{'0' * 64}  {name}\n" + "".join(lines))
        said = f"{NAME} names a file outside of the checkpoint: {name}"
        assert find_damage(folder) == said


def test_a_link_is_no_file(folder):
    write_manifest(folder)
    path = folder / "state/d/1a"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    assert find_damage(folder) == "state/d/1a is not a regular file"


def test_no_file_is_read_twice(folder):
    write_manifest(folder)
    lines = (folder / NAME).read_text().splitlines(keepends=True)
    for name in ("state/d/1a", "state//d/1a", "./state/d/1a"):
        line = lines[1].replace("state/d/1a", name)
        (folder / NAME).write_text("".join([lines[1], line, lines[-1]]))
        assert find_damage(folder) == f"{NAME} names a file twice: {name}"
