# SPDX-License-Identifier: Apache-2.0
"""Random command lines of ``tessera launch`` and ``tessera export``.

Each is refused with code 2 and nothing written, or understood; nothing is launched, and
there is no checkpoint to export.
"""

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from random import Random

import pytest

from tessera.errors import ProcessLayoutError, UnknownSettingError
from tessera.train.commands.export import main as export
from tessera.train.runtime.launch_options import make_plan
from tests.fuzz.override_lists import NUMBERS, PATHS, WORDS, fill

VALUES = (
    *NUMBERS,
    *WORDS,
    "4",
    "8",
    "29500",
    "65534",
    "65535",
    "-5",
    "1e3",
    "10.0.0.1",
)
FLAGS = (
    *("--nprocs", "--max-restarts", "--grace", "--dtype", "--help"),
    *("--bogus", "-n", "--"),
)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def flags_of(random: Random) -> list[str]:
    drawn: list[str] = []
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        flag, value = random.choice(FLAGS), random.choice(VALUES)
        drawn += random.choice(([flag], [f"{flag}={value}"], [flag, value]))
    return drawn


@pytest.mark.fuzz(sample=40, whole=1000)
def test_the_launcher_starts_what_a_machine_can_run_or_says_why_not(seed, capsys):
    random = Random(f"launch/{seed}")
    arguments = [
        *flags_of(random),
        *random.choice(([], ["run.py"], ["run.py", "a=1"])),
    ]
    environ = {
        name: random.choice(VALUES).strip("'\"")
        for name in random.sample(VARIABLES, random.choice((0, 0, 2, 4)))
    }
    try:
        plan = make_plan(arguments, {"CUDA_VISIBLE_DEVICES": "", **environ})
    except (ProcessLayoutError, UnknownSettingError, SystemExit) as error:
        found = error
    else:
        found = None
    if isinstance(found, SystemExit):  # argparse, which has shown how it is used
        assert found.code == 0 or "error: " in capsys.readouterr().err, arguments
    if found is not None:
        return
    assert 0 < plan.num_ranks < 10_000, arguments
    assert 0 <= plan.grace <= 31_536_000, arguments
    assert plan.max_restarts >= 0, arguments


@pytest.mark.fuzz(sample=40, whole=500)
def test_an_export_of_nothing_says_so_and_writes_nothing(
    seed, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    random = Random(f"export/{seed}")
    places = [text.strip("'") for text in (*PATHS, *WORDS) if "nothing" not in text]
    arguments = [random.choice(places), random.choice(places), *flags_of(random)]
    if random.random() < 0.5:
        arguments = [*random.sample(places, 2), "--dtype=bf16"]
    before = contents(tmp_path)
    # As the stream of a process, which writes what is no character, too.
    errors = io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")
    try:
        with redirect_stderr(errors):
            code = export(arguments)
    except SystemExit as end:
        code = end.code
    errors.seek(0)
    assert code == 2 or capsys.readouterr().out.startswith("usage: "), arguments
    assert errors.read(6).startswith(("[T", "usage:")) or code == 0, arguments
    assert contents(tmp_path) == before, arguments
    assert Path("/dev/null").is_char_device()


def contents(folder: Path) -> set[str]:
    return {
        os.path.join(place, name)
        for place, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }
