# SPDX-License-Identifier: Apache-2.0
"""What a subcommand says of a command line that it does not understand."""

import pytest

from tessera.train.commands import export, generate, push, report


@pytest.mark.parametrize(
    ("command", "words", "code", "fix"),
    [
        (export, ["run=outputs/mine"], "T502", "tessera export outputs/mine folder"),
        (export, ["a", "b", "--hf"], "T501", "tessera export outputs/mine folder"),
        (export, ["a", "b", "--dtype=f8"], "T502", "tessera export outputs/mine adap"),
        (generate, [], "T502", "tessera generate folder --chat --system="),
        (generate, ["run", "--promp=x"], "T501", "tessera generate folder --chat "),
        (push, ["folder"], "T502", "tessera push my-model my-name/my-model"),
        (report, ["--html=x", "run"], "T501", "tessera report outputs/mine"),
    ],
)
def test_mistakes_show_how_the_command_is_written(command, words, code, fix, capsys):
    assert command.main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"[{code}] the command line of tessera ")
    assert f"  fix: {fix}" in shown
