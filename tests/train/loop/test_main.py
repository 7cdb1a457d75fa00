# SPDX-License-Identifier: Apache-2.0
"""How a process ends whose run leaves by ``SystemExit``."""

import pytest

from tessera.train.loop import train
from tessera.train.loop.main import main
from tessera.train.runtime import process_exit


@pytest.fixture
def leave_by(monkeypatch):
    """Has the run raise ``SystemExit``; the end of the process is an exception."""

    class Ended(Exception):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    def by(value: object) -> None:
        def run(composed: object) -> None:
            raise SystemExit(value)

        monkeypatch.setattr(train, "run", run)
        monkeypatch.setattr(process_exit, "exit_now", end)
        main(["data=synthetic"])

    by.ended = Ended
    return by


def test_a_run_that_was_stopped_ends_its_process_at_once(leave_by):
    with pytest.raises(leave_by.ended, match="75"):
        leave_by(75)


@pytest.mark.parametrize("value", ["the loss of a user's model has a message", None])
def test_the_exit_of_code_that_the_run_imports_is_left_to_python(leave_by, value):
    with pytest.raises(SystemExit) as caught:
        leave_by(value)
    assert caught.value.code == value
