# SPDX-License-Identifier: Apache-2.0
"""Rows of conversations: no answer is learned without its whole question."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import EmptyDataError
from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.data import DataConfig, load
from tessera.train.data.conversation_rows import ConversationRows
from tessera.train.data.packing import MemoryShard, ShardBuilder, TokenStream
from tests.train.data.chat_folders import turns, write_folder

# The number of a conversation, and its tokens, in turns of question and answer.
conversations = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=12
)


def chats_of(sizes):
    """Token c * 100 + i is the i-th of conversation c; every second turn is learned."""
    made = []
    for number, turns_of in enumerate(sizes):
        total = sum(turns_of)
        learned = np.repeat(np.arange(len(turns_of)) % 2 == 1, turns_of)
        made.append((number * 100 + np.arange(total), learned))
    return made


def rows_of(chats, length, shards=2, masked=True):
    half = -(-len(chats) // shards)
    parts = []
    for begin in range(0, len(chats), half):
        builder = ShardBuilder(None, 2**17)
        for ids, learned in chats[begin : begin + half]:
            builder.add(ids, learned if masked else None)
        parts.append(MemoryShard(builder.arrays()))
    return ConversationRows(TokenStream(parts, is_separated=False), length)


@given(conversations, st.integers(2, 9), st.booleans())
def test_every_conversation_is_in_one_row_from_its_beginning(sizes, length, masked):
    chats = chats_of(sizes)
    rows = rows_of(chats, length, masked=masked)
    seen, targets = {}, 0
    for row in (rows[i] for i in range(len(rows))):
        assert {values.shape for values in row.values()} == {(length,)}
        used = row["segment_ids"] > 0
        targets += int((row["targets"] != IGNORE_INDEX).sum())
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            tokens, following = row["tokens"][inside], row["targets"][inside]
            number = int(tokens[0]) // 100
            assert number not in seen
            seen[number] = True
            ids, learned = chats[number]
            # From the first token on, in order, with positions from 0.
            np.testing.assert_array_equal(
                row["positions"][inside], np.arange(len(tokens))
            )
            np.testing.assert_array_equal(tokens, ids[: len(tokens)])
            for at, target in enumerate(following):
                if target != IGNORE_INDEX:
                    assert target == ids[at + 1]
                is_learned = at + 1 < min(len(ids), length + 1) and (
                    not masked or learned[at + 1]
                )
                assert (target != IGNORE_INDEX) == is_learned
        assert not row["tokens"][~used].any()
    cut = [ids.size > length + 1 for ids, _ in chats]
    has_target = [
        (learned[1 : length + 1] if masked else np.ones(ids[1 : length + 1].size)).any()
        for ids, learned in chats
    ]
    assert sorted(seen) == [i for i, known in enumerate(has_target) if known]
    assert rows.num_learned == targets
    assert rows.num_cut == sum(cut)
    without = [c and not known for c, known in zip(cut, has_target, strict=True)]
    assert rows.num_left_out == sum(without)
    assert rows.longest == max(ids.size for ids, _ in chats)


def test_rows_are_full_where_conversations_fit_together():
    # Of 5 and 4 tokens, so that two of them fill a row of 8 positions.
    rows = rows_of(chats_of([[2, 3]] * 6 + [[2, 2]] * 6), 8)
    assert len(rows) == 6
    assert all(row["segment_ids"].all() for row in (rows[i] for i in range(6)))


def chat_corpus(tmp_path, chats, length, **settings):
    folder = write_folder(tmp_path, "gemma", marked=False)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    values = {"validation_fraction": 0, "loss_on": "answers"} | settings
    config = DataConfig(
        **{"name": "text", "path": str(path), "tokenizer": str(folder)},
        messages_key="messages",
        **values,
    )
    return load(config, sequence_length=length, seed=0, vocab_size=300)


LONG = turns("Why? " * 20, "hello")


def test_what_is_cut_is_counted_with_what_to_set(tmp_path):
    chats = [turns("hi", "hello"), turns("hi", "hello" * 30), LONG]
    (source,) = chat_corpus(tmp_path, chats, 60).sources
    longest = source.train_rows.longest
    assert source.cut == (
        f"{source.title}: 2 of 3 conversations are longer than "
        "training.sequence_length=60 and are cut there, 1 of them left out: their "
        "first answer begins later; training.sequence_length=128 takes all of them "
        f"whole, as the longest has {longest} tokens"
    )
    (source,) = chat_corpus(tmp_path, chats, 128).sources
    assert not source.cut
    (source,) = chat_corpus(tmp_path, chats, longest - 1).sources
    assert not source.cut
    assert len(source.train_rows) == 2  # the two long ones beside the short one


def test_no_answer_in_any_row_is_an_error(tmp_path):
    with pytest.raises(EmptyDataError) as caught:
        chat_corpus(tmp_path, [LONG, LONG], 20)
    assert "[T602] no answer begins within a row" in str(caught.value)
    assert "first answer begins later; training.sequence_length=" in str(caught.value)


def test_too_few_conversations_for_a_batch_say_what_fits(tmp_path):
    made = chat_corpus(tmp_path, [turns("hi", "hello")] * 12, 500)
    with pytest.raises(EmptyDataError) as caught:
        made.train(4)
    length = int(str(caught.value).partition("length of at most ")[2].split(",")[0])
    assert (
        len(
            chat_corpus(tmp_path, [turns("hi", "hello")] * 12, length)
            .sources[0]
            .train_rows
        )
        >= 4
    )


def test_the_share_of_learned_tokens_is_that_of_the_answers(tmp_path):
    chats = [turns("hi", "hello"), turns("hi" * 9, "all")]
    made = chat_corpus(tmp_path, chats, 80)
    batch = next(made.train(1))
    tokens = made.sources[0].train_rows.stream.num_tokens
    learned = (batch["targets"] != IGNORE_INDEX).sum()
    assert made.sources[0].learned == learned / tokens
    assert 0 < learned < tokens / 2
