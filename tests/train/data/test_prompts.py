# SPDX-License-Identifier: Apache-2.0
"""Prompts: their tokens, the other columns, their order, and which are left out."""

import datetime
import decimal
import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import BadRecordError, DataChangedError, EmptyDataError
from tessera.train.data import DataConfig, load, shards
from tessera.train.data.cursor import Cursor
from tessera.train.data.prompts import PromptCorpus, stop_tokens
from tessera.train.data.record_values import json_columns
from tests.train.data.chat_folders import turns, write_folder

BEGIN = 256


def write(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def prompts(path, *, max_length=64, seed=0, vocab_size=400, **settings):
    config = DataConfig(
        **{"name": "prompts", "path": str(path), "validation_fraction": 0} | settings
    )
    sizes = {"sequence_length": max_length, "vocab_size": vocab_size}
    return PromptCorpus(**vars(load(config, seed=seed, **sizes)))


RECORDS = [
    {"id": i, "prompt": f"é{i}+1=", "answer": [i + 1, {"unit": None}], "x": "😀"}
    for i in range(40)
]


def test_a_prompt_has_its_tokens_and_the_other_columns(tmp_path):
    made = prompts(write(tmp_path / "a.jsonl", RECORDS))
    found = sorted(made.take(0, 40), key=lambda prompt: prompt.columns["id"])
    for prompt, record in zip(found, RECORDS, strict=True):
        assert prompt.ids.dtype == np.int32
        assert prompt.ids.tolist() == [BEGIN, *record["prompt"].encode()]
        assert {**prompt.columns, "prompt": prompt.content} == record
        assert prompt.conversation is None
    assert stop_tokens(made.tokenizer, "bytes", found[0]) == [BEGIN]
    (source,) = made.sources
    assert source.train_rows.stream.num_documents == 40
    assert source.train_rows.stream.num_tokens == sum(p.ids.size for p in found)


def test_each_pass_has_all_prompts_and_any_batch_size_goes_on(tmp_path):
    made = prompts(write(tmp_path / "a.jsonl", RECORDS))
    order = [prompt.columns["id"] for prompt in made.take(0, 120)]
    passes = [order[begin : begin + 40] for begin in (0, 40, 80)]
    assert all(sorted(each) == [*range(40)] for each in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    for start, count in ((0, 7), (7, 50), (57, 1)):
        again = [prompt.columns["id"] for prompt in made.take(start, count)]
        assert again == order[start : start + count]
    other = prompts(tmp_path / "a.jsonl", seed=1).take(0, 40)
    assert [prompt.columns["id"] for prompt in other] != passes[0]
    # The order is that of the rows of a corpus, and so are cursors.
    batches = islice(made.train(3), 5)
    rows = np.concatenate([batch["tokens"] for batch in batches])
    for row, prompt in zip(rows, made.take(0, 15), strict=True):
        assert row[: prompt.ids.size].tolist() == prompt.ids.tolist()
        assert not row[prompt.ids.size :].any()
    Cursor.start(made).advance(57).resumed(prompts(tmp_path / "a.jsonl"))


def test_a_row_is_a_prompt_with_nothing_to_learn(tmp_path):
    made = prompts(write(tmp_path / "a.jsonl", RECORDS[:1]), max_length=8)
    (size,) = (prompt.ids.size for prompt in made.take(0, 1))
    batch = next(made.train(1))
    assert (batch["targets"] == -100).all()
    assert batch["segment_ids"][0].tolist() == [1] * size + [0] * (8 - size)
    assert batch["positions"][0].tolist() == [*range(size)] + [0] * (8 - size)


def test_a_record_may_be_in_two_shards(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", RECORDS)
    whole = prompts(path).take(0, 80)
    monkeypatch.setattr(shards, "_SHARD_TOKENS", 1)
    split = prompts(path, cache_dir=str(tmp_path / "tokens"))
    assert len(split.sources[0].train_rows.stream.shards) == 80
    for one, other in zip(whole, split.take(0, 80), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.content, one.columns) == (other.content, other.columns)


def test_a_changed_column_is_changed_data(tmp_path):
    path = write(tmp_path / "a.jsonl", RECORDS)
    start = Cursor.start(prompts(path))
    write(path, [*RECORDS[:-1], {**RECORDS[-1], "answer": 7}])
    with pytest.raises(DataChangedError, match="its data has changed"):
        start.resumed(prompts(path))


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path):
    records = [{"prompt": "a" * size} for size in (3, 9, 4, 20)]
    path = write(tmp_path / "a.jsonl", records)
    made = prompts(path, max_length=5)
    assert sorted(prompt.content for prompt in made.take(0, 2)) == ["aaa", "aaaa"]
    assert made.warnings() == [
        f"prompts at {str(path)!r}: 2 of 4 prompts have more than 5 tokens and are "
        "left out; the longest has 21"
    ]
    assert not prompts(path, max_length=21).warnings()
    with pytest.raises(EmptyDataError, match="the longest has 21") as caught:
        prompts(path, max_length=2)
    assert caught.value.fix.endswith(", or raise training.sequence_length by 19")


def test_the_split_is_that_of_texts(tmp_path):
    path = write(tmp_path / "a.jsonl", RECORDS)
    made = prompts(path, validation_fraction=0.25)
    trained = {prompt.columns["id"] for prompt in made.take(0, 40)}
    validated = [prompt.columns["id"] for prompt in made.take_validation()]
    assert trained.isdisjoint(validated)
    assert trained | {*validated} == {*range(40)}
    assert made.has_validation
    first = [prompt.columns["id"] for prompt in made.take_validation(3)]
    assert first == validated[:3]
    assert validated != sorted(validated)
    other = prompts(path, validation_fraction=0.25, seed=9).take_validation()
    assert [prompt.columns["id"] for prompt in other] == validated
    with pytest.raises(EmptyDataError, match="smaller than one batch"):
        prompts(path, validation_fraction=1).take(0, 1)


def test_tables_give_the_prompts_of_json_lines(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [
        {**RECORDS[i], "answer": [{"unit": "m", "number": i}] * (i % 3)}
        for i in (0, 1, 2, 3, 0)
    ]
    records += [{**RECORDS[6], "prompt": "long" * 20, "answer": []}]
    lines = prompts(write(tmp_path / "a.jsonl", records))
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    table = prompts(tmp_path / "a.parquet")
    for one, other in zip(table.take(0, 14), lines.take(0, 14), strict=True):
        assert (one.content, one.columns) == (other.content, other.columns)
        assert one.ids.tolist() == other.ids.tolist()


def test_columns_that_json_has_not_are_text_and_bytes_are_left_out(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    record = {
        "prompt": "a",
        "day": datetime.date(2026, 1, 2),
        "cost": decimal.Decimal("1.50"),
        "image": {"bytes": b"\0\xff", "path": "a.png"},
        "score": float("nan"),
    }
    parquet.write_table(arrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    made = prompts(tmp_path / "a.parquet")
    ((prompt,), (source,)) = made.take(0, 1), made.sources
    assert prompt.columns.pop("score") != 0
    assert prompt.columns == {
        "day": "2026-01-02",
        "cost": "1.50",
        "image": {"bytes": None, "path": "a.png"},
    }
    assert source.ignored == {"bytes, such as images"}


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.text(max_size=2), inner, max_size=2)
            ),
            max_leaves=4,
        ),
        max_size=3,
    ),
    st.text(max_size=3),
)
def test_every_json_value_comes_back(record, key):
    record[key] = "prompt"
    again = json.loads(json_columns(record, key, set()).encode())
    assert repr(sorted(again.items())) == repr(sorted(record.items()))
    assert next(iter(again)) == key


@pytest.mark.parametrize("family", ["gemma", "llama", "qwen"])
def test_messages_have_the_beginning_of_an_answer(tmp_path, family):
    folder = write_folder(tmp_path, family, marked=True)
    record = {"prompt": turns("hi", "hello", "all?"), "answer": "2"}
    path = write(tmp_path / "a.jsonl", [record])
    made = prompts(path, max_length=200, tokenizer=str(folder))
    (prompt,) = made.take(0, 1)
    answer = {
        "gemma": "<start_of_turn>model\n",
        "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "qwen": "<|im_start|>assistant\n",
    }[family]
    end = made.tokenizer.encode_chat(answer)[0].tolist()
    assert prompt.ids[-len(end) :].tolist() == end
    assert prompt.content == record["prompt"]
    assert prompt.columns == {"answer": "2"}
    names = made.tokenizer.special_tokens
    ends = {
        "gemma": ["<eos>", "<end_of_turn>"],
        "llama": ["<|eot_id|>"],
        "qwen": ["<|im_end|>"],
    }[family]
    found = stop_tokens(made.tokenizer, str(folder), prompt)
    assert found == sorted(names[name] for name in ends)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": "a"}, "it has no key 'prompt'; Known: 'question'"),
        ({"prompt": ""}, "its 'prompt' is empty"),
        ({"prompt": 3}, "its 'prompt' is a number, not text"),
        ({"prompt": []}, "its 'prompt' is an empty array, not a list of messages"),
        (
            {"prompt": turns("hi", "hello")},
            "its 'prompt' is an answer of the assistant, which a prompt leaves to",
        ),
    ],
)
def test_what_is_no_prompt_is_a_bad_record(tmp_path, record, reason):
    with pytest.raises(BadRecordError) as caught:
        prompts(write(tmp_path / "a.jsonl", [RECORDS[0], record]))
    assert reason in caught.value.got
    assert "data.prompt_key=<name>" in caught.value.fix
    assert "data.format" not in caught.value.fix
