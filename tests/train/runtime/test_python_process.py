# SPDX-License-Identifier: Apache-2.0
"""No process that Tessera starts executes modules of the current folder."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.train.runtime.python_process import python_command

ROOT = Path(__file__).parents[3]
HOSTILE = ("numpy", "json", "jax", "runpy", "pickle", "jinja2", "tokenizers")
# What starts Python, or may: each place is listed with the reason why it is safe.
STARTS = {
    *("sys.executable", "multiprocessing", "ProcessPoolExecutor", "runpy", "os.fork"),
    *("os.system", "os.popen", "os.posix_spawn", "os.execv", "os.execvp", "os.execve"),
    *("subprocess.Popen", "subprocess.run", "subprocess.call", "pty", "asyncio"),
    *("subprocess.check_output", "subprocess.check_call", "os.spawnv"),
}
KNOWN = {
    ("train/runtime/python_process.py", "sys.executable"): "-P, and an explicit path",
    (
        "train/runtime/rank_process.py",
        "sys.executable",
    ): "-I -S; the file imports nothing",
    (
        "train/runtime/rank_process.py",
        "subprocess.Popen",
    ): "the command of launch_options",
    ("train/runtime/start_rank.py", "os.execvp"): "the command of launch_options",
    (
        "train/runtime/launch_options.py",
        "sys.executable",
    ): "the user's file, in its folder",
    ("train/commands/doctor.py", "subprocess.run"): "python_command",
    ("train/commands/launch.py", "subprocess.call"): "the command of launch_options",
    ("train/commands/train.py", "subprocess.run"): "module_command",
    ("train/planner/auto_layout.py", "subprocess.run"): "python_command",
    ("train/config/sweep.py", "subprocess.Popen"): "module_command",
    ("train/data/worker_process.py", "subprocess.Popen"): "module_command",
    ("train/rewards/reward_functions.py", "asyncio"): "awaits a function",
}


def starts(source: str) -> set[str]:
    """The names of ``STARTS`` that a module's code has."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names & STARTS


@pytest.mark.slow(reason="it reads every module")
def test_every_place_that_starts_python_is_known():
    package = ROOT / "tessera"
    found = {
        (str(path.relative_to(package)), name)
        for path in package.rglob("*.py")
        if any(word.rpartition(".")[2] in (text := path.read_text()) for word in STARTS)
        for name in starts(text)
    }
    assert found == set(KNOWN)


def test_a_new_place_is_seen():
    assert starts("from subprocess import run") == {"subprocess.run"}
    assert starts("import multiprocessing.pool") == {"multiprocessing"}
    assert starts("x = [sys.executable, '-m', 'a']") == {"sys.executable"}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A current folder whose modules leave files named after them."""
    for name in HOSTILE:
        line = f"from pathlib import Path; Path({str(tmp_path / name)!r}).touch()"
        (tmp_path / f"{name}.py").write_text(f"{line}; raise SystemExit(99)\n")
    monkeypatch.chdir(tmp_path)
    return lambda: [name for name in HOSTILE if (tmp_path / name).exists()]


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_finds_the_parents_modules_and_none_of_the_current_folder(
    hostile, tmp_path, monkeypatch
):
    mine = tmp_path / "elsewhere"
    mine.mkdir()
    (mine / "my_module.py").write_text("import sys\ndef main(): return sys.argv[1:]\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(mine)])
    program = "import json, runpy, my_module; print(json.dumps(my_module.main()))"
    assert json.loads(output(*python_command(program, "a b", "'"))) == ["a b", "'"]
    assert not hostile()


SMALL = [
    *("model.d_model=32", "model.num_layers=1", "model.mlp_dim=64", "training.steps=1"),
    *("training.sequence_length=16", "training.report=false"),
]
TEXT = ["data=text", "data.path=.", "data.tokenizer=bytes", "data.cache_dir=cache"]
# Every file is for a process of its own.
PROGRAM = """\
from tessera.__main__ import main
from tessera.train.data import preparation
preparation._BLOCK_BYTES = preparation._WORKER_BYTES = 1
sys.exit(main())
"""
SYNTHETIC = ["data=synthetic", "data.synthetic.tokens=20000"]


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["launch", "--nprocs=1", "tessera", "--version"],
        ["train", "model.mesh_shape=auto", *SMALL, *SYNTHETIC],
        ["train", "data.num_workers=2", "data.format=text", *TEXT, *SMALL],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_downloaded_folder_may_be_the_current_one(words, hostile, tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("Call me Ishmael.\n" * 3000)
    output(*python_command(PROGRAM, *words))
    assert not hostile()
