# SPDX-License-Identifier: Apache-2.0
"""Damaged JSON of others: a coded error within 10 s and 500 MB, or what it holds.

A published folder's files, records of conversations, and files of prompts.
"""

import json
import shutil
from argparse import Namespace

import numpy as np
import pytest

from tessera.foundations.tree import named_leaves
from tessera.train.commands.generate import _conversations, _lines
from tessera.train.data import DataConfig
from tessera.train.data.encoding import Encoder
from tessera.train.data.file_ranges import Unit
from tessera.train.data.records import read_records
from tessera.train.loop.trained_model import open_trained
from tessera.train.models.families.published_files import (
    GENERATION_FILE,
    read_published,
)
from tessera.train.models.families.registry import (
    CONFIG_FILE,
    differences,
    family_of,
    parse_object,
)
from tessera.train.models.model_folder import INDEX
from tests.fuzz.damage import (
    ODD,
    Draw,
    bounded,
    damage_one,
    damaged_bytes,
    damaged_json,
)
from tests.train.data import chat_folders
from tests.train.data.chat_records import TEMPLATE, draw_record
from tests.train.models import published_folders
from tests.train.models.published_configs import CONFIGS

GENERATION = {"eos_token_id": [3, 4], "bos_token_id": 2, "do_sample": True}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with weights in two files, and the parameters that they hold."""
    folder = tmp_path_factory.mktemp("published") / "gemma"
    values = {
        **published_folders.GEMMA3,
        **{"eos_token_id": 3, "vocab_size": 300, "max_position_embeddings": 64},
    }
    tensors = published_folders.gemma3_tensors(values)
    published_folders.write_folder(folder, tensors, values, shards=2)
    chat_folders.write_folder(folder, "gemma", marked=False)
    (folder / GENERATION_FILE).write_text(json.dumps(GENERATION))
    return folder, named_leaves(open_trained(folder).read(None))


@pytest.mark.slow(reason="the first case reads the weights twice")
@pytest.mark.fuzz(sample=10, whole=2000)
def test_a_damaged_published_folder(seed, published, tmp_path):
    draw, (source, expected) = Draw(seed), published
    folder = shutil.copytree(source, tmp_path / "a")
    names = (CONFIG_FILE, CONFIG_FILE, GENERATION_FILE, INDEX)
    damage_one(draw, folder, {draw.choice(names): damaged_json})
    if draw.random() < 0.3:
        key = draw.choice(["eos_token_id", "text_config", "max_position_embeddings"])
        path = folder / draw.choice([CONFIG_FILE, GENERATION_FILE])
        try:
            values = json.loads(path.read_bytes())
            path.write_text(json.dumps({**values, key: draw.choice(ODD)}))
        except (TypeError, ValueError):
            pass
    with bounded():
        trained = open_trained(folder)
        assert all(type(token) is int for token in trained.stop_tokens)
        assert trained.max_length is None or trained.max_length > 0
        arrays = named_leaves(trained.read(None))
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name])
    with bounded():
        published = read_published(folder)
        config = family_of(published.config).config(published.config)
        json.dumps(published.config_values(config, {"eos_token_id": 3}))
        json.dumps(published.generation_values({"eos_token_id": 3}))


@pytest.mark.fuzz(sample=50, whole=5000)
def test_a_damaged_config_of_any_family(seed):
    draw = Draw(seed)
    content = json.dumps(CONFIGS[draw.choice([*CONFIGS])]).encode()
    with bounded():
        values = parse_object(
            damaged_json(draw, content).decode(errors="replace"), "config.json"
        )
        family = family_of(values)
        config = family.config(values)
        assert not differences(config, family.config(family.values(config)))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = chat_folders.write_folder(
        tmp_path_factory.mktemp("chat"), "qwen", marked=True
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = DataConfig(name="text", tokenizer=str(folder), messages_key="messages")
    return Encoder(config, 300)


@pytest.mark.slow(reason="a chat template has a process")
@pytest.mark.fuzz(sample=20, whole=3000)
def test_damaged_records_of_conversations(seed, encoder, tmp_path):
    draw, path = Draw(seed), tmp_path / "a.jsonl"
    records = [draw_record(draw.randrange(10**6)) for _ in range(6)]
    lines = [json.dumps(record).encode() for record in records]
    kept = draw.randrange(6)
    damaged = [
        line if number == kept else damaged_json(draw, line).replace(b"\n", b" ")
        for number, line in enumerate(lines)
    ]
    config = DataConfig(name="text", path=str(path), messages_key="messages")
    for number, line in enumerate(damaged):
        path.write_bytes(line)
        found = []
        with bounded():
            for record in read_records(Unit(path.name, path, "jsonl"), config, set()):
                found.append(record.conversation.messages)
                encoder.encode(record, set())
        assert number != kept or found == [records[kept]["messages"]]
    path.write_bytes(b"\n".join(damaged))
    with bounded():
        [*_conversations(Namespace(system="a", messages_file=str(path)), [])]
    with bounded():
        [*_conversations(Namespace(system=None, messages_file=str(path)), ["a"])]


@pytest.mark.fuzz(sample=20, whole=2000)
def test_damaged_prompts(seed, tmp_path):
    draw, path = Draw(seed), tmp_path / "prompts"
    content = "one\nÉ😀\n\u2028 three\n".encode()
    path.write_bytes(damaged_bytes(draw, content))
    with bounded():
        assert "\n".join(_lines(str(path))) in path.read_text("utf-8-sig")
