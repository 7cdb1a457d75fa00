# SPDX-License-Identifier: Apache-2.0
"""Every row of the table for PyTorch users runs, pasted in order after the loop."""

import re
from pathlib import Path

import pytest

from tests.documents import guide_pages

PAGE = Path(__file__).parents[2] / "docs/start/quickstart-pytorch.md"


@pytest.mark.slow(reason="it compiles the steps of a page")
def test_the_rows_of_the_table_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loop, imports, accelerate = guide_pages.blocks(PAGE.read_text())
    rows = re.findall(r"^\| .* \| .* \| (?:`(.+)`)? *\|$", PAGE.read_text(), re.M)
    assert len(rows) > 20
    names = {}
    for code in (loop, imports, *rows, accelerate):
        if not code.startswith("tessera launch "):
            guide_pages.execute(code, code.partition("\n")[0], names)
    shown = capsys.readouterr().out
    assert "communication over dp" in shown
    assert names["logits"].dtype == "bfloat16"
    assert (tmp_path / "weights.safetensors").exists()
    assert (tmp_path / "checkpoints/3/manifest.sha256").exists()
