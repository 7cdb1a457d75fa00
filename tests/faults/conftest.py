# SPDX-License-Identifier: Apache-2.0
"""The trainer in this process, for what is refused before anything runs."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from tessera.train.loop import train
from tests.train.config.command_lines import run_from_command_line

ROOT = Path(__file__).parents[2]


@pytest.fixture
def refuse(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Gives a command line to the program, in ``tmp_path``; what it says against it.

    Sees that it ends with code 2 and a coded error, that nothing was compiled, and that
    nothing below ``tmp_path`` is other than it was, names aside if it ``may_rename``.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, may_rename: bool = False) -> str:
        compiled: list[str] = []

        def listen(event: str, seconds: float, **_: str) -> None:
            del seconds
            compiled.append(event)

        before = contents(tmp_path)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            code = run_from_command_line(train.run, arguments)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        seen = capsys.readouterr()
        assert code == 2, seen.err
        assert seen.out == ""
        assert "Traceback" not in seen.err
        assert not [event for event in compiled if "backend_compile" in event]
        after = contents(tmp_path)
        if may_rename:
            assert Counter(after.values()) == Counter(before.values())
        else:
            assert after == before
        return seen.err

    return run


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder: what is in its files, where its links lead."""
    found: dict[str, bytes | str | None] = {}
    for path in folder.rglob("*"):
        is_readable = path.is_file() and not path.is_symlink()
        found[str(path)] = path.read_bytes() if is_readable else None
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
    return found
