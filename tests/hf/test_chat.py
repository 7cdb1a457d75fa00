# SPDX-License-Identifier: Apache-2.0
"""Conversations have the tokens and masks that Transformers gives them.

``make test-hf`` runs it; see ``test_export.py``.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tessera.train.data.chat_prompts import ChatPrompts
from tessera.train.data.chat_template import Conversation
from tessera.train.data.tokenization import load_tokenizer
from tests.train.data import test_chat_records as chat_records
from tests.train.data.chat_folders import CONVERSATIONS, TEMPLATES, write_folder
from tests.train.data.chat_records import TEMPLATE, draw_record
from tests.train.data.test_encoding import GOLDEN, encoded, rendered

PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has Transformers")


def transformers_results(folder: Path, records):
    script = Path(__file__).with_name("apply_chat_template.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder)],
        input=json.dumps(records),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize("loss_on", ["all", "answers"])
def test_drawn_records_have_the_tokens_and_masks_of_transformers(tmp_path, loss_on):
    folder = write_folder(tmp_path, "qwen", marked=True, trim_offsets=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    records = [draw_record(seed) for seed in range(200)]
    if loss_on == "answers":  # Transformers knows no weights
        for record in records:
            for message in record["messages"]:
                message.pop("weight", None)
    results = transformers_results(folder, records)
    made = chat_records.encoded(folder, records, loss_on)
    for record, one, expected in zip(records, made, results, strict=True):
        assert one.ids.tolist() == expected["ids"], record
        if loss_on == "answers":
            assert one.loss_mask.astype(int).tolist() == expected["mask"], record


def assert_answers_are_asked_for_and_end_alike(folder, expected):
    chat = ChatPrompts(load_tokenizer(str(folder)), str(folder))
    for name, conversation in CONVERSATIONS.items():
        if (result := expected[name]) is None:
            continue
        ids = chat.tokenizer.encode_chat(chat.render(Conversation(conversation)))[0]
        assert ids.tolist() == result["prompt_ids"], name
    result = expected["one turn"]
    (end,) = result["ends"]
    question = Conversation(CONVERSATIONS["one turn"][:1])
    assert chat.ends(question) == {end, result["eos"]}


@pytest.mark.full
@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(tmp_path, family):
    # Where offsets are trimmed, Transformers has no mask for an answer that begins with
    # a space: it finds no token at its first character.
    folder = write_folder(tmp_path, family, marked=True, trim_offsets=False)
    records = [{"messages": one} for one in CONVERSATIONS.values()]
    results = transformers_results(folder, records)
    expected = dict(zip(CONVERSATIONS, results, strict=True))
    for name, conversation in CONVERSATIONS.items():
        result, text = expected[name], rendered(folder, conversation)
        if result is None:
            assert text is None, name
            continue
        prompt = rendered(folder, conversation, add_generation_prompt=True)
        assert (text, prompt) == (result["text"], result["prompt"]), name
        assert encoded(folder, conversation, "all").ids.tolist() == result["ids"], name
        made = encoded(folder, conversation, "answers")
        if made is None:
            assert not any(result["mask"]), name
        else:
            assert made.ids.tolist() == result["ids"], name
            assert made.loss_mask.astype(int).tolist() == result["mask"], name
    assert_answers_are_asked_for_and_end_alike(folder, expected)
    golden = {name: one and one["text"] for name, one in expected.items()}
    assert json.loads(GOLDEN.read_text())[family] == golden
