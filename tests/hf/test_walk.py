# SPDX-License-Identifier: Apache-2.0
"""The guide, command by command: from a published folder to one for Transformers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs/guides/pretrained-weights.md"
PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has Transformers")


def test_the_commands_of_the_guide_are_enough(tmp_path):
    assert PYTHON is not None
    subprocess.run([PYTHON, HERE / "make_folder.py", tmp_path], check=True, timeout=120)
    first_section = GUIDE.read_text().partition("\n## ")[0]
    commands, program = re.findall(
        r"^```(?:sh)?\n(.*?)^```$", first_section, re.M | re.S
    )
    # Rows that a CPU computes in moments.
    on_cpu = "tessera train training.sequence_length=128"
    commands = commands.replace("tessera train", on_cpu)
    # The program that is installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    trained = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert "step 20/20" in trained.stdout
    assert "my-gemma: " in trained.stdout
    loaded = subprocess.run(
        [PYTHON, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.startswith("def main(")
