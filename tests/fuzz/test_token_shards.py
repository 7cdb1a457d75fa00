# SPDX-License-Identifier: Apache-2.0
"""Random documents in shards of random sizes: the rows of a plain concatenation."""

from random import Random

import numpy as np
import pytest

from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.data import shards
from tessera.train.data.batches import Share, train_batches, validation_batches
from tessera.train.data.packing import PackedRows, TokenStream
from tessera.train.data.shards import BlockWriter, new_block, read_block

NAMES = ("tokens", "targets", "segment_ids", "positions")


def write_blocks(folder, draw, documents, separator, vocab_size):
    """The documents in one to four blocks, some of which may be empty."""
    cuts = sorted(draw.choices(range(len(documents) + 1), k=draw.randrange(4)))
    blocks = []
    for number, (begin, end) in enumerate(
        zip([0, *cuts], [*cuts, len(documents)], strict=True)
    ):
        path = folder / str(number)
        with new_block(path, is_locked=draw.random() < 0.5) as temporary:
            writer = BlockWriter(temporary, separator, vocab_size)
            for ids, mask in documents[begin:end]:
                writer.add(ids, mask, num_bytes=ids.size)
            writer.finish({})
        blocks.append(read_block(path))
    return TokenStream(
        (shard for block in blocks for shard in block.shards),
        is_separated=separator is not None,
    )


def rows_by_hand(documents, separator, length):
    """The rows of the concatenated documents, the last padded: [rows, 4, length]."""
    tokens, learned, number = [], [], []
    for index, (ids, mask) in enumerate(documents):
        if not ids.size:
            continue
        before = [] if separator is None else [separator]
        tokens += [*before, *ids.tolist()]
        learned += [mask is None] * len(before)
        learned += [True] * ids.size if mask is None else mask.tolist()
        number += [index] * (len(before) + ids.size)
    rows = []
    for begin in range(0, len(tokens) - 1, length):
        row = np.zeros((4, length), np.int32)
        row[1] = IGNORE_INDEX
        segment, position = 0, 0
        for column, at in enumerate(range(begin, min(begin + length, len(tokens) - 1))):
            if not column or number[at] != number[at - 1]:
                segment, position = segment + 1, 0
            row[0, column], row[2, column], row[3, column] = (
                tokens[at],
                segment,
                position,
            )
            follows = separator is not None or number[at] == number[at + 1]
            if follows and learned[at + 1]:
                row[1, column] = tokens[at + 1]
            position += 1
        rows.append(row)
    return rows


@pytest.mark.slow(reason="its first case compiles what the others share")
@pytest.mark.fuzz(sample=25, whole=2000)
def test_rows_of_shards_are_those_of_one_array(seed, tmp_path, monkeypatch):
    draw, random = Random(seed), np.random.default_rng(seed)
    vocab_size = draw.choice([3, 257, 2**16, 2**16 + 1, 300_000])
    separator = draw.choice([None, 0, vocab_size - 1])
    has_masks = draw.random() < 0.5
    documents = []
    for _ in range(draw.randrange(12)):
        ids = random.integers(0, vocab_size, draw.choice([0, 1, 2, 7, 8, 9, 30, 200]))
        mask = random.random(ids.size) < draw.random()
        documents.append((ids, mask if has_masks and draw.random() < 0.7 else None))
    monkeypatch.setattr(shards, "_SHARD_TOKENS", draw.choice([1, 8, 13, 100, 2**22]))
    stream = write_blocks(tmp_path, draw, documents, separator, vocab_size)
    assert stream.num_bytes == sum(ids.size for ids, _ in documents)

    length = draw.choice([1, 2, 3, 8, 31, 64, 500])
    expected = rows_by_hand(documents, separator, length)
    rows = PackedRows(stream, length, keep_tail=True)
    assert len(rows) == len(expected)
    for index in draw.sample(range(len(rows)), len(rows)):
        np.testing.assert_array_equal([rows[index][n] for n in NAMES], expected[index])

    # Any number of processes reads every row once in each pass.
    processes = draw.choice([1, 2, 3])
    full = PackedRows(stream, length, keep_tail=False)
    if not len(full):
        return
    batch_size, passes = processes * draw.choice([1, 2]), 2
    steps, start = passes * len(full), draw.randrange(5) * batch_size
    read = np.zeros((steps, batch_size, 4, length), np.int32)
    for process in range(processes):
        share = Share(batch_size, process, processes)
        batches = train_batches(
            *([full], [1.0], share), seed=seed, start_row=start, prefetch=0
        )
        part = slice(process * share.local_size, (process + 1) * share.local_size)
        for step, batch in zip(range(steps), batches, strict=False):
            read[step, part] = np.stack([batch[name] for name in NAMES], axis=1)
        batches.close()
    # Skip the rest of the pass in which it starts.
    order = read.reshape(-1, 4, length)[-start % len(full) :]
    for begin in range(0, order.shape[0] - len(full) + 1, len(full)):
        one = sorted(row.tobytes() for row in order[begin : begin + len(full)])
        assert one == sorted(row.tobytes() for row in expected[: len(full)])
    whole = [
        batch["tokens"].shape[0]
        for batch in validation_batches(rows, Share(batch_size, 0, 1), prefetch=0)
    ]
    assert sum(whole) == -(-len(rows) // batch_size) * batch_size
