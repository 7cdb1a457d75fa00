# SPDX-License-Identifier: Apache-2.0
"""Records as tokens: texts, and conversations by chat templates.

``chat_texts.json`` has what Transformers writes; ``tests/hf/test_chat.py`` compares the
tokens and masks.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tessera.errors import BadRecordError, TokenizerError
from tessera.train.data import DataConfig, load
from tessera.train.data.chat_template import (
    ChatTemplate,
    Conversation,
    ConversationError,
)
from tessera.train.data.encoding import Encoder
from tessera.train.data.file_ranges import Unit
from tessera.train.data.records import Record
from tessera.train.data.tokenization import load_tokenizer
from tests.train.data.chat_folders import (
    CONVERSATIONS,
    TEMPLATES,
    turns,
    write_folder,
)

pytest.importorskip("jinja2")
GOLDEN = Path(__file__).with_name("chat_texts.json")
# What a model has to write in each conversation, without spaces at the ends.
ANSWERS = {
    "one turn": ["hello all"],
    "two turns": ["hello", "naïve 😀!"],
    "a system message": ["hello"],
    "no answer yet": ["hello"],
    "names of special tokens": ["c<end_of_turn>d"],
    "reasoning": ["hello"],
}
# Qwen writes the thoughts of the last answer alone, so earlier text changes later.
UNKNOWN = {("qwen", "two turns"), ("qwen", "no answer yet")}
ENDS = {
    "gemma": "<end_of_turn>\n",
    "llama": "<|eot_id|>",
    "qwen": "<|im_end|>\n",
    "mistral": "</s>",
}


def rendered(folder, messages, **arguments):
    settings = load_tokenizer(str(folder)).folder
    template = ChatTemplate(settings.chat_template, settings.special_tokens)
    try:
        return template.render(Conversation(messages), **arguments)
    except ConversationError:
        return None


def encoder(folder, loss_on):
    config = DataConfig(
        **{"name": "text", "path": "x", "tokenizer": str(folder)},
        **{"messages_key": "messages", "loss_on": loss_on},
    )
    return Encoder(config, 300)


def encoded_by(encoder, messages):
    unit = Unit("a.parquet", Path("a.parquet"), "parquet")
    (found,) = encoder.encode(Record(unit, 2, "", Conversation(messages)), set())
    return found


def encoded(folder, messages, loss_on):
    return encoded_by(encoder(folder, loss_on), messages)


def learned(folder, made):
    """The text of each run of learned tokens."""
    tokenizer = load_tokenizer(str(folder))
    edges = np.flatnonzero(np.diff(np.pad(made.loss_mask.astype(int), 1)))
    return [
        tokenizer._tokenizer.decode(made.ids[a:b], skip_special_tokens=False)
        for a, b in edges.reshape(-1, 2)
    ]


class Chat(NamedTuple):
    """The folder of a family, and its encoders: each starts a process."""

    family: str
    marked: bool
    folder: Path
    encoders: dict[str, Encoder]


@pytest.fixture(
    scope="module", params=itertools.product(TEMPLATES, (True, False)), ids=str
)
def chat(request, tmp_path_factory):
    family, marked = request.param
    folder = write_folder(tmp_path_factory.mktemp(family), family, marked=marked)
    encoders = {loss_on: encoder(folder, loss_on) for loss_on in ("answers", "all")}
    return Chat(family, marked, folder, encoders)


def test_a_template_writes_what_transformers_writes(chat):
    texts = {name: rendered(chat.folder, one) for name, one in CONVERSATIONS.items()}
    assert texts == json.loads(GOLDEN.read_text())[chat.family]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_and_its_end_are_learned_and_nothing_else(chat, name):
    family, messages = chat.family, CONVERSATIONS[name]
    if rendered(chat.folder, messages) is None:
        pytest.skip("the template refuses it")
    if not chat.marked and (family, name) in UNKNOWN:
        reason = "so the answer is not known"
        with pytest.raises(BadRecordError, match=reason):
            encoded_by(chat.encoders["answers"], messages)
        return
    made = encoded_by(chat.encoders["answers"], messages)
    texts = learned(chat.folder, made)
    assert all(text.endswith(ENDS[family]) for text in texts)
    answers = [text.removesuffix(ENDS[family]).strip() for text in texts]
    thought = (
        "<think>\nall\n</think>\n\n"
        if name == "reasoning"
        else ("<think>\n\n</think>\n\n")
    )
    answers = [answer.removeprefix(thought).strip() for answer in answers]
    assert answers == [answer.strip() for answer in ANSWERS[name]]
    everything = encoded_by(chat.encoders["all"], messages)
    assert everything.ids.tolist() == made.ids.tolist()
    assert everything.loss_mask is None


@pytest.mark.parametrize("marked", [True, False])
def test_the_last_turn_is_known_where_earlier_answers_change(tmp_path, marked):
    folder = write_folder(tmp_path, "qwen", marked=marked)
    chat = CONVERSATIONS["two turns"]
    made = encoded(folder, chat, "last_turn")
    assert learned(folder, made) == ["<think>\n\n</think>\n\n  naïve 😀!\n<|im_end|>\n"]
    assert made.ids.tolist() == encoded(folder, chat, "all").ids.tolist()
    # An answer that calls a tool, and the one after the tool, are one turn.
    tool = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "all"}]
    texts = learned(folder, encoded(folder, [*chat, *tool], "last_turn"))
    assert [text.count("<|im_end|>") for text in texts] in ([1, 1], [2])
    assert "".join(texts).endswith("all<|im_end|>\n")
    assert "hello" not in "".join(texts)


def test_a_last_turn_without_an_answer_is_a_bad_record(tmp_path):
    folder = write_folder(tmp_path, "gemma", marked=False)
    with pytest.raises(BadRecordError, match="after its last message of a user"):
        encoded(folder, CONVERSATIONS["no answer yet"], "last_turn")


def test_special_tokens_are_such_in_a_conversation_and_not_in_a_text(tmp_path):
    folder = write_folder(tmp_path, "gemma", marked=True)
    tokenizer = load_tokenizer(str(folder))
    begin = tokenizer._tokenizer.token_to_id("<bos>")
    made = encoded(folder, turns("hi", "hello"), "all")
    assert (made.ids == begin).tolist() == [True] + [False] * (made.ids.size - 1)
    assert begin not in tokenizer.encode(rendered(folder, turns("hi", "hello")))


def test_targets_are_the_answers_alone(tmp_path):
    write_folder(tmp_path, "gemma", marked=False)
    data = tmp_path / "chat.jsonl"
    lines = [turns("hi", "hello"), turns("all?", "all", "why?", "hello all")]
    data.write_text("".join(json.dumps({"chat": one}) + "\n" for one in lines))
    config = DataConfig(
        **{"name": "text", "path": str(data), "tokenizer": str(tmp_path)},
        **{"messages_key": "chat", "loss_on": "answers", "validation_fraction": 0},
    )
    made = load(config, sequence_length=80, seed=0, vocab_size=300)
    rows = made.sources[0].train_rows
    rows = [rows[i] for i in range(len(rows))]
    tokens = np.concatenate([row["tokens"] for row in rows])
    targets = np.concatenate([row["targets"] for row in rows])
    text = made.tokenizer._tokenizer.decode(
        targets[targets != -100], skip_special_tokens=False
    )
    assert text == "hello<end_of_turn>\nall<end_of_turn>\nhello all<end_of_turn>\n"
    # Each target is the token after it; the last of a row is no token of it.
    kept = np.flatnonzero(targets[:-1] != -100)[:-1]
    np.testing.assert_array_equal(tokens[kept + 1], targets[kept])
    # No separator: the template begins each conversation itself.
    first = encoded(tmp_path, lines[0], "all").ids.size
    assert np.flatnonzero(tokens == tokens[0]).tolist() == [0, first]
    assert "no separator" in made.describe()


def test_a_conversation_without_an_answer_is_a_bad_record(tmp_path):
    folder = write_folder(tmp_path, "qwen", marked=True)
    with pytest.raises(BadRecordError) as caught:
        encoded(folder, turns("hi"), "answers")
    assert str(caught.value).startswith(
        "[T607] row 3 of the data file 'a.parquet' is a conversation that the chat "
        "template cannot use\n"
        "  got: a.parquet, row 3: it has no answer of the role 'assistant'\n"
    )
    assert encoded(folder, turns("hi"), "all") is not None


def test_a_bad_conversation_counts_all_kinds_of_bad_ones(tmp_path):
    folder, path = write_folder(tmp_path, "qwen", marked=True), tmp_path / "a.jsonl"
    chats = [turns("hi", "hello"), turns("hi"), [], turns("hi"), turns("hi", "hello")]
    path.write_text("".join(json.dumps({"chat": one}) + "\n" for one in chats))
    config = DataConfig(
        **{"name": "text", "path": str(path), "tokenizer": str(folder)},
        **{"messages_key": "chat", "loss_on": "answers"},
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(BadRecordError) as caught:
        load(config, sequence_length=80, seed=0, vocab_size=300)
    assert (
        f"  got: {path}, line 2: it has no answer of the role 'assistant'\n"
        "  got: 2 of the 3 records after it are bad, too: a.jsonl, line 3; a.jsonl, "
        "line 4\n"
    ) in str(caught.value)


def test_what_a_template_refuses_is_a_bad_record(tmp_path):
    folder = write_folder(tmp_path, "mistral", marked=True)
    reason = "the chat template stops: Only user and assistant roles"
    with pytest.raises(BadRecordError, match=reason):
        encoded(folder, turns("hi", system="x"), "all")


def test_marks_that_a_template_changes_are_no_answer():
    source = (
        "{% for m in messages %}{% set answer %}{% generation %} {{ m.content }} "
        "{% endgeneration %}{% endset %}{{ answer | %s }}{% endfor %}"
    )
    messages = Conversation([{"role": "assistant", "content": "hello"}])
    whole = ChatTemplate(source.replace("%s", "string"), {})
    assert whole.render_answers(messages) == (
        " hello ",
        [(0, 7, True)],
    )
    trimmed = ChatTemplate(source.replace("%s", "trim"), {})
    assert trimmed.render(messages) == "hello"
    with pytest.raises(ConversationError, match="changes its generation blocks"):
        trimmed.render_answers(messages)
    with pytest.raises(ConversationError, match="changes its generation blocks"):
        whole.render_answers(
            Conversation([{"role": "assistant", "content": "a\ufdd0b"}])
        )


def test_a_template_cannot_reach_python():
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConversationError):
        ChatTemplate(escape, {}).render(Conversation(turns("hi")))


def test_messages_need_a_tokenizer_with_a_template(tmp_path):
    with pytest.raises(TokenizerError, match="of the kind bytes"):
        encoded("bytes", turns("hi"), "all")
    folder = write_folder(tmp_path, "qwen", marked=True)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="the tokenizer has no chat template"):
        encoded(folder, turns("hi"), "all")
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="cannot be compiled"):
        encoded(folder, turns("hi"), "all")
    shutil.rmtree(folder)
