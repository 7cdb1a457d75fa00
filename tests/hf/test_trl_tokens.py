# SPDX-License-Identifier: Apache-2.0
"""Preferences have the tokens and learned tokens that TRL gives them."""

import json
import os
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.train.data.chat_folders import turns, write_folder
from tests.train.data.test_record_rows import encoded

PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has TRL")

# Merges of the tokenizer span the ends of many of them.
WORDS = ["h", "e", "ll", "hell", "o", " ", "  ", "\n", "\n\n", "é", "😀", "?"]


def draw(seed: int):
    """Records of three layouts: texts, whole texts, messages."""
    random = Random(seed)

    def text(end: str = "") -> str:
        return "".join(random.choices(WORDS, k=random.randint(1, 5))) + end

    layouts: list[list[dict]] = [[], [], []]
    for _ in range(200):
        prompt, chosen, rejected = text(), text("a"), text("b")
        layouts[0].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        # One does not begin with the other, and what they begin with is no space.
        whole = {"chosen": f"Q{prompt}{chosen}", "rejected": f"Q{prompt}{rejected}"}
        layouts[1].append(whole)
        chat = turns(*(text("q") for _ in range(random.choice([1, 3]))))
        answers = {
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        layouts[2].append({"prompt": chat, **answers})
    return layouts


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma", "qwen"])
def test_pairs_have_the_tokens_of_trl(tmp_path, family):
    folder = write_folder(tmp_path, family, marked=False, trim_offsets=False)
    layouts = draw(0)
    script = Path(__file__).with_name("trl_tokens.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder)],
        input=json.dumps(layouts),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    for number, expected in enumerate(json.loads(done.stdout)):
        key = {"prompt_key": ""} if number == 1 else {}
        _, pairs = encoded(tmp_path, layouts[number], str(folder), **key)
        for pair, (prompt, *answers) in zip(pairs, expected, strict=True):
            for document, answer in zip(pair, answers, strict=True):
                # A text begins with the separator, which this tokenizer does not add.
                ids = document.ids[0 if number == 2 else 1 :].tolist()
                assert ids == prompt + answer
                learned = document.ids[document.loss_mask].tolist()
                assert learned == answer
