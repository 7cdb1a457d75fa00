# SPDX-License-Identifier: Apache-2.0
"""Data that is empty, too small, corrupt or no data, given to ``run_training.py``.

Each is a coded error before anything is compiled, and an earlier run in the same folder
stays as it is; the fixture ``refuse`` sees to that. For damaged files of prepared
tokens, see ``tests/train/data/test_shards.py``.
"""

import gzip
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = "All happy families are alike.\n"
SPLIT = (
    '{"version":"1.0","pre_tokenizer":{"type":"Whitespace"},'
    '"model":{"type":"WordLevel","vocab":%s,"unk_token":"?"}}'
)
WORDS = '{"version":"1.0","model":{"type":"WordLevel","vocab":%s,"unk_token":"?"}}'

FILES = {
    "empty.txt": b"",
    "byte.txt": b"a",
    "short.txt": TEXT.encode(),
    "text.txt": TEXT.encode() * 500,
    "families.txt": b"All families are alike.\n" * 500,
    "latin.txt": "Tolstoï\n".encode("latin-1") * 500,
    "words.json": (WORDS % '{"?": 0, "All": 1}').encode(),
    "broken.json": (WORDS % '{"?": 0, "All": 1}').encode()[:-9],
    "pickle.json": pickle.dumps({"?": 0}),
    "large.json": (SPLIT % '{"?": 0, "happy": 4000000000}').encode(),
    "table.parquet": b"PAR1" + bytes(9) + b"PAR1",
    "table.csv": b"id,text\n1,All happy families\n" * 500,
    "array.json": b'[{"text": "All happy families"}]\n' * 500,
    "texts.zip": b"PK\x03\x04" + bytes(40),
    "utf-16.txt": TEXT.encode("utf-16") * 500,
    "renamed.txt": gzip.compress(TEXT.encode() * 500),
    "torn.txt.gz": gzip.compress(TEXT.encode() * 500)[:-9],
    "plain.txt.gz": TEXT.encode() * 500,
    "broken.jsonl": b'{"text": "All happy families"}\n' * 3 + b'{"text": "All\n',
    "other.jsonl": b'{"id": 1, "content": "All happy families"}\n' * 500,
    "numbers.jsonl": b'{"text": 1}\n' * 500,
    "deep.jsonl": b'{"text": "a"}\n' + b"[" * 200_000 + b"\n",
    "long.jsonl": b'{"text": "a"}\n' + b"1" * 10_000 + b"\n",
    "latin.jsonl": '{"text": "Tolsto\u00ef"}\n'.encode("latin-1") * 500,
    "half.jsonl": b'{"text": "\\ud83d"}\n' * 500,
    "unknown.json": (WORDS % '{"All": 1}').encode(),
}

# What is given besides data=text -> how the error begins.
CASES = {
    "no such path": (
        ["data.path=nowhere/text"],
        "[T601] there is no data at 'nowhere/text'\n  got: {here} has no 'nowhere'\n",
    ),
    "a glob of nothing": (
        ["data.path=*.tex"],
        "[T601] there is no data at '*.tex'\n  got: no file matches {here}/*.tex\n",
    ),
    "a name that is too long": (
        ["data.path=" + "n" * 300],
        "[T601] there is no data at '" + "n" * 300 + "'\n  got: File name too long\n",
    ),
    "a name with NUL": (["data.path='a\0b'"], "[T601] there is no data at 'a\\x00b'\n"),
    "a glob with NUL": (["data.path='a\0/*'"], "[T601] there is no data at "),
    "the home of nobody": (
        ["data.path='~no-such-user/text'"],
        "[T601] there is no data at '~no-such-user/text'\n",
    ),
    "a link to nowhere": (
        ["data.path=links"],
        "[T601] the data file 'a.txt' cannot be read\n"
        "  got: links/a.txt: No such file or directory\n",
    ),
    "a pipe": (
        ["data.path=pipes"],
        "[T601] the data file 'a.txt' cannot be read\n"
        "  got: pipes/a.txt: it is not a regular file\n",
    ),
    "a device without end": (
        ["data.path=/dev/zero"],
        "[T601] the data file 'zero' cannot be read\n",
    ),
    "what the kernel makes up": (
        ["data.path=/proc/self/environ"],
        "[T601] there is no data at '/proc/self/environ'\n"
        "  got: the kernel generates it when it is read\n",
    ),
    "what the kernel waits for": (
        ["data.path=/proc/kmsg"],
        "[T601] there is no data at '/proc/kmsg'\n",
    ),
    "the kernel by a link": (
        ["data.path=kernel"],
        "[T601] the data file 'a.txt' cannot be read\n"
        "  got: kernel/a.txt: the kernel generates it when it is read\n",
    ),
    "a socket": (
        ["data.path=socket"],
        "[T601] the data file 'socket' cannot be read\n"
        "  got: socket: it is not a regular file\n",
    ),
    "a folder of the kernel": (["data.path=/sys"], "[T601] there is no data at "),
    "a glob of the kernel": (["data.path=/proc/*/environ"], "[T601] "),
    **{
        f"{name}, which is not text": (
            [f"data.path={name}"],
            f"[T606] the data file {name!r} is not text\n  got: {name}: {got}\n",
        )
        for name, got in {
            "table.csv": "another format, by its suffix .csv",
            "array.json": "another format, by its suffix .json",
            "texts.zip": "another format, by its suffix .zip",
            "utf-16.txt": "binary, with the byte 0x00 at offset 3",
            "renamed.txt": "binary, with the byte 0x00 at offset 3",
        }.items()
    },
    "table.parquet, which is no table": (
        ["data.path=table.parquet"],
        "[T606] the data file 'table.parquet' cannot be read as parquet\n",
    ),
    **{
        f"{name}, which is not gzip": (
            [f"data.path={name}"],
            f"[T606] the data file {name!r} cannot be decompressed\n",
        )
        for name in ("torn.txt.gz", "plain.txt.gz")
    },
    **{
        f"{name}, which has no text": (
            [f"data.path={name}"],
            f"[T607] line {line} of the data file {name!r} has no text\n"
            f"  got: {name}, line {line}: {got}",
        )
        for name, line, got in (
            ("broken.jsonl", 4, "it is not JSON: Unterminated string starting at at "),
            ("other.jsonl", 1, "it has no key 'text'; Known: 'id', 'content'"),
            ("numbers.jsonl", 1, "its 'text' is a number, not text\n"),
            ("deep.jsonl", 2, "it is not readable JSON: brackets are nested too "),
            ("long.jsonl", 2, "Exceeds the limit "),
            ("latin.jsonl", 1, "it is not UTF-8: byte 0xef\n"),
            ("half.jsonl", 1, "its text has half of a surrogate pair, which is not "),
        )
    },
    "a field of no file": (
        ["data.path=text.txt", "data.text_key=body"],
        "[T507] data.text_key has no effect in this run\n",
    ),
    "a folder without text": (
        ["data.path=nothing"],
        "[T602] the folder 'nothing' has no text files\n",
    ),
    "an empty file": (
        ["data.path=empty.txt"],
        "[T602] there is no text in the data: text at 'empty.txt'\n",
    ),
    "a byte": (["data.path=byte.txt"], "[T602] "),
    "less than a sequence": (
        ["data.path=short.txt"],
        "[T602] the training data is smaller than one batch\n"
        "  got: 29 tokens / sequence length 128 = 0 rows, and a batch takes 8\n",
    ),
    "less than a batch": (
        ["data.path=text.txt", "training.micro_batch_size=200"],
        "[T602] the training data is smaller than one batch\n",
    ),
    "bytes that are no UTF-8": (
        ["data.path=latin.txt", "data.tokenizer=words.json"],
        "[T602] the data file 'latin.txt' is not UTF-8 text\n"
        "  got: latin.txt: byte 0xef at offset 6\n",
    ),
    "ids that the model has not": (
        ["data.path=text.txt", "data.tokenizer=large.json"],
        "[T604] the text of 'text.txt' has a token that the model does not have\n"
        "  got: 'happy', id 4000000000, is token 2 of 2856, at line 1; 476 such in "
        "all; the model has ids 0 to 263\n",
    ),
    "a prompt with ids that the model has not": (
        [
            *("data.path=families.txt", "data.tokenizer=large.json"),
            *("training.sample_prompt=how happy", "training.sequence_length=2"),
        ],
        "[T604] the text of 'training.sample_prompt' has a token that the model does "
        "not have\n"
        "  got: 'happy', id 4000000000, is token 2 of 2, at line 1; 1 such in all; the "
        "model has ids 0 to 263\n",
    ),
    "words that the tokenizer has not": (
        ["data.path=text.txt", "data.tokenizer=unknown.json"],
        "[T605] the tokenizer 'unknown.json' has no ids for this text\n",
    ),
    "no such tokenizer": (
        ["data.path=text.txt", "data.tokenizer=nowhere.json"],
        "[T605] the tokenizer file 'nowhere.json' does not exist\n",
    ),
    "a tokenizer with a name that is too long": (
        ["data.path=text.txt", f"data.tokenizer={'n' * 300}.json"],
        "[T605] the tokenizer file ",
    ),
    "the tokenizer of nobody": (
        ["data.path=text.txt", "data.tokenizer='~no-such-user/a.json'"],
        "[T605] the tokenizer file '~no-such-user/a.json' does not exist\n",
    ),
    **{
        f"a tokenizer that is {name}": (
            ["data.path=text.txt", f"data.tokenizer={name}"],
            f"[T605] the library {library!r} cannot read '{name}'\n",
        )
        for name, library in {
            "broken.json": "tokenizers",
            "pickle.json": "tokenizers",
        }.items()
    },
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of bad data, and of a run that was there before."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for name in ("nothing", "links", "pipes", "run/checkpoints/4/state"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "links/a.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipes/a.txt")
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/a.txt").symlink_to("/proc/self/environ")
    with socket.socket(socket.AF_UNIX) as listener:
        # Relative: the path of a socket has a hundred characters at most.
        listener.bind("socket")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 4, "loss": 1.5}\n')
    (tmp_path / "run/checkpoints/4/state/a").write_text("1 2 3")
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_refused_before_compilation(refuse, here, case):
    arguments, begins = CASES[case]
    if ".json" in arguments[-1] and importlib.util.find_spec("tokenizers") is None:
        pytest.skip("tokenizers is not installed")
    said = refuse("data=text", *arguments, f"hydra.run.dir={here}/run")
    assert said.startswith(begins.replace("{here}", str(here))), said


@pytest.mark.full
def test_bad_data_on_two_ranks_is_not_restarted(here):
    """In processes of their own, as a person starts them."""
    command = [
        "-m",
        "tessera.train.commands.launch",
        "--nprocs=2",
        "--max-restarts=2",
        "--grace=5",
    ]
    settings = ["model.mesh_shape=[[2],[dp]]", "runtime.platform=cpu", "data=text"]
    ended = subprocess.run(
        [
            *(sys.executable, *command, str(ROOT / "run_training.py"), *settings),
            *("data.path=empty.txt", "hydra.run.dir=new"),
        ],
        cwd=here,
        env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "[T602] there is no text in the data: text at 'empty.txt'" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "] restart " not in ended.stderr
    assert not (here / "new").exists()
