# SPDX-License-Identifier: Apache-2.0
"""The layouts of preferences on the Hub, and what cannot be a preference."""

import json

import pytest

from tessera.errors import BadRecordError, SettingConflictError
from tessera.train.data import DataConfig
from tessera.train.data.chat_template import Conversation
from tessera.train.data.file_ranges import Unit
from tessera.train.data.files import units_of
from tessera.train.data.record_values import Preference
from tessera.train.data.records import read_records
from tests.train.data.chat_folders import turns

HH = "\n\nHuman: {}\n\nAssistant: {}"


def read(folder, records, *, ignored=None, suffix=".jsonl", **settings):
    """The preferences of records, as they are read from a file."""
    path = folder / f"pairs{suffix}"
    if suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    config = DataConfig(name="preferences", path=str(path), **settings)
    unit = Unit(path.name, path, suffix[1:])
    found = read_records(unit, config, set() if ignored is None else ignored)
    return [record.preference for record in found]


def chat(*contents, **others):
    return Conversation(turns(*contents, **others), None, {})


# Real layouts: of explicit prompts (TRL), HH, UltraFeedback, and KTO's labels.
LAYOUTS = {
    "explicit texts": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        Preference(10, "The sky is blue.", "The sky is green."),
    ),
    "explicit messages": (
        {
            "prompt": turns("What color is the sky?"),
            "chosen": turns("", "It is blue.")[1:],
            "rejected": turns("", "It is green.")[1:],
        },
        Preference(
            1,
            chat("What color is the sky?", "It is blue."),
            chat("What color is the sky?", "It is green."),
        ),
    ),
    "implicit messages": (
        {
            "prompt": "What color is the sky?",
            "prompt_id": "00a1",
            "chosen": turns("What color is the sky?", "It is blue."),
            "rejected": turns("What color is the sky?", "It is green."),
            "messages": turns("What color is the sky?", "It is blue."),
            "score_chosen": 8.5,
            "score_rejected": 2.0,
        },
        Preference(
            1,
            chat("What color is the sky?", "It is blue."),
            chat("What color is the sky?", "It is green."),
        ),
    ),
    "implicit messages of several turns, without a prompt": (
        {
            "chosen": turns("hi", "hello", "all?", "yes", system="Be well."),
            "rejected": turns("hi", "hello", "all?", "no", system="Be well."),
        },
        Preference(
            4,
            chat("hi", "hello", "all?", "yes", system="Be well."),
            chat("hi", "hello", "all?", "no", system="Be well."),
        ),
    ),
    "messages whose answers have the prompt, too": (
        {
            "prompt": turns("hi"),
            "chosen": turns("hi", "hello"),
            "rejected": turns("hi", "no"),
        },
        Preference(1, chat("hi", "hello"), chat("hi", "no")),
    ),
    "a good completion": (
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        Preference(10, "The sky is blue.", None),
    ),
    "a bad completion": (
        {"prompt": turns("hi"), "completion": turns("", "no")[1:], "label": False},
        Preference(1, None, chat("hi", "no")),
    ),
    "unicode": (
        {"prompt": "é😀", "chosen": "😀", "rejected": "é"},
        Preference(2, "é😀😀", "é😀é"),
    ),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_a_prompt_and_two_answers(tmp_path, layout, suffix):
    record, expected = LAYOUTS[layout]
    assert read(tmp_path, [record, record], suffix=suffix) == [expected, expected]


def test_whole_texts_that_begin_alike_are_named_as_such(tmp_path):
    both = [HH.format("Why?", "Because."), HH.format("Why?", "No.")]
    record = dict(zip(("chosen", "rejected"), both, strict=True))
    # The space is in the first token of an answer.
    shared = len(HH.format("Why?", "").rstrip())
    (found,) = read(tmp_path, [record], prompt_key="")
    assert found == Preference(shared, *both)
    # What both begin with is no prompt where the prompt may have another name.
    with pytest.raises(BadRecordError) as caught:
        read(tmp_path, [{"question": "Why?", **record}])
    assert "it has no key 'prompt'; " in caught.value.got
    assert "data.prompt_key=''" in caught.value.fix


def test_other_names_are_settings(tmp_path):
    record = {"system": "Be well.", "question": "Why?", "good": "a", "bad": "b"}
    keys = {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    ignored = set()
    assert read(tmp_path, [record], ignored=ignored, **keys) == [
        Preference(4, "Why?a", "Why?b")
    ]
    assert ignored == {"system"}


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [("", "a"), ("a", " \n"), ("", "")],
)
def test_an_empty_answer_is_no_preference(tmp_path, chosen, rejected):
    texts = {"prompt": "Why?", "chosen": chosen, "rejected": rejected}
    answers = {
        "chosen": turns("Why?", chosen),
        "rejected": turns("Why?", rejected),
    }
    assert read(tmp_path, [texts, answers]) == [Preference(0, None, None)] * 2


def test_a_completion_without_text_is_no_preference(tmp_path):
    record = {"prompt": "Why?", "completion": "", "label": False}
    assert read(tmp_path, [record]) == [Preference(0, None, None)]


def test_a_call_of_a_tool_is_an_answer(tmp_path):
    call = {"type": "function", "function": {"name": "rain", "arguments": {}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"chosen": [*turns("Rain?"), answer], "rejected": turns("Rain?", "no")}
    (found,) = read(tmp_path, [{**record, "tools": [call]}])
    assert found.shared == 1
    assert found.chosen.tools == [call]


QUESTION = {"chosen": turns("Why?", "a"), "rejected": turns("Why?", "b")}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "rejected": "b"}, "it has no key 'chosen'; "),
        ({"prompt": "a", "chosen": "b"}, "it has no key 'rejected'; "),
        (
            {"prompt": "a", "chosen": None, "rejected": "b"},
            "'chosen' is null, not text",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": turns("c")},
            "its 'rejected' is an array, not text",
        ),
        (
            {"prompt": turns("a"), "chosen": "b", "rejected": "c"},
            "its 'prompt' is an array, not text",
        ),
        (
            {**QUESTION, "prompt": "Who?"},
            "the text of its prompt is no message with which both answers begin",
        ),
        (
            {**QUESTION, "rejected": turns("Who?", "a")},
            "its prompt is not followed by answers of the assistant",
        ),
        (
            {
                "chosen": turns("Why?", "a", system="Be well."),
                "rejected": turns("Who?", "a", system="Be well."),
            },
            "its prompt is not followed by answers of the assistant",
        ),
        (
            {"prompt": turns("Who?"), **QUESTION},
            "its prompt is not followed by answers of the assistant",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "true"},
            "its 'label' is text, not true or false",
        ),
        (
            {"prompt": "a", "completion": turns("a", "b"), "label": True},
            "its 'prompt' is text, not a list of messages",
        ),
        (
            {"completion": "b", "label": True},
            "it has no key 'prompt'; ",
        ),
    ],
)
def test_what_is_no_pair_is_a_bad_record(tmp_path, record, reason):
    with pytest.raises(BadRecordError) as caught:
        read(tmp_path, [LAYOUTS["explicit texts"][0], record])
    assert reason in caught.value.got
    assert "pairs.jsonl, line 2" in caught.value.got


def test_whole_texts_have_a_common_beginning(tmp_path):
    with pytest.raises(
        BadRecordError, match="its prompt is empty, or its answers have two"
    ):
        read(tmp_path, [{"chosen": "a", "rejected": "b"}], prompt_key="")


def test_a_table_without_answers_is_a_bad_record(tmp_path):
    with pytest.raises(
        BadRecordError, match=r"no key 'chosen'; Known: .*'better'"
    ) as caught:
        read(tmp_path, [{"prompt": "a", "better": "b"}], suffix=".parquet")
    assert "data.chosen_key=" in caught.value.fix


def test_a_text_file_has_no_pairs(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("hello")
    with pytest.raises(SettingConflictError, match="data=preferences needs records"):
        units_of(DataConfig(name="preferences", path=str(path)))
