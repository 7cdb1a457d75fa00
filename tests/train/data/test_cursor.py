# SPDX-License-Identifier: Apache-2.0
"""Cursors: rows are counted, and another order is refused unless asked for."""

import dataclasses

import pytest

from tessera.errors import DataChangedError
from tessera.train.data import DataConfig, SyntheticConfig, load
from tessera.train.data.cursor import Cursor


def corpus(*, tokens=4000, seed=0, sequence_length=8, noise=0.0):
    config = DataConfig(
        name="synthetic", synthetic=SyntheticConfig(tokens=tokens, noise=noise)
    )
    return load(config, sequence_length=sequence_length, seed=seed, vocab_size=64)


def test_a_cursor_counts_rows():
    cursor = Cursor.start(corpus()).advance(16).advance(8)
    assert cursor.rows == 24
    assert cursor.resumed(corpus()) == cursor


def test_a_cursor_goes_on_where_only_validation_has_changed():
    before = corpus()
    (source,) = before.sources
    source = dataclasses.replace(source, validation_rows=source.train_rows)
    after = dataclasses.replace(before, sources=(source,))
    assert before.fingerprint != after.fingerprint
    assert Cursor(8, before.order).resumed(after).rows == 8


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, "training.seed: 0 -> 1"),
        ({"sequence_length": 16}, "training.sequence_length: 8 -> 16"),
        ({"tokens": 9000}, "the text that is trained on: "),
        ({"noise": 0.5}, "the text that is trained on: "),
    ],
)
def test_another_order_is_refused_by_name(changed, named):
    cursor = Cursor.start(corpus()).advance(1234)
    with pytest.raises(DataChangedError) as caught:
        cursor.resumed(corpus(**changed))
    assert named in str(caught.value)
    assert "cannot continue at row 1,234" in str(caught.value)


def test_the_message_lists_what_differs_and_both_ways_out():
    with pytest.raises(DataChangedError) as caught:
        Cursor(5, {**corpus().order, "tokenizer": "bytes, 257 ids"}).resumed(corpus())
    assert str(caught.value) == (
        "[T803] the run cannot continue at row 5: its data has changed\n"
        "  got: data.tokenizer: bytes, 257 ids -> synthetic, 64 ids\n"
        "  fix: use the data, seed and sequence length of the checkpoint, or start "
        "at the first row of this data: training.resume_data=restart\n"
        "  docs: https://tessera-spmd.github.io/tessera/errors/T803.html"
    )


def test_a_restart_begins_at_the_first_row_of_what_there_is_now():
    now = corpus(seed=1)
    cursor = Cursor.start(corpus()).advance(1234)
    assert cursor.resumed(now, "restart") == Cursor(0, now.order)
