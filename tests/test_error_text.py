# SPDX-License-Identifier: Apache-2.0
"""No name of a file, key or tensor commands the terminal that shows an error."""

import json
import logging
import shutil
import sys
import warnings

import numpy as np
import pytest

from tessera.errors import OperandError, TesseraError, TesseraWarning
from tessera.foundations.config_files import configs_dir
from tessera.train.config.command_line import read_command_line
from tessera.train.data import DataConfig
from tessera.train.data.corpus import load
from tessera.train.data.encoding import Encoder
from tessera.train.data.file_ranges import Unit
from tessera.train.data.records import read_records
from tessera.train.data.tokenization import load_tokenizer
from tessera.train.loop.console import Console
from tessera.train.models.safetensors import SafetensorsFile, write_file
from tests.train.data.chat_folders import turns, write_folder

CLEAR = "\x1b[2J\x1b]0;title\x07"
SHOWN = r"\x1b[2J\x1b]0;title\x07"


def test_escape_sequences_are_shown_and_not_obeyed():
    error = OperandError(f"a{CLEAR}\nb", got=f"c{CLEAR}\r\nd\x85\u202e", fix=CLEAR)
    assert str(error).split("\n") == [
        f"[T401] a{SHOWN}\\nb",
        f"  got: c{SHOWN}\\r",
        r"  got: d\x85\u202e",
        f"  fix: {SHOWN}",
        "  docs: https://tessera-spmd.github.io/tessera/errors/T401.html",
    ]
    assert error.got == f"c{SHOWN}\\r\nd\\x85\\u202e"
    again = OperandError(error.what, got=error.got, fix=error.fix)
    assert str(again) == str(error)
    assert str(OperandError("naïve ▁ \udcff")) == str(OperandError(r"naïve ▁ \udcff"))


def test_warnings_and_log_lines_too(capsys):
    with pytest.warns(TesseraWarning) as caught:
        warnings.warn(f"a\n{CLEAR}", TesseraWarning, stacklevel=1)
    assert str(caught[0].message) == f"a\n{SHOWN}"
    for terminal in (False, True):
        with Console(None, stream=sys.stdout, terminal=terminal, width=200) as console:
            logging.getLogger("tessera").warning("%d%% of %s", 5, CLEAR)
            console.show_table("run", [("data", CLEAR)])
            numbers = {"val_loss": 2.0, f"val_loss/{CLEAR}": 1.0}
            console.show_validation(1, numbers)
        shown = capsys.readouterr().out
        assert shown.count(SHOWN) == 3
        assert CLEAR not in shown


def chat_error(tmp_path):
    folder = write_folder(tmp_path, "qwen", marked=True)
    source = f"{{{{ raise_exception({json.dumps(CLEAR)}) }}}}"
    (folder / "chat_template.jinja").write_text(source)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": turns("hi")}))
    config = DataConfig(tokenizer=str(folder), messages_key="messages")
    (record,) = read_records(Unit(path.name, path, "jsonl"), config, set())
    Encoder(config, 10**6).encode(record, set())


def tensor_error(tmp_path):
    path = tmp_path / CLEAR
    array = np.ones(2, np.float32)
    write_file(path, {"abcdefghijklmnop": (array.dtype, (2,))}, lambda _: array)
    name = CLEAR.encode("unicode_escape").replace(b"\\x", rb"\u00")
    content = path.read_bytes().replace(b'"F32"', b'"%s"' % name)
    size = int.from_bytes(content[:8], "little") + len(name) - 3
    path.write_bytes(size.to_bytes(8, "little") + content[8:])
    SafetensorsFile(path)


def file_error(tmp_path):
    path = tmp_path / f"{CLEAR}.jsonl"
    path.write_text("{")
    load(
        DataConfig(name="text", path=str(path), cache_dir=str(tmp_path / "cache")),
        sequence_length=4,
        seed=0,
        vocab_size=257,
    )


def tokenizer_error(tmp_path):
    folder = write_folder(tmp_path, "qwen", marked=True)
    config = json.dumps({"eos_token": {"content": [CLEAR]}, "bos_token": CLEAR})
    (folder / "tokenizer_config.json").write_text(config)
    load_tokenizer(str(folder))


@pytest.mark.parametrize("use", [chat_error, tensor_error, file_error, tokenizer_error])
def test_no_file_gets_an_escape_sequence_into_an_error(use, tmp_path):
    with pytest.raises(TesseraError) as raised:
        use(tmp_path)
    shown = str(raised.value)
    assert r"\x1b[2J" in shown
    assert shown.replace("\n", "").isprintable()
    shutil.rmtree(tmp_path)


def test_nor_does_a_key_of_the_configuration(capsys):
    assert read_command_line(configs_dir(), [f"training.{CLEAR}=1"]) == 2
    assert capsys.readouterr().err.replace("\n", "").isprintable()
