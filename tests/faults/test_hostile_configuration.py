# SPDX-License-Identifier: Apache-2.0
"""Settings that somebody else wrote: what they cannot do.

They make nothing but values, read no environment, run no pickle and write nowhere but
in the run's folder. ``test_command_line_misuse.py`` has the messages.
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera.train.checkpoints.manifest import LAST, NAME, write_manifest
from tessera.train.loop import train
from tests.train.config.command_lines import run_from_command_line

# Of `make test`, the messages are in that module, and drawn lines in `tests/fuzz`.
pytestmark = pytest.mark.full

CONFIGS = Path(__file__).parents[2] / "configs"
SECRET = "hunter2"
LONG = "n" * 300

SMALL = (
    *("model.d_model=32", "model.num_layers=1", "model.num_heads=2"),
    *("model.num_kv_heads=1", "model.head_dim=16", "model.mlp_dim=32"),
    *("training.sequence_length=16", "training.micro_batch_size=2"),
    *(
        "training.validation_sequences=2",
        "training.sample_length=2",
        "training.report=false",
    ),
)


class Bomb:
    """What makes a file when it is read as a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that is there if somebody's code has run."""
    return tmp_path / "code has run"


# --- code


@pytest.mark.parametrize(
    "override",
    [
        "training._target_=pathlib.Path.touch",
        "+data._target_=pathlib.Path.touch",
        "++optimizer._target_=pathlib.Path.touch",
        "optimizer={_target_: pathlib.Path.touch, _args_: ['code has run']}",
        "data.synthetic={_target_: pathlib.Path.touch}",
        "training.remat={_target_: pathlib.Path.touch, _args_: ['code has run']}",
        "training.remat={global: {_target_: pathlib.Path.touch}}",
        "+hydra.launcher._target_=pathlib.Path.touch",
        "hydra.callbacks={a: {_target_: pathlib.Path.touch}}",
        "hydra.job_logging={handlers: {a: {(): pathlib.Path.touch}}}",
        "hydra.searchpath=[file://.]",
        "hydra/launcher=mine",
        "--config-dir=.",
        "--config-path=.",
        "--config-name=mine",
        "-cn=mine",
        "--experimental-rerun=mine.pickle",
        "--cfg=hydra",
    ],
)
def test_nothing_is_made_but_values(refuse, mark, override):
    mark.with_name("mine.yaml").write_text("_target_: pathlib.Path.touch\n")
    bomb = pickle.dumps(Bomb(mark))
    mark.with_name("mine.pickle").write_bytes(bomb)
    assert refuse(override).startswith(("[T501] ", "[T502] "))


def test_the_bomb_is_one(mark):
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["training.init_from=pickle"],
        ["data.tokenizer=pickle.json"],
        ["data.tokenizer=pickle.model"],
        ["training.resume=run"],
        ["training.resume=run/checkpoints/4"],
        ["hydra.run.dir=run", "training.resume=auto"],
    ],
)
def test_a_pickle_in_the_place_of_a_file_is_not_run(refuse, mark, arguments):
    """Where it is metadata, its checksum holds."""
    here, bomb = mark.parent, pickle.dumps(Bomb(mark))
    for name in ("pickle", "pickle.json", "pickle.model"):
        (here / name).write_bytes(bomb)
    state = here / "run/checkpoints/4/state"
    state.mkdir(parents=True)
    (state / "_METADATA").write_bytes(bomb)
    (state.parent / LAST).write_bytes(bomb)
    write_manifest(state.parent)
    # Of several checkpoints, one that says nothing is renamed.
    said = refuse(*arguments, may_rename=True)
    assert said.startswith(("[T605] ", "[T801] ", "[T805] "))


@pytest.fixture(scope="module")
def unpickled() -> list[str]:
    """The names that pickle looks up from now on, in any thread and library."""
    found: list[str] = []

    def hear(event: str, arguments: Any) -> None:
        if event == "pickle.find_class":
            found.append(".".join(map(str, arguments)))

    # It cannot be removed, and does nothing but this.
    sys.addaudithook(hear)
    return found


def test_a_run_that_goes_on_reads_no_pickle(tmp_path, mark, unpickled, capsys):
    """Bombs lie in the folders of data and of the checkpoint, and in the text."""
    pickle.loads(pickle.dumps(Path()))
    # In Python 3.13 the class is defined in a module of its own.
    assert unpickled.pop() in ("pathlib.PosixPath", "pathlib._local.PosixPath")
    bomb, books, run = pickle.dumps(Bomb(mark)), tmp_path / "books", tmp_path / "run"
    books.mkdir()
    (books / "a.txt").write_bytes(b"Call me Ishmael.\n" * 500)
    for name in ("b.txt", "b.pickle", "b.npy", "b.pt", "__init__.py"):
        (books / name).write_bytes(bomb)
    settings = [
        *(*SMALL, "data=text", f"data.path={books}", f"hydra.run.dir={run}"),
        "data.format=text",  # a pickle is no text, and is refused otherwise
        *("training.resume=auto", "training.checkpoint_every=0"),
    ]
    for steps in (1, 2):
        code = run_from_command_line(train.run, [*settings, f"training.steps={steps}"])
        assert code == 0, capsys.readouterr().err
        for place in ("checkpoints/1", "checkpoints/1/state"):
            (run / place / "extra.pickle").write_bytes(bomb)
    assert "resuming from" in capsys.readouterr().out
    assert (run / "checkpoints/2" / NAME).exists()
    assert not unpickled
    assert not mark.exists()


# --- the environment


@pytest.mark.parametrize(
    "override",
    [
        "name=${oc.env:SECRET}",
        "data.path=${oc.env:SECRET}",
        "data.path='${oc.decode:${oc.env:SECRET}}'",
        "training.sample_prompt='${oc.env:SECRET}'",
        "training.init_from=${oc.env:SECRET,x}",
        "training.remat={global: '${oc.env:SECRET}'}",
        "runtime.compile_cache=${oc.env:SECRET}",
        "hydra.run.dir=outputs/${oc.env:SECRET}",
        "hydra.run.dir=${hydra:runtime.cwd}",
    ],
)
def test_the_environment_is_not_read(refuse, monkeypatch, override):
    monkeypatch.setenv("SECRET", SECRET)
    said = refuse(override)
    assert said.startswith("[T502] ")
    assert "reads something outside the configuration" in said
    assert SECRET not in said


# --- places


@pytest.mark.parametrize(
    "override",
    [
        *("name=..", "name=../x", "name=a/../../x", "name=/tmp", "name=a/b"),
        *("name='~'", "name=-x", "name=.x", "name=''", 'name="a\0"', 'name="a\n"'),
        *(f"name={LONG}", "model.name=../x", "name='${training.resume}/..'"),
        *("hydra.run.dir=''", 'hydra.run.dir="a\0b"', f"hydra.run.dir={LONG}"),
        *("hydra.run.dir=file", "hydra.run.dir=file/below", "hydra.run.dir=loop"),
    ],
)
def test_a_run_has_a_folder_of_its_own_or_none(refuse, tmp_path, override):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    said = refuse("data=synthetic", "data.synthetic.tokens=20000", override)
    assert said.startswith("[T504] ")


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model=../../etc/passwd", "T806"),
        ("data=..", "T502"),
        ("runtime=..", "T502"),
        (f"training={LONG}", "T502"),
        ("training.resume=../../..", "T801"),
        (f"training.resume={LONG}", "T801"),
        ('training.resume="a\0b"', "T502"),
        (f"training.init_from={LONG}", "T805"),
        ('training.init_from="a\0b"', "T805"),
        ("training.init_from=/dev/zero", "T805"),
        ("training.init_from=pipe", "T805"),
        ("training.init_from=/proc/kmsg", "T805"),
        ("training.init_from=open", "T806"),
        ("training.resume=pipe", "T801"),
        ("hydra.run.dir=pipe/run", "T504"),
        ("runtime.compile_cache=pipe", "T709"),
        ("model.mesh_shape=[[4096],[dp]]", "T702"),
        ("model.d_model=1048576", "T509"),
        (f"runtime.compile_cache={LONG}", "T709"),
        ("runtime.compile_cache=open", "T709"),
    ],
)
def test_a_place_that_means_nothing_is_refused(refuse, tmp_path, override, code):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    os.mkfifo(tmp_path / "pipe")
    said = refuse("data=synthetic", "data.synthetic.tokens=20000", override)
    assert said.startswith(f"[{code}] ")


def test_checkpoints_that_are_a_link_elsewhere_are_not_written(refuse, tmp_path):
    outside = tmp_path / "outside/4"
    (outside / "state").mkdir(parents=True)
    (outside / LAST).write_text("{}")
    write_manifest(outside)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(outside.parent)
    said = refuse("hydra.run.dir=run", "training.resume=auto")
    assert said.startswith("[T504] a run that goes on would write outside")
