# SPDX-License-Identifier: Apache-2.0
"""Which addresses the processes of a run listen on, by what the system says of them.

All ranks on one machine: the loopback interface alone, whoever started them, and also
where the name of the machine leads to another interface. Else the chosen interface.
"""

import ipaddress
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tessera.train.runtime.addresses import address_towards
from tessera.train.runtime.launcher import free_port

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the table of sockets is Linux's"
)
PROGRAM = Path(__file__).parent / "small_run.py"
# Nothing is sent there: it is an address of documentation, which has a route or none.
OUTSIDE = address_towards(("192.0.2.1", 9))

Start = Callable[..., set[str]]


@pytest.fixture
def listening() -> Iterator[Start]:
    """Starts both ranks of a run, and gives the addresses on which they listen."""
    ranks: list[subprocess.Popen[str]] = []

    def start(*environments: dict[str, str], through: tuple[str, ...] = ()) -> set[str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_", "TESSERA_", "SLURM_"))
        }
        for environment in environments:
            ranks.append(
                subprocess.Popen(
                    [*through, sys.executable, str(PROGRAM), "fault=listen"],
                    env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        # Rank 1 is in its second step then, and rank 0 waits for it there.
        assert ranks[-1].stdout is not None
        said = ""
        for line in ranks[-1].stdout:
            said += line
            if "listening" in line:
                break
        else:
            raise AssertionError(said)
        found = [address for rank in ranks for address in sockets_of(rank.pid)]
        # The coordinator, and on each rank the collectives between CPU devices.
        assert len(found) >= 3, found
        return {address for address, _ in found}

    yield start
    for rank in ranks:
        rank.kill()
        rank.communicate(timeout=60)


def sockets_of(pid: int) -> list[tuple[str, int]]:
    """The addresses and ports on which a process listens."""
    mine = set[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            mine.update(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    found = list[tuple[str, int]]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in mine:
                host, port = columns[1].split(":")
                found.append((address_of(host), int(port, 16)))
    return found


def address_of(digits: str) -> str:
    """An address of the table, whose words have their bytes turned around."""
    words = [
        bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)
    ]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def test_the_table_of_sockets_is_read_as_it_is():
    with socket.create_server(("127.0.0.1", 0)) as one:
        assert ("127.0.0.1", one.getsockname()[1]) in sockets_of(os.getpid())
    with socket.create_server(("", 0)) as one:
        assert ("0.0.0.0", one.getsockname()[1]) in sockets_of(os.getpid())


def slurm(rank: int, **changed: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        **changed,
    }


@pytest.mark.full
def test_tasks_of_slurm_on_one_machine_are_not_seen_from_outside(listening):
    assert listening(slurm(0), slurm(1)) == {"127.0.0.1"}


@pytest.mark.full
def test_not_even_where_the_machine_is_called_after_its_address(listening):
    """What is to be found by a machine's name alone would listen there."""
    if OUTSIDE is None:
        pytest.skip("this machine has no other interface")
    name = f'hostname {OUTSIDE}; exec "$0" "$@"'
    through = ("unshare", "--uts", "sh", "-c", name)
    tried = subprocess.run([*through, "true"], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip("a machine cannot be given another name here")
    named = {"SLURM_STEP_NODELIST": OUTSIDE}
    found = listening(slurm(0, **named), slurm(1, **named), through=through)
    assert found == {"127.0.0.1"}


def torchrun(rank: int, host: str, port: int, local_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


@pytest.mark.full
def test_processes_of_torchrun_on_one_machine_are_not_seen_from_outside(listening):
    given = OUTSIDE or "localhost", free_port(), 2
    assert listening(torchrun(0, *given), torchrun(1, *given)) == {"127.0.0.1"}


@pytest.mark.full
def test_a_run_of_two_machines_listens_on_the_interface_that_was_chosen(listening):
    """Both are this one, which the variables do not say."""
    if OUTSIDE is None:
        pytest.skip("this machine has no other interface")
    given = OUTSIDE, free_port(), 1
    assert listening(torchrun(0, *given), torchrun(1, *given)) == {OUTSIDE}
