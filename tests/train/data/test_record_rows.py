# SPDX-License-Identifier: Apache-2.0
"""Rows of pairs: which answer is the better one, what is learned, what is left out.

The documents are read in plain Python, too, and compared.
"""

import json
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import EmptyDataError, TokenizerError
from tessera.foundations.labels import IGNORE_INDEX
from tessera.train.data import DataConfig, load, shards
from tessera.train.data.encoding import Encoder
from tessera.train.data.file_ranges import Unit
from tessera.train.data.packing import MemoryShard, ShardBuilder, TokenStream
from tessera.train.data.preparation import _settings_fingerprint
from tessera.train.data.record_rows import PreferenceRows
from tessera.train.data.records import read_records
from tests.train.data.chat_folders import turns, write_folder

BEGIN = 256


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def corpus(path, length=64, *, vocab_size=300, seed=0, **settings):
    config = DataConfig(
        **{"name": "preferences", "path": str(path), "validation_fraction": 0}
        | settings
    )
    return load(config, sequence_length=length, seed=seed, vocab_size=vocab_size)


def pairs_of(rows):
    """Of each pair of each row: the prompt and the learned tokens of both answers."""
    found = []
    for row in (rows[index] for index in range(len(rows))):
        count = (int(row["segment_ids"].max()) + 1) // 2
        found += [
            tuple(answer_of(row, 2 * pair + side) for side in (1, 2))
            for pair in range(count)
        ]
    return found


def answer_of(row, segment):
    (inside,) = np.nonzero(row["segment_ids"] == segment)
    tokens, targets = row["tokens"][inside], row["targets"][inside]
    (learned,) = np.nonzero(targets != IGNORE_INDEX)
    # The last token of a row is a target only, and so is the end of an answer.
    before = tokens[: learned[0] + 1 if learned.size else None]
    return before.tolist(), targets[learned].tolist()


def whole(prompt, answer):
    """What a side of a pair is, in bytes: its prompt, and what is learned."""
    return [BEGIN, *prompt.encode()], [*answer.encode(), BEGIN]


def draw(seed, count):
    """Records whose answers cannot be mistaken for each other."""
    random = Random(seed)
    words = ["é", "😀", "a b", "\n", "hello", "hello"]

    def text():
        return "".join(random.choices(words, k=random.randint(1, 4)))

    return [
        {"prompt": text(), "chosen": f"+{text()}{i}", "rejected": f"-{text()}{i}"}
        for i in range(count)
    ]


def test_the_first_of_two_segments_is_the_chosen_answer(tmp_path):
    records = draw(0, 60)
    made = corpus(write(tmp_path / "a.jsonl", [*records, records[0]]), 128)
    expected = [
        tuple(whole(one["prompt"], one[key]) for key in ("chosen", "rejected"))
        for one in [*records, records[0]]
    ]
    rows = made.sources[0].train_rows
    found = pairs_of(rows)
    assert sorted(found) == sorted(expected)
    assert rows.num_pairs == 61
    learned = sum(len(side[1]) for pair in expected for side in pair)
    assert rows.num_learned == learned
    swapped = [
        {**one, "chosen": one["rejected"], "rejected": one["chosen"]} for one in records
    ]
    other = corpus(write(tmp_path / "b.jsonl", swapped), 128).sources[0].train_rows
    assert sorted(pairs_of(other)) == sorted((b, a) for a, b in expected[:-1])


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(3, 12),
    st.integers(1, 4),
)
def test_a_row_has_whole_pairs_wherever_shards_end(sizes, length, shards):
    """Of each record: the tokens of its prompt and of its answers; 0 is none."""
    documents, expected, long, equal = [], [], 0, 0
    for number, (prompt, *answers) in enumerate(sizes):
        sides = []
        for side, answer in enumerate(answers):
            ids = (
                1000 * number + 100 * side + np.arange(prompt + answer if answer else 1)
            )
            documents.append((ids, np.arange(ids.size) >= prompt))
            sides.append((ids.tolist(), ids[prompt:].tolist()))
        if not any(answers):
            equal += 1
        elif sum(len(ids) for ids, _ in sides) > length + 1:
            long += 1
        else:
            expected.append(tuple(sides))
    parts, size = [], -(-len(documents) // shards)
    for begin in range(0, len(documents), size):  # a shard may end within a pair
        builder = ShardBuilder(None, 2**17)
        for document in documents[begin : begin + size]:
            builder.add(*document)
        parts.append(MemoryShard(builder.arrays()))
    rows = PreferenceRows(TokenStream(parts, is_separated=False), length)
    found = {}
    for row in (rows[index] for index in range(len(rows))):
        for segment in range(1, row["segment_ids"].max() + 1):
            tokens, learned = answer_of(row, segment)
            key = tokens[0] // 100
            assert key not in found
            assert (key % 10) == (segment + 1) % 2  # chosen, rejected, chosen, …
            if segment % 2 == 0:
                assert (tokens[0] // 1000) * 10 in found
            found[key] = learned
        inside = row["segment_ids"] > 0
        starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
        assert (row["positions"][starts] == 0).all()
        assert (row["targets"][~inside] == IGNORE_INDEX).all()
    for sides in expected:
        for ids, learned in sides:
            assert found.pop(ids[0] // 100, []) == learned
    assert not found
    assert (rows.num_long, rows.num_equal, rows.num_pairs) == (
        long,
        equal,
        len(expected),
    )
    absent = sum(not all(learned for _, learned in sides) for sides in expected)
    assert rows.num_labelled == absent


def test_a_labelled_answer_has_no_other_side(tmp_path):
    records = [
        {"prompt": "q", "completion": " good", "label": True},
        {"prompt": "q", "completion": " bad", "label": False},
    ]
    rows = corpus(write(tmp_path / "a.jsonl", records)).sources[0].train_rows
    (row,) = (rows[index] for index in range(len(rows)))
    found = sorted(answer_of(row, segment) for segment in (1, 2, 3, 4))
    nothing = [([BEGIN], [])]
    # The last token of a row is no position: such a side may have none.
    assert found[:1] in (nothing, [([], [])])
    learned = {segment: answer_of(row, segment)[1] for segment in (1, 2, 3, 4)}
    chosen = [learned[segment] for segment in (1, 3)]
    assert sorted(chosen) == [[], [*b" good", BEGIN]]
    assert sorted(learned[segment] for segment in (2, 4)) == [[], [*b" bad", BEGIN]]
    assert rows.num_labelled == rows.num_pairs == 2


def test_what_is_left_out_is_counted_with_what_takes_all(tmp_path):
    records = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q" * 50, "chosen": "a" * 90, "rejected": "b"},
        {"prompt": "q", "chosen": "b", "rejected": "b"},
        {"prompt": "q", "chosen": "", "rejected": "b"},
    ]
    path = write(tmp_path / "a.jsonl", records)
    made = corpus(path)
    assert made.warnings() == [
        f"preferences at {str(path)!r}: of 4 records some are left out; 2 records have "
        "equal answers or an empty one; 1 pairs are longer than "
        "training.sequence_length=64, and 256 takes all, as the longest has 195 tokens"
    ]
    assert len(pairs_of(made.sources[0].train_rows)) == 1
    longer = corpus(path, 194).sources[0]
    assert len(pairs_of(longer.train_rows)) == 2
    assert "longer" not in longer.cut


def test_no_pair_in_any_row_is_an_error(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "a"}]
    )
    with pytest.raises(EmptyDataError, match="equal answers or an empty one") as caught:
        corpus(path)
    assert "raise training.sequence_length" not in caught.value.fix


def test_a_pair_is_in_one_split(tmp_path):
    records = draw(1, 200)
    path = write(tmp_path / "a.jsonl", records)
    made = corpus(path, 128, validation_fraction=0.3)
    sides = [
        pairs_of(rows)
        for rows in (made.sources[0].train_rows, made.sources[0].validation_rows)
    ]
    assert min(map(len, sides)) > 20
    expected = [
        tuple(whole(one["prompt"], one[key]) for key in ("chosen", "rejected"))
        for one in records
    ]
    assert sorted(sides[0] + sides[1]) == sorted(expected)


def test_tables_give_the_batches_of_json_lines(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = draw(2, 50)
    lines = corpus(write(tmp_path / "a.jsonl", records))
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    table = corpus(tmp_path / "a.parquet")
    assert table.order == lines.order
    for one, other in zip(table.train(2), islice(lines.train(2), 30), strict=False):
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name])


def test_pairs_that_two_shards_share_are_the_same(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", draw(4, 40))
    whole = corpus(path, 128).sources[0].train_rows
    monkeypatch.setattr(shards, "_SHARD_TOKENS", 1)
    split = corpus(path, 128, cache_dir=str(tmp_path / "tokens")).sources[0].train_rows
    assert len(split.stream.shards) == 80
    assert pairs_of(split) == pairs_of(whole)


def test_another_batch_size_goes_on_at_the_next_row(tmp_path):
    path = write(tmp_path / "a.jsonl", draw(3, 90))
    rows = [
        row for batch in islice(corpus(path).train(2), 12) for row in batch["tokens"]
    ]
    resumed = islice(corpus(path).train(3, start_row=6), 6)
    after = [row for batch in resumed for row in batch["tokens"]]
    np.testing.assert_array_equal(after, rows[6:24])


def test_the_tokens_of_other_sources_are_found_by_what_they_were_made_of(tmp_path):
    """Their blocks are older than the settings of preferences."""
    made = {
        _settings_fingerprint(DataConfig(name=name, chosen_key=key))
        for name in ("text", "preferences")
        for key in ("chosen", "good")
    }
    assert len(made) == 3


# --- where answers begin


def encoded(folder, records, tokenizer=None, **settings):
    path = write(folder / "pairs.jsonl", records)
    config = DataConfig(
        name="preferences", path=str(path), tokenizer=tokenizer, **settings
    )
    encoder = Encoder(config, 400)
    found = read_records(Unit(path.name, path, "jsonl"), config, set())
    documents = [*encoder.encode_all(found, set())]
    return encoder.tokenizer, [*zip(documents[::2], documents[1::2], strict=True)]


def names(tokenizer, document, *, learned):
    chosen = document.loss_mask if learned else ~document.loss_mask
    return [tokenizer.token(i).replace("\u0120", " ") for i in document.ids[chosen]]


def test_bytes_end_at_the_boundary_and_the_separator_ends_an_answer(tmp_path):
    _, [(chosen, rejected)] = encoded(
        tmp_path, [{"prompt": "é", "chosen": "é!", "rejected": "a"}]
    )
    assert chosen.ids.tolist() == [BEGIN, 195, 169, 195, 169, 33, BEGIN]
    assert chosen.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert rejected.ids.tolist() == [BEGIN, 195, 169, 97, BEGIN]
    assert rejected.loss_mask.tolist() == [False] * 3 + [True] * 2


def test_a_token_that_spans_the_boundary_is_learned_by_both_answers(tmp_path):
    # "he" and "ll" merge, and these two to "hell".
    folder = write_folder(tmp_path, "gemma", marked=True)
    record = {"prompt": "say he", "chosen": "llo", "rejected": "y"}
    tokenizer, [(chosen, rejected)] = encoded(tmp_path, [record], str(folder))
    assert names(tokenizer, chosen, learned=True) == ["hell", "o", "<eos>"]
    assert names(tokenizer, rejected, learned=True) == ["he", "y", "<eos>"]
    before = ["<bos>", "s", "a", "y", " "]
    assert names(tokenizer, chosen, learned=False) == before
    assert names(tokenizer, rejected, learned=False) == before


def test_whole_texts_are_learned_from_where_their_tokens_differ(tmp_path):
    folder = write_folder(tmp_path, "gemma", marked=True)
    record = {"chosen": "Q: a\nA: hello", "rejected": "Q: a\nA: hey"}
    tokenizer, [(chosen, rejected)] = encoded(
        tmp_path, [record], str(folder), prompt_key=""
    )
    assert names(tokenizer, chosen, learned=True) == ["hell", "o", "<eos>"]
    assert names(tokenizer, rejected, learned=True) == ["he", "y", "<eos>"]


def test_answers_of_the_same_tokens_are_no_preference(tmp_path):
    folder = write_folder(tmp_path, "gemma", marked=True)
    messages = {"chosen": turns("hi", " a"), "rejected": turns("hi", "a")}
    texts = {"prompt": "hi", "chosen": "a", "rejected": "a<eos>"}
    _, pairs = encoded(tmp_path, [messages, texts], str(folder))
    for pair in pairs:
        assert [document.ids.tolist() for document in pair] == [[0], [0]]
        assert not any(document.loss_mask.any() for document in pair)


def test_an_end_that_the_text_has_is_not_added_twice(tmp_path):
    folder = write_folder(tmp_path, "gemma", marked=True)
    record = {"prompt": "a", "chosen": "b<eos>", "rejected": "c"}
    tokenizer, [(chosen, _)] = encoded(tmp_path, [record], str(folder))
    assert names(tokenizer, chosen, learned=True) == ["b", "<eos>"]


CHAT = {
    "prompt": turns("Why?", "So.", "hell"),
    "chosen": turns("", "hello")[1:],
    "rejected": turns("", "all\n")[1:],
}


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked"])
@pytest.mark.parametrize("family", ["gemma", "llama", "qwen"])
def test_of_messages_the_last_answer_and_its_end_are_learned(tmp_path, family, marked):
    folder = write_folder(tmp_path, family, marked=marked)
    tokenizer, [(chosen, rejected)] = encoded(tmp_path, [CHAT], str(folder))
    end = {"gemma": "<end_of_turn>", "llama": "<|eot_id|>", "qwen": "<|im_end|>"}[
        family
    ]
    for document, answer in ((chosen, "hello"), (rejected, "all")):
        learned = names(tokenizer, document, learned=True)
        assert [one for one in learned if one == end] == [end]
        text = tokenizer.decode(document.ids[document.loss_mask])
        assert text.rpartition("</think>")[2].strip() == answer
        prompt = tokenizer.decode(document.ids[~document.loss_mask])
        assert "So." in prompt
        assert "hell" in prompt
    first = [int(document.loss_mask.argmax()) for document in (chosen, rejected)]
    assert first[0] == first[1]
    np.testing.assert_array_equal(chosen.ids[: first[0]], rejected.ids[: first[0]])


def test_tokens_of_a_line_end_that_merge_are_learned_by_both_answers(tmp_path):
    # Two line ends are one token: that of the template and that of an answer.
    folder = write_folder(tmp_path, "gemma", marked=False)
    template = (folder / "chat_template.jinja").read_text()
    template = template.replace("message['content'] | trim", "message['content']")
    (folder / "chat_template.jinja").write_text(template)
    answers = {"chosen": turns("hi", "\n\nall"), "rejected": turns("hi", "all")}
    tokenizer, [(chosen, rejected)] = encoded(tmp_path, [answers], str(folder))
    assert names(tokenizer, chosen, learned=True)[0] == "\u010a\u010a"
    assert names(tokenizer, rejected, learned=True)[:2] == ["\u010a", "a"]


def test_messages_need_a_template_and_texts_an_end(tmp_path):
    with pytest.raises(TokenizerError, match="need a tokenizer with a chat template"):
        encoded(tmp_path, [CHAT])
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "words.json"
    library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    record = {"prompt": "a", "chosen": "a", "rejected": "a a"}
    with pytest.raises(TokenizerError, match="no token that ends an answer"):
        encoded(tmp_path, [record], str(path))
