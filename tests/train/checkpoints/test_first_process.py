# SPDX-License-Identifier: Apache-2.0
"""A call that every process has to make says so where it waits for the others."""

import time

import jax

from tessera.train.checkpoints import first_process
from tessera.train.checkpoints.first_process import expecting_all


def test_a_process_that_waits_for_the_others_says_so(monkeypatch, caplog):
    monkeypatch.setattr(first_process, "_PATIENCE", 0.01)
    for count, said in ((1, []), (2, ["rank 0 alone"])):
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        with expecting_all("save_checkpoint"):
            deadline = time.monotonic() + (5.0 if said else 0.1)
            while not caplog.messages and time.monotonic() < deadline:
                time.sleep(0.01)
        assert [text.partition("not ")[2] for text in caplog.messages] == said
