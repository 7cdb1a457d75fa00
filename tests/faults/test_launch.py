# SPDX-License-Identifier: Apache-2.0
"""What becomes of a run when a rank fails: real processes, over the loopback interface.

Every test has a hard limit of time, and kills whatever is left of its processes.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tessera.train.runtime.launcher import free_port

PROGRAM = Path(__file__).parent / "small_run.py"
# Of a test: shorter than the timeouts that would end a run by themselves.
LIMIT = 240.0


@dataclass
class Outcome:
    """A run that ended: exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line that a person reads."""
        return self.err.splitlines()[-1]


class Launch:
    """A launcher, or a rank, in a process of its own."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_", "TESSERA_", "SLURM_"))
        }
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**inherited, "JAX_PLATFORMS": "cpu", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> Outcome:
        out, err = self.process.communicate(timeout=LIMIT)
        return Outcome(self.process.returncode, out, err)

    def read_until(self, text: str) -> str:
        """Its output up to a line that holds a text."""
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if text in line:
                return said
        raise AssertionError(f"{text!r} was not said: {said}")

    def kill(self) -> None:
        """End it and all of its processes, those in sessions of their own too."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()


def descendants(pid: int) -> list[int]:
    """Every process that comes from one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    children = parents.get(pid, [])
    return [*children, *(d for child in children for d in descendants(child))]


@pytest.fixture
def start() -> Iterator[Callable[..., Launch]]:
    """Starts Python programs, and kills those that are left."""
    started: list[Launch] = []

    def begin(*command: str, environ: dict[str, str] | None = None) -> Launch:
        started.append(Launch([*command], environ or {}))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


@pytest.fixture
def launch(start) -> Callable[..., Launch]:
    return lambda *arguments: start("-m", "tessera.train.commands.launch", *arguments)


@pytest.fixture
def start_ranks(start) -> Callable[..., list[Launch]]:
    """Starts ranks without a launcher, by their numbers and the size of their run."""

    def begin(
        *ranks: tuple[int, int], port: int | None = None, options: tuple[str, ...] = ()
    ) -> list[Launch]:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
        return [
            start(
                *(str(PROGRAM), *options),
                environ={**where, "RANK": str(rank), "WORLD_SIZE": str(size)},
            )
            for rank, size in ranks
        ]

    return begin


@pytest.fixture
def run(launch) -> Callable[..., Outcome]:
    def run_two(*options: str, flags: tuple[str, ...] = ()) -> Outcome:
        given = ["--nprocs=2", "--grace=5", *flags, str(PROGRAM), *options]
        return launch(*given).wait()

    return run_two


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# --- runs that go well


@pytest.mark.full
def test_ranks_that_another_launcher_starts(start_ranks):
    """One process on each machine, as torchrun says it."""
    for rank, one in enumerate(start_ranks((0, 2), (1, 2))):
        outcome = one.wait()
        assert outcome.code == 0, outcome.err
        assert f": rank {rank} of 2, by torchrun's RANK" in outcome.out
        assert "step 3: 2\n" in outcome.out


@pytest.mark.slow(reason="it starts a process")
def test_a_single_process_starts_no_coordinator(launch):
    outcome = launch("--nprocs=1", str(PROGRAM)).wait()
    assert outcome.code == 0, outcome.err
    assert "a single process: tessera launch started no other" in outcome.out
    assert "[rank 0] step 3: 1\n" in outcome.out


# --- a rank that fails


@pytest.mark.slow(reason="it starts processes")
def test_the_traceback_of_the_rank_that_failed_is_the_last_thing_one_reads(run):
    outcome = run("fault=raise")
    assert outcome.code == 1
    assert outcome.last == "[rank 1] RuntimeError: the step is broken"
    end = outcome.err[outcome.err.rindex("[launch]") :]
    assert "failed first" in end.splitlines()[0]
    assert "rank 1: exit code 1 in phase 'step 2'" in end.splitlines()[0]
    # Its cause is there, and nothing of another rank's.
    assert "[rank 1] KeyError: 'first'" in end
    assert "[rank 0]" not in end


@pytest.mark.slow(reason="it starts processes")
@pytest.mark.parametrize(
    "phase", [pytest.param("compile", marks=pytest.mark.full), "step"]
)
def test_a_rank_that_is_killed_ends_the_others(run, phase):
    outcome = run("fault=kill", f"phase={phase}")
    assert outcome.code == 137
    where = {"compile": "compile", "step": "step 2"}[phase]
    assert "failed first" in outcome.err
    assert f"rank 1: killed by SIGKILL in phase '{where}'" in outcome.err


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_no_launcher_watches_end_when_another_is_killed(start_ranks, rank):
    """Without a collective, and long before JAX misses a heartbeat."""
    ranks = start_ranks((0, 2), (1, 2), options=("fault=vanish",))
    for one in ranks:
        one.read_until("waiting")
    killed, left = ranks[rank], ranks[1 - rank]
    killed.process.kill()
    killed_at = time.monotonic()
    outcome = left.wait()
    assert time.monotonic() - killed_at < 60  # JAX misses heartbeats after 600 here
    assert outcome.code == 143
    lost = f"[T715] rank {rank} is gone, and rank {1 - rank} ends with it"
    assert lost in outcome.err


@pytest.mark.full
def test_a_rank_that_sleeps_for_ever_is_ended_with_the_stacks_of_all(run):
    outcome = run("fault=sleep", "deadline=3")
    assert outcome.code == 124
    assert "[T708] rank " in outcome.err
    assert (
        "does not get on: phase 'step 2' takes longer than runtime.step" in outcome.err
    )
    assert re.search(r"stacks of rank \d, in phase 'step \d'", outcome.err)
    assert re.search(r"small_run.py\", line \d+ in sleep_for_ever", outcome.err)
    for rank in (0, 1):
        assert re.search(rf"got: rank {rank}: step \d, for \d", outcome.err)
        assert re.search(rf"\[launch\] rank {rank} was in: step \d, for", outcome.err)


@pytest.mark.full
def test_a_rank_that_the_system_stops_beyond_its_deadline_is_killed(run):
    """SIGSTOP: not even its watchdog runs, and SIGABRT waits for a SIGCONT."""
    outcome = run("fault=stop", "deadline=3")
    assert outcome.code == 124
    assert "[T708] rank 0 does not get on: phase 'step " in outcome.err
    assert re.search(r"\[launch\] rank 1 was in: step 2, for \d", outcome.err)


@pytest.mark.full
def test_a_rank_whose_interpreter_does_nothing_is_ended_from_outside(run):
    outcome = run("fault=hold", "deadline=3", "on=0")
    assert outcome.code != 0
    assert re.search(r"small_run.py\", line \d+ in misbehave", outcome.err)


# --- ranks that are not of one run


@pytest.mark.slow(reason="it starts processes")
def test_another_configuration_on_one_rank_is_refused_on_all(run):
    outcome = run("seed_of_rank_1=5")
    assert outcome.code == 76
    for rank in (0, 1):
        assert f"[rank {rank}] [T707] the ranks have different conf" in outcome.err
    said = "configuration: training.seed is 0 on rank 0; 5 on rank 1"
    assert outcome.err.count(said) >= 2


@pytest.mark.full
def test_another_step_on_one_rank_is_refused_on_all(run):
    outcome = run("fault=odd")
    assert outcome.code == 76
    assert "[T707] the ranks compiled different steps" in outcome.err
    assert re.search(r"got: step: fingerprint is \w+ on rank 0; \w+ on", outcome.err)
    assert "step 1" not in outcome.out


@pytest.mark.full
def test_a_missing_rank_is_named(start_ranks):
    for one in start_ranks((0, 3), (1, 3), options=("rendezvous=2",)):
        outcome = one.wait()
        assert outcome.code == 76
        assert "[T706] the ranks did not meet within 2 s" in outcome.err
        assert "got: rank 2 of 3 is missing" in outcome.err


@pytest.mark.full
def test_a_rank_that_is_there_twice_is_named(start_ranks):
    for one in start_ranks((0, 2), (0, 2)):
        outcome = one.wait()
        assert outcome.code == 76
        assert "rank 0 is there 2 times: " in outcome.err


@pytest.mark.full
def test_a_rank_0_that_comes_late_is_told_soon_and_disturbs_nobody(start_ranks):
    port = free_port()
    going_on = start_ranks((0, 2), (1, 2), port=port, options=("fault=listen",))
    going_on[1].read_until("listening")
    # By itself it would wait for ten minutes, which is longer than this test does.
    (late,) = start_ranks((0, 2), port=port, options=("rendezvous=600",))
    outcome = late.wait()
    assert outcome.code == 76
    assert "[T705] a port of rank 0 is busy" in outcome.err
    assert f"got: 127.0.0.1:{port + 1}: Address already in use" in outcome.err
    going_on[1].process.send_signal(signal.SIGUSR1)
    going_on[1].read_until("got SIGUSR1")


@pytest.mark.full
def test_a_rank_of_a_run_of_another_size_is_named(start_ranks):
    for one in start_ranks((0, 2), (1, 3)):
        outcome = one.wait()
        assert outcome.code == 76
        assert "is of a run of 3 ranks, rank 0 of one of 2" in outcome.err


@pytest.mark.full
def test_a_busy_port_is_named(start_ranks):
    port = free_port()
    with socket.create_server(("127.0.0.1", port + 2)):
        (rank_0,) = start_ranks((0, 2), port=port)
        outcome = rank_0.wait()
    assert outcome.code == 76
    assert "[T705] a port of rank 0 is busy" in outcome.err
    assert f"got: 127.0.0.1:{port + 2}: Address already in use" in outcome.err


# --- restarts and signals


@pytest.mark.full
def test_a_failed_run_is_started_again_and_keeps_what_it_shares(run):
    outcome = run("fault=raise", "attempts=1", flags=("--max-restarts=2",))
    assert outcome.code == 0, outcome.err
    assert "[launch] restart 1 of 2\n" in outcome.err
    assert "restart 2" not in outcome.err
    for rank in (0, 1):
        # Each line says whose it is.
        assert f"[rank {rank}] step 3: 2\n" in outcome.out
        assert (
            f": rank {rank} of 2, by tessera launch; coordinator 127.0" in outcome.out
        )
    shared = re.findall(r"\[rank \d\] attempt (\d) shares (.*)", outcome.out)
    assert [number for number, _ in sorted(shared)] == ["0", "0", "1", "1"]
    assert len({said for _, said in shared}) == 1


@pytest.mark.full
def test_signals_reach_the_ranks_which_are_killed_when_they_do_not_end(launch):
    given = ["--nprocs=2", "--grace=2", str(PROGRAM), "fault=listen"]
    started = launch(*given)
    started.read_until("[rank 1] listening")
    started.process.send_signal(signal.SIGUSR1)
    started.read_until("[rank 1] got SIGUSR1")
    started.process.send_signal(signal.SIGTERM)
    started.read_until("[rank 1] got SIGTERM")
    outcome = started.wait()
    assert outcome.code == 137
    # Rank 0 does not handle SIGUSR1, shows its stacks, and goes on.
    assert re.search(
        r'\[rank 0\]   File ".*small_run.py", line \d+ in run', outcome.err
    )
    assert "[launch] SIGTERM to all ranks, which have 2 s to end" in outcome.err
    assert "not ended 2 s after they were asked: SIGKILL" in outcome.err


@pytest.mark.full
def test_ranks_end_when_their_launcher_is_killed(launch):
    started = launch("--nprocs=2", str(PROGRAM), "fault=listen")
    said = started.read_until("[rank 1] listening")
    pids = [int(pid) for pid in re.findall(r"\] pid (\d+): ", said)]
    assert len(pids) == 2
    started.process.kill()
    until = time.monotonic() + LIMIT
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
