# SPDX-License-Identifier: Apache-2.0
"""Damaged files of others: a coded error within 10 s and 500 MB, or what they hold."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tessera.targets.machine import machine
from tessera.train.checkpoints.choose_checkpoint import changed_settings
from tessera.train.data import DataConfig
from tessera.train.data.chat_template import Conversation, ConversationError
from tessera.train.data.encoding import chat_template_of
from tessera.train.data.file_ranges import Unit, divide
from tessera.train.data.records import read_records
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.models.safetensors import SafetensorsFile, write_file
from tessera.train.report import page
from tests.fuzz.damage import (
    Draw,
    bounded,
    damage_one,
    damaged_bytes,
    damaged_json,
)
from tests.train.data.chat_folders import TEMPLATES, turns, write_folder
from tests.train.report.run_folders import make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("chat"), "qwen", marked=True)


def draw_tokenizer(draw: Draw) -> bytes:
    """A tokenizer of another kind than ``write_folder`` makes."""
    library = pytest.importorskip("tokenizers")
    models, normalizers = library.models, library.normalizers
    pre, decoders = library.pre_tokenizers, library.decoders
    letters = "abcdefghijklmnopqrstuvwxyz "
    kinds = [
        models.Unigram([("<unk>", 0.0), *((x, -1.0) for x in letters)], 0),
        models.Unigram([("a", -1.0)], byte_fallback=True),
        models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"),
        models.WordLevel({"hello": 0, "<unk>": 1}, unk_token="<unk>"),
    ]
    tokenizer = library.Tokenizer(draw.choice(kinds))
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), replace])
    tokenizer.pre_tokenizer = draw.choice(
        [pre.Metaspace(), pre.Whitespace(), pre.Split("l", "isolated"), pre.Digits()]
    )
    tokenizer.decoder = draw.choice(
        [decoders.Metaspace(), decoders.WordPiece(), decoders.ByteFallback()]
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|im_start|>"])
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer.to_str().encode()


def use_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size >= 0
    for text in ("hello all", "é😀\n<|im_end|>", ""):
        ids = tokenizer.encode(text)
        assert ids.size == 0 or ids.max() < tokenizer.vocab_size
        tokenizer.decode(ids)
        assert len([tokenizer.token(int(number)) for number in ids]) == ids.size


@pytest.mark.fuzz(sample=50, whole=3000)
def test_a_damaged_tokenizer(seed, tokenizer_folder, tmp_path):
    draw, folder = Draw(seed), shutil.copytree(tokenizer_folder, tmp_path / "a")
    names = ("tokenizer.json", "tokenizer_config.json")
    if draw.random() < 0.6:
        (folder / names[0]).write_bytes(draw_tokenizer(draw))
    if draw.random() < 0.5:
        values = json.loads((folder / names[1]).read_bytes())
        added = {"0": {"content": "a", "special": True}, "1": {"content": "<bos>"}}
        values["added_tokens_decoder"] = added
        values["chat_template"] = [{"name": "default", "template": "{{ messages }}"}]
        (folder / names[1]).write_text(json.dumps(values))
    damage_one(draw, folder, dict.fromkeys(names, damaged_json))
    with bounded():
        use_tokenizer(folder)


@pytest.mark.fuzz(sample=5, whole=500)
@pytest.mark.slow(reason="templates have processes of their own")
def test_a_damaged_template(seed, tokenizer_folder, tmp_path):
    draw, folder = Draw(seed), shutil.copytree(tokenizer_folder, tmp_path / "a")
    content = TEMPLATES[draw.choice([*TEMPLATES])].encode()
    damaged = damaged_bytes(draw, content).decode(errors="replace")
    (folder / "chat_template.jinja").write_text(damaged)
    with bounded():
        _, template = chat_template_of(load_tokenizer(str(folder)), str(folder))
        for messages in (turns("hi", "hello"), turns("hi", "a", "b", system="Be well")):
            try:
                text, answers = template.render_answers(Conversation(messages))
            except ConversationError:
                continue
            assert all(0 <= a.begin < a.end <= len(text) for a in answers)


@pytest.mark.fuzz(sample=20, whole=2000)
def test_damaged_machines(seed, tmp_path):
    draw, path = Draw(seed), tmp_path / "mine.toml"
    content = (ROOT / "configs/target/h100.toml").read_bytes()
    path.write_bytes(damaged_bytes(draw, content))
    with bounded():
        assert machine(str(path)).memory_bytes


@pytest.mark.fuzz(sample=20, whole=2000)
def test_damaged_yaml(seed):
    draw = Draw(seed)
    content = (ROOT / "configs/config.yaml").read_bytes()
    content = damaged_bytes(draw, content)
    aliases = draw.choice([b"", b"a: &a [*a]\n", b"a: &a {x: *a}\n", b"<<: *a\n"])
    with bounded():
        [*changed_settings((aliases + content).decode(errors="replace"), "a: 1")]


@pytest.mark.fuzz(sample=50, whole=5000)
def test_a_damaged_safetensors_file(seed, tmp_path):
    draw, path = Draw(seed), tmp_path / "model.safetensors"
    arrays = {
        "a.b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "c": np.ones(3, "u1"),
    }
    layouts = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_file(path, layouts, arrays.__getitem__, {"format": "pt"})
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if draw.random() < 0.5:
        header = damaged_json(draw, content[8 : 8 + size])
        content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    else:
        content = damaged_bytes(draw, content)
    path.write_bytes(content)
    with bounded():
        file = SafetensorsFile(path)
        for name, (dtype, shape) in file.arrays.items():
            if dtype in ("F32", "U8"):
                assert file.view(name).shape == shape


@pytest.mark.fuzz(sample=30, whole=3000)
def test_a_damaged_table(seed, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    draw, path = Draw(seed), tmp_path / "a.parquet"
    key, columns = "text", {"text": [f"text {i}" for i in range(60)]}
    if draw.random() < 0.5:
        key, columns = "messages", {"messages": [turns("hi", "hello")] * 60}
    table = arrow.table(columns)
    parquet.write_table(table, path, row_group_size=draw.choice([20, 60]))
    path.write_bytes(damaged_bytes(draw, path.read_bytes()))
    config = DataConfig(messages_key="messages" if key == "messages" else None)
    with bounded():
        unit = Unit(path.name, path, "parquet")
        for part in divide(unit, draw.choice([100, 10**6])):
            [*read_records(part, config, set())]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def damaged_lines(draw: Draw, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    for number in draw.sample(range(len(lines)), min(len(lines), draw.randint(1, 3))):
        lines[number] = damaged_json(draw, lines[number]) + b"\n"
    return b"".join(lines)


@pytest.mark.slow(reason="every page is drawn whole")
@pytest.mark.fuzz(sample=10, whole=1000)
def test_a_report_of_damaged_files(seed, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    draw, folder = Draw(seed), shutil.copytree(run_folder, tmp_path / "run")
    names = {
        **dict.fromkeys(("metrics.jsonl", "events.jsonl"), damaged_lines),
        "config.yaml": damaged_bytes,
    }
    damage_one(draw, folder, names)
    with bounded():
        page.write_report([folder], tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert text.endswith("</html>\n")
        assert "\x1b" not in text
