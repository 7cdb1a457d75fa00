# SPDX-License-Identifier: Apache-2.0
"""The guide of fine-tuning, command by command, with the model that it makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.guide_pages import GUIDES, blocks

PAGE = (GUIDES / "fine-tune-from-nothing.md").read_text()


@pytest.mark.full
def test_the_commands_of_the_guide_end_in_a_folder_to_share(tmp_path):
    (make_model,) = blocks(PAGE)
    commands = "".join(blocks(PAGE, "sh"))
    # The program that is installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (tmp_path / "make_model.py").write_text(make_model)
    done = subprocess.run(
        ["bash", "-exc", f"python make_model.py\n{commands}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for shown in ("step 30/30", "step 40/40", "validation", "my-adapters: "):
        assert shown in done.stdout
    shared = {file.name for file in (tmp_path / "my-model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= shared
    assert (tmp_path / "my-adapters/adapter_model.safetensors").is_file()
