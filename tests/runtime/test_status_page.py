# SPDX-License-Identifier: Apache-2.0
"""The page on which ranks say their phase."""

import stat
from math import inf

import pytest

from tessera.runtime.status_page import Command, StatusPage


def test_what_a_rank_says_the_launcher_reads(tmp_path):
    page = StatusPage.create(tmp_path / "status", 2)
    rank = StatusPage(tmp_path / "status")
    assert page.status(1).phase == ""
    rank.enter(1, "step 12", 100.0, 900.0)
    said = page.status(1)
    assert (said.phase, said.since, said.deadline) == ("step 12", 100.0, 900.0)
    assert said.failed_at == 0
    assert page.status(0).deadline == inf


def test_the_first_failure_stays_through_later_phases(tmp_path):
    page = StatusPage.create(tmp_path / "status", 1)
    page.fail(0, 5.0)
    page.enter(0, "end", 6.0, inf)
    page.fail(0, 7.0)
    assert page.status(0).failed_at == 5.0


def test_the_launchers_word_reaches_every_rank(tmp_path):
    page = StatusPage.create(tmp_path / "status", 2)
    rank = StatusPage(tmp_path / "status")
    assert rank.command == Command.CONTINUE
    page.command = Command.SHOW_STACKS_AND_END
    assert rank.command == Command.SHOW_STACKS_AND_END
    assert rank.num_ranks == 2


def test_a_page_is_the_users_own_and_blank_again_for_the_next_attempt(tmp_path):
    path = tmp_path / "status"
    page = StatusPage.create(path, 1)
    page.command = Command.END
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert StatusPage.create(path, 1).command == Command.CONTINUE


def test_another_file_is_no_status_page(tmp_path):
    path = tmp_path / "status"
    path.write_bytes(bytes(256))
    with pytest.raises(ValueError, match="no status page"):
        StatusPage(path)
