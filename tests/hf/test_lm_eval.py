# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness has the same figures of a folder as by its ``hf`` model.

``make test-hf`` runs it where both environments have ``lm_eval``.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.hf import harness_requests
from tests.train.data import chat_folders
from tests.train.models.published_folders import GEMMA3, gemma3_tensors, write_folder

pytest.importorskip("lm_eval")
PYTHON = os.environ.get("TESSERA_HF_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="make test-hf has Transformers")
MAX_LENGTH = 32


@pytest.fixture
def folder(tmp_path):
    """A random Gemma with a tokenizer that begins texts with ``<bos>``."""
    values = {**GEMMA3, "vocab_size": 300, "eos_token_id": 262, "bos_token_id": 261}
    folder = write_folder(tmp_path / "gemma", gemma3_tensors(values), values)
    chat_folders.write_folder(folder, "gemma", marked=False)
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    begin = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", begin)]
    )
    tokenizer.save(path)
    assert begin == 261
    return folder


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, "[[1,4],[fsdp,tp]]"])
def test_every_request_is_answered_as_by_the_hf_model(folder, mesh):
    from tessera.train.commands.lm_eval import register

    script = Path(harness_requests.__file__)
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder), str(MAX_LENGTH)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    model = register()(str(folder), mesh, max_length=MAX_LENGTH, batch_size=3)
    made = harness_requests.results(model)
    for name in ("loglikelihood", "loglikelihood_rolling"):
        np.testing.assert_allclose(made[name], expected[name], rtol=0, atol=1e-4)
    assert made["generate_until"] == expected["generate_until"]
