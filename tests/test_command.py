# SPDX-License-Identifier: Apache-2.0
"""The ``tessera`` command, and what is packaged with it."""

import importlib
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tessera
from tessera.__main__ import main
from tessera.train.loop.main import configs_dir
from tessera.train.runtime.exit_codes import STOP_SIGNALS

ROOT = Path(__file__).parents[1]


def test_help_lists_the_subcommands(capsys):
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    for name in ("train", "launch", "export", "generate", "explain"):
        assert f"\n  {name} " in shown


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tessera {tessera.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tessera.__version__ == project["version"]


def test_an_unknown_subcommand_is_a_coded_error(capsys):
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("[T501] tessera has no subcommand 'trian'\n")
    assert "  fix: did you mean 'train'? Known: 'train', 'launch'," in error


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("finetune", "write tessera train model=... data=..."),
        ("eval", "write tessera train training.eval_only=true with model="),
        ("sample", "write tessera generate <run or folder> 'A prompt'"),
        ("model=tiny", "write tessera train model=tiny"),
    ],
)
def test_what_others_call_a_subcommand_says_what_to_write(capsys, word, fix):
    assert main([word]) == 2
    assert f"  fix: {fix}" in capsys.readouterr().err


@pytest.mark.slow(reason="it starts a process")
def test_train_takes_settings_as_the_script_does(capsys):
    command = [sys.executable, "-m", "tessera", "train", "training.step=5"]
    script = [sys.executable, str(ROOT / "run_training.py"), "training.step=5"]
    shown = [
        subprocess.run(each, cwd=ROOT, capture_output=True, text=True, check=False)
        for each in (command, script)
    ]
    assert [one.returncode for one in shown] == [2, 2]
    assert shown[0].stderr == shown[1].stderr
    assert shown[0].stderr.startswith("[T501] there is no setting 'training.step'\n")


def test_help_and_version_import_no_jax():
    program = """
import sys
from tessera.__main__ import main
main(["--help"]), main(["--version"])
try:
    main(["launch", "--nprocs=0", "x.py"])
except SystemExit:
    pass
print([name for name in ("jax", "hydra", "numpy") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("\n[]\n")
    assert "argument --nprocs: '0' is no number from 1 to 9999" in done.stderr


def test_the_wheel_has_the_command_and_the_files_of_the_settings():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = tables["project"]["scripts"]["tessera"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    included = tables["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {
        "configs": "tessera/configs",
        "docs/errors": "tessera/errors/pages",
    }
    assert configs_dir() == ROOT / "configs"
    for path in tables["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert (ROOT / path.lstrip("/")).exists(), path


@pytest.fixture
def own_signals():
    """Give back the handlers of signals, which train and launch take over."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    "subcommand",
    ["train", "launch", "export", "generate", "explain", "doctor"],
)
def test_each_subcommand_has_help(subcommand, capsys):
    try:
        code = main([subcommand, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 0
    assert "usage:" in capsys.readouterr().out
