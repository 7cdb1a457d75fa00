# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hub: the files of a split, by the card or by name."""

import gzip
import json

import pytest

from tessera.errors import DataFormatError, DataNotFoundError, HubError
from tessera.train.data import DataConfig, load
from tessera.train.data.files import units_of
from tests.train.files import hub_server
from tests.train.files.hub_server import Repo

ROWS = b"".join(
    json.dumps({"text": f"row {i} " * 9}).encode() + b"\n" for i in range(9)
)
CARD = b"""---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: data/train-*
  - {split: test, path: [data/test-*, more/test.jsonl]}
- config_name: other
  data_dir: other
  data_files: "**/*.jsonl"
---
# A data set
"""
NAMES = (
    *("data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl"),
    *("more/test.jsonl", "other/a.jsonl", "other/b/c.jsonl", "data/x.pkl"),
)
FILES = {name: json.dumps({"text": name}).encode() + b"\n" + ROWS for name in NAMES}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub_server.serve(monkeypatch, tmp_path / "cache") as hub:
        hub.repos["datasets/org/set"] = Repo()
        hub.repos["datasets/org/set"].push({"README.md": CARD, **FILES})
        yield hub


def files(path="hf://datasets/org/set", **settings):
    config = DataConfig(name="text", path=path, validation_fraction=0.0, **settings)
    train, validation = units_of(config)
    assert not validation
    return [unit.name for unit in train]


def test_the_card_says_which_files_are_of_a_split(hub):
    assert files() == ["data/train-0.jsonl", "data/train-1.jsonl"]
    assert files(split="train") == files()
    assert files(split="test") == ["data/test-0.jsonl", "more/test.jsonl"]
    assert files(subset="other") == ["other/a.jsonl", "other/b/c.jsonl"]


@pytest.mark.parametrize(
    ("names", "found"),
    [(["plain"], "0.jsonl"), (["plain", "default"], "1.jsonl")],
)
def test_the_subset_is_the_only_one_or_that_named_default(hub, names, found):
    entries = [
        f"- {{config_name: {name}, data_files: {number}.jsonl}}\n"
        for number, name in enumerate(names)
    ]
    card = f"---\nconfigs:\n{''.join(entries)}---\n".encode()
    repo = hub.repos["datasets/org/set"]
    repo.push({"README.md": card, "0.jsonl": ROWS, "1.jsonl": ROWS})
    assert files() == [found]


def test_files_of_other_splits_are_not_downloaded(hub):
    files()
    needed = ["README.md", "data/train-0.jsonl", "data/train-1.jsonl"]
    assert sorted(hub.downloads) == needed


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"split": "valid"}, "splits in its card: train, test"),
        ({"subset": "third"}, "subsets in its card: main, other"),
        ({"subset": "other", "split": "test"}, "splits in its card: train"),
    ],
)
def test_a_split_that_there_is_not_is_an_error(hub, settings, got):
    with pytest.raises(DataNotFoundError) as caught:
        files(**settings)
    assert caught.value.got == got


def test_a_path_names_a_file_a_folder_or_a_glob(hub):
    path = "hf://datasets/org/set"
    assert files(f"{path}/more/test.jsonl") == ["more/test.jsonl"]
    assert files(f"{path}/other") == ["other/a.jsonl", "other/b/c.jsonl"]
    assert files(f"{path}/other/*.jsonl") == ["other/a.jsonl"]
    assert files(f"{path}/**/test*") == ["data/test-0.jsonl", "more/test.jsonl"]
    with pytest.raises(DataNotFoundError, match=r"no file is other/\*\.txt"):
        files(f"{path}/other/*.txt")


def test_the_conversion_of_the_hub_is_a_revision(hub):
    repo = hub.repos["datasets/org/set"]
    converted = {"default/train/0.jsonl": ROWS, "default/test/0.jsonl": ROWS}
    repo.push(converted, "refs/convert/parquet")
    path = "hf://datasets/org/set@refs/convert/parquet/default/train"
    assert files(path) == ["default/train/0.jsonl"]


def test_other_suffixes_are_read_if_the_format_is_named(hub):
    rows = gzip.compress(ROWS)
    hub.repos["datasets/org/set"].push({"en/c4.00.json.gz": rows, "en/x.txt": b"x"})
    path = "hf://datasets/org/set/en/c4.*.json.gz"
    assert files(path, format="jsonl") == ["en/c4.00.json.gz"]


def test_nothing_is_inferred_from_the_names_of_files(hub):
    repo = hub.repos["datasets/org/set"]
    repo.push({"README.md": b"# No card\n" + CARD, **FILES})
    with pytest.raises(DataNotFoundError) as caught:
        files()
    assert "README.md does not say which files" in caught.value.got
    assert "data/train-0.jsonl" in caught.value.got
    assert "'data.path=hf://datasets/org/set/<file, " in caught.value.fix
    repo.push({"chats.jsonl": ROWS, "data.pkl": b""})
    assert files() == ["chats.jsonl"]
    repo.push({"test.jsonl": ROWS})
    with pytest.raises(DataNotFoundError, match="has no split 'test'"):
        files(split="test")


def test_other_formats_and_damaged_cards_are_refused(hub):
    repo = hub.repos["datasets/org/set"]
    repo.push({"README.md": CARD, "data/train-0.csv": b"a,b"})
    with pytest.raises(DataFormatError, match=r"by its suffix \.csv"):
        files()
    repo.push({"README.md": b"---\nconfigs: [\n---\n", "a.jsonl": ROWS})
    with pytest.raises(DataNotFoundError, match="card of the data set org/set"):
        files()


def test_a_cache_that_lacks_a_file_is_not_a_smaller_data_set(hub, monkeypatch):
    """Of a download that was interrupted, or of another library."""
    files(split="test")
    hub_server.offline(monkeypatch)
    assert files(split="test") == ["data/test-0.jsonl", "more/test.jsonl"]
    with pytest.raises(HubError, match="is not whole in the cache"):
        files()


def test_it_is_the_data_of_the_same_files_in_a_folder(hub, tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    settings = {"sequence_length": 16, "seed": 0, "vocab_size": 257}

    def fingerprint(path):
        config = DataConfig(
            name="text",
            path=path,
            validation_fraction=0.0,
            num_workers=1,
            cache_dir=str(tmp_path / "tokens"),
        )
        return load(config, **settings).fingerprint

    folder = fingerprint(str(tmp_path / "set" / "data"))
    assert fingerprint("hf://datasets/org/set@main/other") != folder
    hub.repos["datasets/org/set"].push(
        {name.removeprefix("data/"): data for name, data in FILES.items()}
    )
    assert fingerprint("hf://datasets/org/set/*-?.jsonl") == folder
