# SPDX-License-Identifier: Apache-2.0
"""The launcher's own parts, without ranks of JAX."""

import os
import queue
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessera import errors
from tessera.train.runtime import exit_codes, launcher
from tessera.train.runtime.launcher import Attempt, Launcher, LaunchPlan
from tessera.train.runtime.launcher_protocol import Status
from tessera.train.runtime.rank_process import RankProcess

ROOT = Path(__file__).parents[3]

# The package tessera imports JAX, and Python imports it before any of its modules.
WITHOUT_THE_PACKAGE = """
import sys, types
package = types.ModuleType("tessera")
package.__path__ = [sys.argv[1]]
sys.modules["tessera"] = package
import tessera.train.runtime.launch_options, tessera.train.runtime.launcher
print("jax" in sys.modules)
"""


def test_no_module_of_the_launcher_imports_jax():
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(ROOT / "tessera")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_every_exit_code_is_in_the_table():
    page = (ROOT / "docs/guides/reliability.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    codes = {
        value
        for value in vars(exit_codes).values()
        if type(value) is int and value != exit_codes.TERMINATED
    }
    assert codes <= listed
    assert str(exit_codes.TERMINATED) in page
    assert {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TesseraError)
    } <= listed


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (76, 76), (-9, 137)])
def test_a_signal_is_128_and_its_number(returncode, code):
    assert exit_codes.shell_exit_code(returncode) == code


def launch(program: str, grace: float = 120.0, **options) -> int:
    """The exit code of two ranks of a program that is given as text."""
    plan = LaunchPlan(
        (sys.executable, "-c", program),
        num_ranks=2,
        grace=grace,
        **options,
    )
    return Launcher(plan, os.environ).run()


def test_any_program_can_be_launched_and_sees_torchruns_variables(capfdbinary):
    program = "import os; e = os.environ; print(e['RANK'], e['WORLD_SIZE'])"
    assert launch(program) == 0
    seen = capfdbinary.readouterr()
    assert sorted(seen.out.decode().splitlines()) == ["[rank 0] 0 2", "[rank 1] 1 2"]
    assert b"no rank used tessera's joined(...)" in seen.err


@pytest.mark.parametrize("code", [exit_codes.USER_ERROR, exit_codes.WRONG_VALUES])
def test_a_mistake_of_the_user_is_not_tried_again(code, capfd):
    assert launch(f"import sys; sys.exit({code})", max_restarts=3) == code
    assert "restart" not in capfd.readouterr().err


def test_ranks_that_end_as_asked_are_waited_for_and_not_started_again(capfd):
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(1.2)\n"  # it writes what both save
        "    print('saved', flush=True)\n"
        "sys.exit(75)\n"
    )
    assert launch(program, max_restarts=3) == exit_codes.REQUEUE
    seen = capfd.readouterr()
    assert "[rank 0] saved" in seen.out
    assert seen.err.splitlines()[1:] == [
        "[launch] all ranks ended as asked: exit code 75"
    ]


def test_a_rank_that_does_not_end_with_the_others_is_killed_and_no_failure(capfd):
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(600)\n"
        "sys.exit(75)\n"
    )
    assert launch(program, grace=2.0, max_restarts=3) == exit_codes.REQUEUE
    said = capfd.readouterr().err
    assert "not ended 2 s after they were asked: SIGKILL" in said
    assert "restart" not in said


def test_a_rank_that_fails_while_others_end_as_asked_is_the_one_that_counts(capfd):
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(0.3)\n"
        "    sys.exit('no room for what is saved')\n"
        "sys.exit(75)\n"
    )
    assert launch(program) == 1
    assert capfd.readouterr().err.endswith("[rank 0] no room for what is saved\n")


class PretendedRank(RankProcess):
    """A rank without a process, whose exit is queued when the test says so."""

    returncode, is_finished = 0, False

    def __init__(self, rank: int, returncode: int, attempt: Attempt) -> None:
        self.rank, self.returncode = rank, returncode
        self.status, self.is_late = Status(f"step {rank}"), False
        self.ended_at = None
        self._attempt = attempt
        attempt.ranks.append(self)

    def end(self) -> None:
        self.ended_at = time.monotonic()
        self._attempt.events.put(self)

    def finish(self) -> None:
        self.is_finished = True

    def send(self, number: int) -> None:
        del number
        self.end()

    def kill(self) -> None:
        raise AssertionError("no rank has to be killed")


def attempt_of(*returncodes: int) -> tuple[Attempt, list[PretendedRank], list[str]]:
    """An attempt of ranks that end with the given codes, and what it logs."""
    said: list[str] = []
    attempt = Attempt(queue.SimpleQueue(), 60.0, said.append, lambda: None)
    ranks = [
        PretendedRank(rank, code, attempt) for rank, code in enumerate(returncodes)
    ]
    return attempt, ranks, said


def test_a_killed_rank_is_first_though_the_one_that_noticed_is_seen_before_it():
    attempt, ranks, said = attempt_of(1, -signal.SIGKILL)
    for rank in ranks:
        rank.end()
    failure = attempt.watch()
    assert failure is not None
    assert (failure.rank, failure.returncode) == (1, -signal.SIGKILL)
    assert said == ["rank 1: killed by SIGKILL in phase 'step 1'"]


def test_a_killed_rank_is_first_though_it_is_seen_after_the_others_are_asked_to_end():
    attempt, ranks, _ = attempt_of(1, -signal.SIGKILL)
    ranks[0].end()  # The other one's exit is seen when it is sent SIGTERM.
    failure = attempt.watch()
    assert failure is not None
    assert (failure.rank, failure.returncode) == (1, -signal.SIGKILL)


@pytest.mark.parametrize("code", [1, 143, -signal.SIGTERM, -signal.SIGSEGV])
def test_a_rank_that_ends_when_it_is_asked_to_did_not_fail(code):
    attempt, ranks, _ = attempt_of(5, code)
    ranks[0].end()
    attempt.watch()
    assert [failure.rank for failure in attempt.failures] == [0]


def test_restarts_are_bounded(capfd):
    assert launch("import sys; sys.exit(5)", max_restarts=2) == 5
    assert capfd.readouterr().err.count("] restart ") == 2


def test_ranks_whose_interpreter_is_stuck_show_their_stacks_and_end(monkeypatch, capfd):
    monkeypatch.setattr(launcher, "_LATE", 0.5)
    program = (
        "import ctypes, os, time\n"
        "def hold():\n"
        "    ctypes.PyDLL(None).sleep(600)\n"  # keeps the interpreter's lock
        "status = f'{time.monotonic()!r} 0.1 0.0 step 3\\n'\n"
        "os.write(int(os.environ['TESSERA_STATUS']), status.encode())\n"
        "hold()\n"
    )
    assert launch(program) == exit_codes.STALLED
    said = capfd.readouterr().err
    for rank in (0, 1):
        assert f"[launch] rank {rank} has been in phase 'step 3' for " in said
        assert f"[rank {rank}] Fatal Python error: Aborted\n" in said
        assert f'[rank {rank}]   File "<string>", line 3 in hold\n' in said
    assert "exit code 124 in phase 'step 3'\n" in said


def test_what_a_rank_leaves_behind_is_ended_with_it(tmp_path, capfd):
    program = (
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    )
    assert launch(program) == 0
    pid = int((tmp_path / "pid").read_text())
    # A process that was killed is seen for a moment yet.
    deadline = time.monotonic() + 240
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    capfd.readouterr()


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has asked after has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_output_that_is_not_text_or_has_no_end_is_shown_as_it_is(capfdbinary):
    program = (
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.stdout.buffer.write(b'\\xff half a line')\n"
    )
    assert launch(program) == 0
    assert capfdbinary.readouterr().out == b"[rank 1] \xff half a line\n"
