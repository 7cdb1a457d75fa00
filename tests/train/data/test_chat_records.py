# SPDX-License-Identifier: Apache-2.0
"""Chat records: the template gets what they have, and weights of 0 are not learned.

``tests/hf/test_chat.py`` compares the same records with Transformers.
"""

import json
import re
from argparse import Namespace
from functools import cache

import numpy as np
import pytest

from tessera.errors import BadRecordError
from tessera.train.commands import generate
from tessera.train.data import DataConfig, load
from tessera.train.data.encoding import Encoder
from tessera.train.data.file_ranges import Unit
from tessera.train.data.records import read_records
from tessera.train.data.tokenization import load_tokenizer, tokenizer_files
from tests.train.data.chat_folders import turns, write_folder
from tests.train.data.chat_records import TEMPLATE, draw_record

jinja2 = pytest.importorskip("jinja2")
sandbox = pytest.importorskip("jinja2.sandbox")
UNMARKED = re.sub(r"\{%- (end)?generation %\}\n?", "", TEMPLATE)


def folder_with(tmp_path, template):
    folder = write_folder(tmp_path, "qwen", marked=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def config_of(folder, loss_on):
    path = folder / "chat.jsonl"
    return DataConfig(
        **{"name": "text", "path": str(path), "tokenizer": str(folder)},
        **{"messages_key": "messages", "loss_on": loss_on},
    )


def encoded(folder, records, loss_on="all", encoder=None):
    """Each record as it is read from a file of JSON lines."""
    path, config = folder / "chat.jsonl", config_of(folder, loss_on)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    encoder, unit = encoder or Encoder(config, 300), Unit(path.name, path, "jsonl")
    return [*encoder.encode_all(read_records(unit, config, set()), set())]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The folder of a template and its encoder, which starts a process."""

    @cache
    def made(template, loss_on):
        folder = folder_with(tmp_path_factory.mktemp("chat"), template)
        return folder, Encoder(config_of(folder, loss_on), 300)

    return made


def text_of(folder, ids):
    tokenizer = load_tokenizer(str(folder))
    return tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


def by_jinja(record, *, end=None, prompt=False):
    """The text of the first messages of a record, by Jinja itself."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    messages = []
    for message in record["messages"][:end]:
        values = {key: value for key, value in message.items() if value is not None}
        for name in ("reasoning_content", "thinking", "reasoning"):
            if name in values:
                values["reasoning_content"] = values[name]
        messages.append(values)
    return environment.from_string(UNMARKED).render(
        messages=messages,
        tools=record.get("tools"),
        add_generation_prompt=prompt,
        **(record.get("chat_template_kwargs") or {}),
    )


@pytest.mark.slow(reason="it draws many records")
@pytest.mark.parametrize("seeds", [40, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
def test_a_drawn_record_gives_the_text_and_answers_of_its_template(
    chat, template, seeds
):
    folder, encoder = chat(template, "all")
    records = [draw_record(seed) for seed in range(seeds)]
    found = encoded(folder, records, encoder=encoder)
    for record, made in zip(records, found, strict=True):
        whole = by_jinja(record)
        assert text_of(folder, made.ids) == whole, record
        unlearned = ""
        for number, message in enumerate(record["messages"]):
            if message["role"] == "assistant" and message.get("weight") == 0:
                begin = by_jinja(record, end=number, prompt=True)
                unlearned += by_jinja(record, end=number + 1).removeprefix(begin)
        mask = made.loss_mask
        skipped = [] if mask is None else made.ids[~mask]
        assert text_of(folder, skipped) == unlearned, record


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("loss_on", ["all", "answers"])
def test_an_answer_with_a_weight_of_0_is_not_learned(chat, template, loss_on):
    folder, encoder = chat(template, loss_on)
    messages = turns("hi", "hello", "why?", "all", "é", "hello all")
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    arguments = {"enable_thinking": False}
    record = {"messages": messages, "chat_template_kwargs": arguments}
    (made,) = encoded(folder, [record], loss_on, encoder)
    learned = text_of(folder, made.ids[made.loss_mask])
    if loss_on == "answers":
        assert learned == "all<|im_end|>\nhello all<|im_end|>\n"
    else:
        whole = by_jinja(record)
        assert learned == whole.replace("hello<|im_end|>\n", "", 1)


def test_a_message_of_several_blocks_has_one_weight(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for t in [m.content]"
        " * (2 - loop.index0 // 3) %}{% generation %}{{ t }};{% endgeneration %}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = turns("hi", "hello", "why?", "all")
    messages[1]["weight"] = 0
    folder = folder_with(tmp_path, template)
    (made,) = encoded(folder, [{"messages": messages}], "answers")
    assert text_of(folder, made.ids[made.loss_mask]) == "all;"


def record_of(message, **others):
    return {"messages": [*turns("hi"), {"role": "assistant", **message}], **others}


CALL = {"function": {"name": "rain", "arguments": {}}}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (record_of({"content": None}), "its 'messages[1].content' is null, not text"),
        (record_of({"content": None, "tool_calls": []}), "content' is null, not"),
        (record_of({}), "message 2 of its 'messages' has no 'content'"),
        (record_of({"content": ["a"]}), "is an array, not text"),
        (record_of({"content": "a", "weight": 0.5}), "has the weight 0.5, and only 0"),
        (
            record_of({"content": "a", "weight": 0}),
            "each of its answers has",
        ),
        (
            record_of({"content": "a"}, tools={"a": 1}),
            "'tools' is an object",
        ),
        (record_of({"content": "a"}, tools="a"), "'tools' is text, not a list"),
        (record_of({"content": "a"}, chat_template_kwargs=[]), "is an empty array"),
        (
            record_of({"content": "a"}, chat_template_kwargs={"messages": [], "x": 1}),
            "sets messages, which the trainer sets",
        ),
        (record_of({"content": [{"text": "\ud83d"}]}), "half of a surrogate pair"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(chat, record, reason):
    folder, encoder = chat(TEMPLATE, "answers")
    with pytest.raises(BadRecordError, match=re.escape(reason)):
        encoded(folder, [record], "answers", encoder)


def test_parts_that_a_template_would_print_as_python_does_are_refused(tmp_path):
    folder = folder_with(
        tmp_path, "{% for m in messages %}{{ m.content|trim }}{% endfor %}"
    )
    with pytest.raises(
        BadRecordError, match="content that is text, not a list of parts"
    ):
        encoded(folder, [record_of({"content": [{"type": "text", "text": "a"}]})])


def test_keys_that_are_not_used_are_said_once(tmp_path):
    folder = folder_with(
        tmp_path, "{% for m in messages %}{{ m.content }};{% endfor %}"
    )
    record = record_of(
        {"content": "hello", "train": False, "tool_calls": [CALL]},
        **{"tools": [CALL], "documents": ["a"], "id": 3, "images": None},
        chat_template_kwargs={"enable_thinking": False},
    )
    path = folder / "chat.jsonl"
    path.write_text((json.dumps(record) + "\n") * 9)
    config = DataConfig(
        **{"name": "text", "path": str(path), "tokenizer": str(folder)},
        **{"messages_key": "messages", "validation_fraction": 0},
        cache_dir=str(tmp_path / "cache"),
    )
    for _ in range(2):  # also where the tokens are stored
        made = load(config, sequence_length=8, seed=0, vocab_size=300)
        assert (
            "not used    keys of the records of text: documents, enable_thinking (not "
            "in the chat template), tool_calls (not in the chat template), tools (not "
            "in the chat template), train of messages\n"
        ) in made.describe()


def test_the_template_for_tools_writes_conversations_with_tools(tmp_path):
    folder = write_folder(tmp_path, "qwen", marked=True)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    named = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    config = json.loads(path.read_text()) | {"chat_template": named}
    path.write_text(json.dumps(config))
    records = [record_of({"content": "a"}), record_of({"content": "a"}, tools=[CALL])]
    made = encoded(folder, records)
    assert [text_of(folder, one.ids) for one in made] == ["hi", "1 tools"]
    path = folder / "additional_chat_templates/tool_use.jinja"
    path.parent.mkdir()
    path.write_text("{{ tools | length }} tools in a file of its own")
    (folder / "chat_template.jinja").write_text("default")
    made = encoded(folder, records)
    expected = ["default", "1 tools in a file of its own"]
    assert [text_of(folder, one.ids) for one in made] == expected
    assert path in tokenizer_files(str(folder))


def test_generate_gives_the_template_what_a_conversation_has(tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record_of({"content": "a"}, tools=[CALL], images=[1])))
    options = Namespace(system="Be brief.", messages_file=str(path))
    ((prompt, chat),) = generate._conversations(options, [])
    assert (prompt, chat.tools) == (chat.messages[1:], [CALL])
    assert capsys.readouterr().err == "not used: keys of the conversations: images\n"


def test_tables_give_tools_also_as_json(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = folder_with(tmp_path, TEMPLATE)
    record = record_of({"content": None, "tool_calls": [CALL]}, tools=[{"name": "é"}])
    call = {"function": {"name": "rain", "arguments": {"city": "x"}}}
    other = record_of({"content": "a", "tool_calls": [call]}, tools=None)
    columns = {
        "messages": [record["messages"], other["messages"]],
        "tools": [json.dumps(record["tools"]), None],
        "images": [b"x", None],
    }
    parquet.write_table(arrow.table(columns), folder / "a.parquet")
    config = DataConfig(
        **{"name": "text", "path": "x", "tokenizer": str(folder)},
        messages_key="messages",
    )
    unit = Unit("a.parquet", folder / "a.parquet", "parquet")
    ignored = set()
    records = [*read_records(unit, config, ignored)]
    assert [one.conversation.tools for one in records] == [record["tools"], None]
    assert ignored == {"images"}
    (first, _) = Encoder(config, 300).encode_all(records, ignored)
    assert text_of(folder, first.ids).startswith('<|im_start|>tools\n{"name": "é"}\n')
    assert np.all(first.ids < 300)
