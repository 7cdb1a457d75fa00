# SPDX-License-Identifier: Apache-2.0
"""Rows against a packing written token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.data.packing import PackedRows, TokenStream, join

documents = st.lists(st.lists(st.integers(1, 9), max_size=7), max_size=8)
separators = st.sampled_from([None, 0])
lengths = st.integers(1, 6)


def stream_of(texts: list[list[int]], separator: int | None) -> TokenStream:
    documents = [(np.array(text, np.int32), None) for text in texts]
    return join(documents, separator=separator, vocab_size=10)


def pack_by_hand(texts: list[list[int]], separator: int | None, length: int):
    """Every row, padded, as lists of (token, target, segment, position)."""
    before = [] if separator is None else [separator]
    flat = [
        (token, number)
        for number, text in enumerate(texts)
        if text
        for token in before + text
    ]
    rows = []
    for begin in range(0, len(flat) - 1, length):
        row, segment, position = [], 0, 0
        for at in range(begin, min(begin + length, len(flat) - 1)):
            (token, document), (following, next_document) = flat[at], flat[at + 1]
            if at == begin or document != flat[at - 1][1]:
                segment, position = segment + 1, 0
            same = separator is not None or document == next_document
            row.append((token, following if same else IGNORE_INDEX, segment, position))
            position += 1
        rows.append(row + [(0, IGNORE_INDEX, 0, 0)] * (length - len(row)))
    return rows


@given(documents, separators, lengths)
def test_rows_equal_a_packing_written_token_by_token(texts, separator, length):
    rows = PackedRows(stream_of(texts, separator), length, keep_tail=True)
    names = ("tokens", "targets", "segment_ids", "positions")
    made = [
        list(zip(*(rows[i][name].tolist() for name in names), strict=True))
        for i in range(len(rows))
    ]
    assert made == pack_by_hand(texts, separator, length)


@given(documents, lengths)
def test_every_token_but_the_first_is_a_target_once(texts, length):
    rows = PackedRows(stream_of(texts, 0), length, keep_tail=True)
    targets = [t for i in range(len(rows)) for t in rows[i]["targets"].tolist()]
    joined = [token for text in texts if text for token in [0, *text]]
    assert [t for t in targets if t != IGNORE_INDEX] == joined[1:]


@given(documents, separators, lengths)
def test_only_a_last_row_that_is_not_full_is_dropped(texts, separator, length):
    stream = stream_of(texts, separator)
    kept = PackedRows(stream, length, keep_tail=True)
    full = PackedRows(stream, length, keep_tail=False)
    assert len(full) == max(stream.num_tokens - 1, 0) // length
    assert len(kept) - len(full) in (0, 1)
    for i in range(len(full)):
        for name, values in full[i].items():
            np.testing.assert_array_equal(values, kept[i][name])
        assert full[i]["segment_ids"].min() == 1


def test_rows_are_int32_whatever_the_vocabulary():
    for vocab_size, stored in ((2**16, np.uint16), (2**16 + 1, np.uint32)):
        ids = np.array([0, vocab_size - 1, 3], np.int32)
        stream = join([(ids, None)], separator=None, vocab_size=vocab_size)
        row = PackedRows(stream, 2, keep_tail=False)[0]
        assert stream.shards[0].read(0, 3).tokens.dtype == stored
        assert {values.dtype for values in row.values()} == {np.dtype(np.int32)}
        assert row["tokens"].tolist() == [0, vocab_size - 1]


def test_the_mask_of_a_token_is_that_of_the_position_before_it():
    ids, learned = np.arange(1, 8), np.array([0, 0, 1, 1, 0, 1, 0], bool)
    stream = join([(ids, learned)], separator=None, vocab_size=10)
    row = PackedRows(stream, 6, keep_tail=True)[0]
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    # By hand: 3, 4 and 6 are learned, so they are targets where 2, 3 and 5 are tokens.
    assert row["targets"].tolist() == [-100, 3, 4, -100, 6, -100]


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=7)),
    st.sets(st.integers(0, 9)),
    separators,
    lengths,
)
def test_a_target_is_left_out_where_its_token_is_not_learned(
    texts, unmasked, separator, length
):
    masked = []
    for i, text in enumerate(texts):
        ids = np.array([token for token, _ in text], np.int32)
        mask = np.array([learned for _, learned in text], bool)
        masked.append((ids, None if i in unmasked else mask))
    stream = join(masked, separator=separator, vocab_size=10)
    plain = join([(ids, None) for ids, _ in masked], separator=separator, vocab_size=10)
    flat = [
        is_learned
        for i, text in enumerate(texts)
        if text
        for is_learned in [i in unmasked] * (separator is not None)
        + [i in unmasked or learned for _, learned in text]
    ]
    rows = PackedRows(stream, length, keep_tail=True)
    for number, row in enumerate(rows[i] for i in range(len(rows))):
        expected = PackedRows(plain, length, keep_tail=True)[number]
        for at in range(length):
            token = number * length + at + 1
            if token < len(flat) and not flat[token]:
                expected["targets"][at] = IGNORE_INDEX
        for name, values in expected.items():
            np.testing.assert_array_equal(row[name], values)


def test_the_fingerprint_of_equal_tokens_knows_documents_separators_and_masks():
    one, two = np.array([0, 1]), np.array([0, 2])
    learned = np.array([True, False])
    streams = [
        join(documents, separator=separator, vocab_size=10)
        for documents, separator in (
            ([(one, None), (two, None)], None),
            ([(np.concatenate([one, two]), None)], None),
            ([(one[1:], None), (two[1:], None)], 0),
            ([(one, None), (two, learned)], None),
        )
    ]
    assert {tuple(stream.read(0, 9).tokens) for stream in streams} == {(0, 1, 0, 2)}
    assert len({stream.fingerprint for stream in streams}) == len(streams)
