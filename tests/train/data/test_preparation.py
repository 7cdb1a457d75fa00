# SPDX-License-Identifier: Apache-2.0
"""Tokens are made once: by several processes, after a kill, until the text changes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessera.errors import BadRecordError, TokenCacheError, TokenRangeError
from tessera.train.data import DataConfig, load, preparation

NUM_FILES = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Each file is a block, and enough for a process of its own."""
    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(preparation, "_WORKER_BYTES", 1)


@pytest.fixture
def folder(tmp_path):
    return write_files(tmp_path / "text", NUM_FILES)


def write_files(folder: Path, count: int, suffix="txt") -> Path:
    folder.mkdir()
    for number in range(count):
        text = f"text {number} " * (10 + number % 7)
        content = json.dumps({"text": text}) if suffix == "jsonl" else text
        (folder / f"{number}.{suffix}").write_text(content + "\n")
    return folder


def corpus(folder, cache, *, vocab_size=257, num_workers=1, **settings):
    config = DataConfig(
        name="text",
        path=str(folder),
        cache_dir=str(cache),
        num_workers=num_workers,
        **settings,
    )
    return load(config, sequence_length=8, seed=0, vocab_size=vocab_size)


def files_of(cache) -> dict[str, bytes]:
    """The files of the blocks; a process that was killed may leave the lock of one."""
    paths = cache.glob("*/[!.]*/*")
    return {str(path.relative_to(cache)): path.read_bytes() for path in paths}


def blocks_of(cache) -> dict[str, int]:
    """The complete blocks, with a number that changes when one is made again."""
    manifests = cache.glob("*/[!.]*/manifest.json")
    return {path.parent.name: path.stat().st_ino for path in manifests}


def refuse_to_read(*arguments):
    raise AssertionError("text is read")


def test_a_second_run_reads_no_text(folder, tmp_path, monkeypatch):
    first = corpus(folder, tmp_path / "cache")
    monkeypatch.setattr(preparation, "unread_records", refuse_to_read)
    again = corpus(folder, tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert len(blocks_of(tmp_path / "cache")) == NUM_FILES


def test_settings_that_change_no_token_need_no_preparation(
    folder, tmp_path, monkeypatch
):
    corpus(folder, tmp_path / "cache")
    monkeypatch.setattr(preparation, "unread_records", refuse_to_read)
    corpus(folder, tmp_path / "cache", prefetch=0, vocab_size=300)
    with pytest.raises(AssertionError, match="text is read"):
        corpus(folder, tmp_path / "cache", format="text")


def test_only_the_block_of_a_file_that_changes_is_made_again(folder, tmp_path):
    first = corpus(folder, tmp_path / "cache")
    before = blocks_of(tmp_path / "cache")
    (folder / "3.txt").write_text("another text of another length")
    second = corpus(folder, tmp_path / "cache")
    after = blocks_of(tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert after.keys() > before.keys()
    assert len(after) == len(before) + 1
    assert {name: after[name] for name in before} == before


def test_a_file_of_the_same_size_that_is_written_again_is_read_again(folder, tmp_path):
    first = corpus(folder, tmp_path / "cache")
    path = folder / "3.txt"
    path.write_text(path.read_text().replace("text", "tset"))
    assert corpus(folder, tmp_path / "cache").fingerprint != first.fingerprint


@pytest.mark.parametrize("way", ["written", "moved"])
def test_other_content_of_the_same_size_and_time_is_read(folder, tmp_path, way):
    first = corpus(folder, tmp_path / "cache")
    path = folder / "3.txt"
    status, content = path.stat(), path.read_text().replace("text", "tset")
    if way == "moved":
        (tmp_path / "new").write_text(content)
        (tmp_path / "new").rename(path)
    else:
        path.write_text(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (
        status.st_size,
        status.st_mtime_ns,
    )
    assert corpus(folder, tmp_path / "cache").fingerprint != first.fingerprint


def test_files_with_the_same_name_size_and_time_are_not_confused(tmp_path):
    for name, text in (("a", "one"), ("b", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(text * 20)
        os.utime(tmp_path / name / "x.txt", ns=(0, 0))
    marks = {
        corpus(tmp_path / n, tmp_path / "cache", validation_fraction=0).fingerprint
        for n in "ab"
    }
    assert len(marks) == 2


def test_another_tokenizer_in_the_same_file_makes_other_tokens(folder, tmp_path):
    library = pytest.importorskip("tokenizers")
    made = []
    for ids in ({"text": 0, "?": 1}, {"text": 1, "?": 0}):
        tokenizer = library.Tokenizer(library.models.WordLevel(ids, unk_token="?"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "words.json"))
        settings = {"tokenizer": str(tmp_path / "words.json"), "vocab_size": 2}
        made.append(corpus(folder, tmp_path / "cache", **settings))
    first, second = (m.sources[0].train_rows[0]["tokens"].tolist() for m in made)
    assert first == [1 - token for token in second]


def test_processes_make_what_one_makes(folder, tmp_path):
    one = corpus(folder, tmp_path / "one")
    three = corpus(folder, tmp_path / "three", num_workers=3)
    assert three.fingerprint == one.fingerprint
    assert files_of(tmp_path / "three") == files_of(tmp_path / "one")


def test_a_block_that_another_process_completes_meanwhile_leaves_no_lock(
    folder, tmp_path, monkeypatch
):
    corpus(folder, tmp_path / "other")
    (made,) = (tmp_path / "other").iterdir()

    def lock_after_the_other(descriptor):
        shutil.copytree(made, tmp_path / "cache" / made.name, dirs_exist_ok=True)
        return lock(descriptor)

    lock = preparation.lock
    monkeypatch.setattr(preparation, "lock", lock_after_the_other)
    corpus(folder, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*/*.lock"))


def test_the_cache_is_private(folder, tmp_path):
    corpus(folder, tmp_path / "new" / "cache")
    (settings,) = (tmp_path / "new" / "cache").iterdir()
    assert settings.stat().st_mode & 0o077 == 0


# --- errors


def test_an_error_of_a_process_is_raised_as_it_is(tmp_path):
    folder = write_files(tmp_path / "text", 4, "jsonl")
    (folder / "2.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    messages = []
    for workers in (1, 2):
        with pytest.raises(BadRecordError, match="line 2 of the data file") as caught:
            corpus(folder, tmp_path / str(workers), num_workers=workers)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.slow(reason="it starts processes that read many lines")
def test_the_first_error_of_the_text_is_raised_not_the_first_in_time(tmp_path):
    folder = write_files(tmp_path / "text", 8, "jsonl")
    (folder / "2.jsonl").write_text('{"text": "a"}\n' * 100_000 + '{"text": 1}\n')
    for later in range(3, 8):
        (folder / f"{later}.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(BadRecordError, match="100001 of the data file '2\\.jsonl'"):
        corpus(folder, tmp_path / "cache", num_workers=2, validation_fraction=0)


def test_a_process_that_is_killed_is_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TokenCacheError, match=r"has died\n  got: exit code 1; "):
        corpus(folder, tmp_path / "cache", num_workers=2)


def test_a_cache_that_cannot_be_written_is_an_error(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TokenCacheError, match=r"fix: .*data\.cache_dir=<folder>"):
        corpus(folder, tmp_path / "file")


def test_tokens_of_an_earlier_run_are_checked_against_a_smaller_model(tmp_path):
    library = pytest.importorskip("tokenizers")
    folder = write_files(tmp_path / "text", 4)
    (folder / "2.txt").write_text("text\nrare\n")
    model = library.models.WordLevel({"text": 0, "?": 1, "rare": 2}, unk_token="?")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    settings = {"tokenizer": str(tmp_path / "words.json")}
    corpus(folder, tmp_path / "cache", vocab_size=3, **settings)
    for cache in ("cache", "empty"):
        with pytest.raises(
            TokenRangeError, match=r"(?s)'2\.txt'.*'rare', id 2,.*line 2"
        ):
            corpus(folder, tmp_path / cache, vocab_size=2, **settings)


# --- kills and several runs

PROGRAM = """
import sys
from tessera.train.data import DataConfig, load, preparation
preparation._BLOCK_BYTES = preparation._WORKER_BYTES = 1
make, made = preparation._make_block, []
def counted(*arguments):
    made.append(make(*arguments))
    return made[-1]
preparation._make_block = counted
path, cache, workers = sys.argv[1:]
config = DataConfig(
    name="text", path=path, cache_dir=cache, num_workers=int(workers)
)
load(config, sequence_length=8, seed=0, vocab_size=257)
print(sum(made))
"""


def start(folder, cache, workers):
    command = [sys.executable, "-c", PROGRAM, *map(str, (folder, cache, workers))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_a_preparation_that_is_killed_continues(tmp_path, workers):
    count = 600
    folder, cache = write_files(tmp_path / "text", count), tmp_path / "cache"
    process = start(folder, cache, workers)
    while len(blocks_of(cache)) < 40:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # Its own processes end with it.
    before = blocks_of(cache)
    while (now := blocks_of(cache)) != before:
        before = now
        time.sleep(0.5)
    assert 40 <= len(before) < count

    corpus(folder, cache, num_workers=workers)
    after = blocks_of(cache)
    assert len(after) == count
    assert {name: after[name] for name in before} == before
    corpus(folder, tmp_path / "undisturbed")
    assert files_of(cache) == files_of(tmp_path / "undisturbed")


@pytest.mark.full
def test_runs_at_the_same_time_share_the_work(tmp_path):
    count = 300
    folder, cache = write_files(tmp_path / "text", count), tmp_path / "cache"
    runs = [start(folder, cache, 1) for _ in range(3)]
    made = [int(run.communicate()[0]) for run in runs]
    assert sum(made) == len(blocks_of(cache)) == count
    assert sum(number > 0 for number in made) > 1
    assert not list(cache.glob("*/*.lock"))
    corpus(folder, tmp_path / "undisturbed")
    assert files_of(cache) == files_of(tmp_path / "undisturbed")
