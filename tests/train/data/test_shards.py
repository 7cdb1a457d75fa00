# SPDX-License-Identifier: Apache-2.0
"""Blocks of tokens in files: what is written is read, and damage is found."""

import os
import shutil

import numpy as np
import pytest

from tessera.errors import TokenCacheError
from tessera.train.data import shards
from tessera.train.data.packing import PackedRows, TokenStream, join
from tessera.train.data.shards import BlockWriter, new_block, read_block

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [1] * 9]
MASKS = [None, None, np.array([True]), np.array([True, False] * 2 + [True]), None]


def write(folder, documents=DOCUMENTS, masks=MASKS, *, vocab_size=10):
    with new_block(folder, is_locked=True) as temporary:
        writer = BlockWriter(temporary, 0, vocab_size)
        for ids, mask in zip(documents, masks, strict=True):
            writer.add(np.array(ids, np.int32), mask, 10 * len(ids))
        writer.finish({"counts": {}})
    return folder


def stream_of(folder) -> TokenStream:
    return TokenStream(read_block(folder).shards, is_separated=True)


@pytest.fixture(params=[1, 5, 2**22])
def shard_tokens(request, monkeypatch):
    monkeypatch.setattr(shards, "_SHARD_TOKENS", request.param)
    return request.param


def test_a_block_has_the_documents_that_were_written(tmp_path, shard_tokens):
    stored = stream_of(write(tmp_path / "block"))
    documents = [
        (np.array(i, np.int32), m) for i, m in zip(DOCUMENTS, MASKS, strict=True)
    ]
    expected = join(documents, separator=0, vocab_size=10)
    assert len(stored.shards) == {1: 4, 5: 3, 2**22: 1}[shard_tokens]
    assert (stored.num_documents, stored.num_bytes) == (4, 180)
    for length in (1, 4, 30):
        rows = [PackedRows(s, length, keep_tail=True) for s in (stored, expected)]
        assert len(rows[0]) == len(rows[1])
        for index in range(len(rows[0])):
            for name, values in rows[1][index].items():
                np.testing.assert_array_equal(rows[0][index][name], values)


def test_masks_take_no_space_where_all_tokens_are_learned(tmp_path):
    folder = write(tmp_path / "block", masks=[None] * 5)
    assert not list(folder.glob("*loss_mask*"))
    assert len(list(folder.iterdir())) == 3


def test_tokens_have_two_bytes_where_the_vocabulary_allows_it(tmp_path):
    for vocab_size, dtype in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        folder = tmp_path / str(vocab_size)
        ids = [[vocab_size - 1]]
        (shard,) = read_block(write(folder, ids, [None], vocab_size=vocab_size)).shards
        assert shard.read(0, 2).tokens.dtype == dtype
        assert shard.read(0, 2).tokens.tolist() == [0, vocab_size - 1]
        assert shard.largest_id == vocab_size - 1


@pytest.mark.parametrize("name", ["tokens", "starts", "loss_mask"])
def test_a_flipped_byte_is_an_error_that_names_the_file(tmp_path, name):
    folder = write(tmp_path / "block")
    path = folder / f"00000.{name}.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    stream = stream_of(folder)  # the size is right
    with pytest.raises(TokenCacheError) as caught:
        stream.read(0, 1)
    assert str(caught.value) == (
        "[T608] a file of prepared tokens is damaged\n"
        f"  got: {path}: its checksum is another one\n"
        "  fix: remove its folder, and the next run prepares this part of the text "
        f"again: rm -r '{folder}'\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T608.html"
    )


@pytest.mark.parametrize("offset", [0, 40, -40, -3])
def test_a_flipped_byte_of_the_manifest_is_an_error(tmp_path, offset):
    folder = write(tmp_path / "block")
    content = bytearray((folder / "manifest.json").read_bytes())
    content[offset] ^= 1
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(TokenCacheError, match=r"manifest\.json"):
        read_block(folder)


@pytest.mark.parametrize("name", ["manifest.json", "00000.tokens.npy"])
def test_missing_and_incomplete_files_are_found_at_the_start(tmp_path, name):
    path = write(tmp_path / "block") / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TokenCacheError, match=name):
        read_block(path.parent)
    path.unlink()
    with pytest.raises(TokenCacheError, match=name):
        read_block(path.parent)


@pytest.mark.parametrize("name", ["tokens", "loss_mask"])
@pytest.mark.parametrize("left", [0, 64, 140])
def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path, name, left):
    folder = write(tmp_path / "block", [[1] * 500], [np.zeros(500, bool)])
    stream = stream_of(folder)
    stream.read(0, 10)
    path = folder / f"00000.{name}.npy"
    os.truncate(path, left)
    with pytest.raises(TokenCacheError) as caught:
        stream.read(300, 310)
    assert f"got: {path}: it has become shorter: " in str(caught.value)


def test_a_block_that_is_removed_while_it_is_read_is_read_on(tmp_path):
    folder = write(tmp_path / "block")
    stream = stream_of(folder)
    expected = stream.read(0, 99).tokens.tolist()
    shutil.rmtree(folder)
    assert stream.read(0, 99).tokens.tolist() == expected


def test_a_block_that_fails_leaves_nothing(tmp_path):
    def fail():
        with new_block(tmp_path / "block", is_locked=True) as folder:
            (folder / "00000.tokens.npy").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".block-left" / "x").mkdir(parents=True)
    (tmp_path / ".other-left").mkdir()
    write(tmp_path / "block")
    assert {path.name for path in tmp_path.iterdir()} == {"block", ".other-left"}


def test_many_shards_share_a_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_SHARD_TOKENS", 1)
    shards._opened.cache_clear()
    count = shards._MOST_OPEN + 9
    documents = [[i % 9 + 1] for i in range(count)]
    stream = stream_of(write(tmp_path / "block", documents, [None] * count))
    assert len(stream.shards) == count
    tokens = stream.read(0, 10**9).tokens
    assert tokens[1::2].tolist() == [ids[0] for ids in documents]
    assert shards._opened.cache_info().currsize == shards._MOST_OPEN
