# SPDX-License-Identifier: Apache-2.0
"""The guide of fine-tuning, command by command, with the model that it makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.guide_pages import GUIDES, blocks

PAGE = (GUIDES / "fine-tune-from-nothing.md").read_text()


def validation_losses(run: Path) -> dict[int, float]:
    """The loss of each validation of a run, by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


@pytest.mark.full
def test_the_commands_of_the_guide_end_in_a_folder_to_share(tmp_path):
    (make_model,) = blocks(PAGE)
    on_cpu = "tessera train training.sequence_length=128"
    assert f"write `{on_cpu}` where" in PAGE
    commands = "".join(blocks(PAGE, "sh")).replace("tessera train", on_cpu)
    # The program that is installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (tmp_path / "make_model.py").write_text(make_model)
    done = subprocess.run(
        ["bash", "-exc", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for shown in ("fsdp mesh, 2", "step 20/20", "step 24/24", "my-adapters: "):
        assert shown in done.stdout
    for recipe in ("recipe=lora; sets model.lora.rank=16 ", "recipe=finetune; sets "):
        assert recipe in done.stdout
    assert done.stdout.count("data.loss_on=answers") >= 4
    lora = validation_losses(tmp_path / "outputs/lora")
    assert [*lora] == [0, 20, 24]
    assert lora[0] > lora[20] > lora[24]
    whole = validation_losses(tmp_path / "outputs/whole")
    # The adapters add nothing at first: both are the weights as they came.
    assert whole[0] == pytest.approx(lora[0], rel=1e-3)
    assert whole[0] > whole[20]
    assert [*validation_losses(tmp_path / "outputs/held-out")] == [20]
    shared = {file.name for file in (tmp_path / "my-model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= shared
    assert (tmp_path / "my-adapters/adapter_model.safetensors").is_file()
