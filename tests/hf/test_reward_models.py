# SPDX-License-Identifier: Apache-2.0
"""Rewards by a model are the scores of Transformers, on one device and on four."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tessera.train.loop.reward_models import RewardModel
from tests.train.data import chat_folders
from tests.train.data.chat_folders import turns
from tests.train.loop.post_training_runs import (
    ONE,
    TWO_BY_TWO,
    policy_run,
    write_prompts,
)

SCRIPT = Path(__file__).with_name("reward_scores.py")
PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has Transformers")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
WINDOWS = {"sliding_window": 7, "query_pre_attn_scalar": 10}
CLASSES = {
    "qwen": ("Qwen3ForSequenceClassification", {"tie_word_embeddings": False}),
    "llama": ("LlamaForSequenceClassification", {"rope_theta": 1000.0}),
    "gemma": ("Gemma3TextForSequenceClassification", WINDOWS),
}
TEXTS = [
    ("hi all", " hello"),
    ("", "é😀 naïve"),
    ("<bos>a", "he" * 60),
    ("names <|im_end|>", " of <|eot_id|>, <end_of_turn>"),
    ("a", "<eos>"),
    ("a", "<|im_end|>"),
]
CHATS = [
    (turns("hi"), turns("", "hello")[1:]),
    (turns("hi", "hello", "all?"), turns("", "  é😀\n" * 9)[1:]),
    (turns("a<eos></s>b"), turns("", "")[1:]),
]


@cache
def scored(family: str, folder: Path) -> dict[str, list[float]]:
    assert PYTHON is not None
    name, values = CLASSES[family]
    chat_folders.write_folder(folder, family, marked=False)
    (folder / "sizes.json").write_text(json.dumps({**SIZES, **values}))
    done = subprocess.run(
        [PYTHON, SCRIPT, folder, name, folder / "sizes.json"],
        input=json.dumps([*TEXTS, *CHATS]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("rewards")


@pytest.mark.parametrize("mesh", [ONE, TWO_BY_TWO], ids=["one", "fsdp2_tp2"])
@pytest.mark.parametrize("family", CLASSES)
def test_scores_are_those_of_transformers(family, mesh, root):
    folder = root / family
    folder.mkdir(exist_ok=True)
    expected = scored(family, folder)
    run = policy_run(write_prompts(root / "sums.jsonl"), mesh)
    model = RewardModel(run, str(folder), reads_messages=True)
    found = np.array(model(*zip(*TEXTS, *CHATS, strict=True)))
    np.testing.assert_allclose(found, expected["alone"], rtol=1e-5, atol=1e-5)
    # A batch of Transformers has the same, but where a text ends with what pads it.
    is_cut, differs = expected["is_cut"], np.abs(found - expected["padded"]) > 1e-5
    assert differs.tolist() == is_cut
    assert 0 < sum(is_cut) < len(is_cut)
