# SPDX-License-Identifier: Apache-2.0
"""Which tests ``.ci/run`` takes for those beside a change."""

import runpy
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci/touched_tests.py"
GATE = runpy.run_path(str(SCRIPT))


@pytest.fixture
def repository(tmp_path):
    for name in (
        *("tessera/mesh.py", "tessera/ops/kernel.py", "tessera/ops/moe/layer.py"),
        *("tests/test_mesh.py", "tests/ops/test_kernel.py", "tests/ops/test_norms.py"),
        *("tests/ops/moe/test_layer.py", "tests/ops/moe/drawn.py", "README.md"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["tessera/ops/kernel.py"], ["tests/ops/test_kernel.py"]),
        (["tessera/ops/rare.py"], ["tests/ops"]),
        (["tessera/mesh.py"], ["tests/test_mesh.py"]),
        (["tests/ops/moe/drawn.py"], ["tests/ops/moe"]),
        (["tests/gone/drawn.py", "tests/ops/test_gone.py"], []),
        (["tessera/rare.py", "README.md", "tests/conftest.py"], []),
        (["benchmarks/gpu_steps/rows.py"], ["tests/benchmarks"]),
        (["benchmarks/results/times.json", "run_training.py"], []),
        (["tests/ops/test_norms.py"], ["tests/ops/test_norms.py"]),
        (["tests/ops/test_gone.py"], []),
        (["tessera/ops/rare.py", "tests/ops/moe/test_layer.py"], ["tests/ops"]),
        (
            ["tessera/ops/moe/rare.py", "tests/test_mesh.py"],
            ["tests/test_mesh.py", "tests/ops/moe"],
        ),
    ],
)
def test_the_tests_of_the_same_path_or_of_the_nearest_folder(
    changed, tests, repository
):
    found = GATE["touched_tests"](repository, changed)
    assert [str(path) for path in found] == tests


def test_a_change_begins_at_the_tag_green_or_eight_hours_before(tmp_path):
    def git(*arguments, hour=0):
        date = f"2026-01-02T{hour:02}:00:00Z"
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path,
            check=True,
            env={
                "GIT_AUTHOR_DATE": date,
                "GIT_COMMITTER_DATE": date,
                "PATH": "/usr/bin:/bin",
            },
        )

    git("init", "-q")
    for hour, name in ((1, "first"), (3, "second"), (13, "third"), (14, "fourth")):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-qm", name, hour=hour)
    assert GATE["changed_files"](tmp_path) == ["fourth", "third"]
    git("tag", "green", "HEAD~3")
    assert GATE["changed_files"](tmp_path) == ["fourth", "second", "third"]
