# SPDX-License-Identifier: Apache-2.0
"""Which process of how many this one is, from its arguments or its environment.

``detect`` asks one source after another, takes the first that knows, and says which and
why: arguments, this launcher's variables, torchrun's, Slurm's, those of MPI, those of
an indexed job of Kubernetes. Where none knows, the process is alone.

A source whose variables are there in part only is passed over: shells inside of jobs
have such environments. What it lacked is told with the choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from zlib import crc32

from tessera.errors import ProcessLayoutError
from tessera.runtime.slurm import first_host, tasks_on_node

Address = tuple[str, int]

# Pairs of ports for jobs that bring a number and no port: above those that systems
# give away by themselves, an even one for the coordinator and the next for the meeting.
_FIRST_PORT: Final = 61440
_NUM_PAIRS: Final = 2048
DEFAULT_PORT: Final = 29500
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    """The place of this process in its run.

    Attributes:
      rank: Its number.
      world_size: Processes of the run.
      local_rank: Its number on its machine.
      local_size: Processes on its machine.
      coordinator: Where rank 0 lets JAX's coordinator listen, host and port; None of
        a process that is alone. The ranks meet on the port after it. The loopback
        interface where all ranks are on one machine.
      source: Who says so.
      notes: Sources that were passed over though some of their variables are there.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    coordinator: Address | None = None
    source: str = "no launcher"
    notes: tuple[str, ...] = field(default=())

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes of the run are known to be on this machine."""
        return self.local_size == self.world_size

    def __str__(self) -> str:
        if self.coordinator is None:
            said = f"a single process: {self.source}"
        else:
            host, port = self.coordinator
            said = (
                f"rank {self.rank} of {self.world_size}, by {self.source}; "
                f"coordinator {host}:{port}"
            )
        return "; ".join((said, *self.notes))


def detect(
    environ: Mapping[str, str],
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Cluster:
    """The place of this process, by the first source that knows it.

    Args:
      environ: The environment variables.
      coordinator_address: ``host:port`` of rank 0. This and the next two are given
        together or not at all.
      num_processes: Processes of the run.
      process_id: The rank.

    Raises:
      ProcessLayoutError: [T704] arguments or variables are incomplete or contradict
        each other.

    Example:
      >>> torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
      >>> detect(torchrun | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
      ... # doctest: +ELLIPSIS
      Cluster(rank=3, world_size=8, local_rank=3, local_size=1, ...)
    """
    explicit = {
        "runtime.coordinator_address": coordinator_address,
        "runtime.num_processes": num_processes,
        "runtime.process_id": process_id,
    }
    if any(value is not None for value in explicit.values()):
        return _explicit(explicit)
    notes: list[str] = []
    for read in (_launched, _torchrun, _slurm, _mpi, _kubernetes):
        found = read(environ, notes.append)
        if found is not None and found.world_size > 1:
            _check(found)
            return _unseen(found) if found.is_on_one_machine else found
        if found is not None:
            return Cluster(source=f"{found.source} started no other")
    return Cluster(notes=tuple(notes))


def read_address(text: str, what: str) -> Address:
    """A host and a port of ``host:port`` or ``[address]:port``.

    Args:
      text: What was given.
      what: Its name for the message.

    Raises:
      ProcessLayoutError: [T704] it is of another form, or no such port exists.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # One port more than the coordinator's is taken, for the meeting of the ranks.
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65535):
        raise ProcessLayoutError(
            f"{what} is no address",
            got=f"{what}={text}",
            fix="write host:port, with a port from 1 to 65534",
        )
    return host, int(port)


def _explicit(given: Mapping[str, str | int | None]) -> Cluster:
    missing = [name for name, value in given.items() if value is None]
    if missing:
        there = ", ".join(f"{k}={v}" for k, v in given.items() if v is not None)
        raise ProcessLayoutError(
            "a run of several processes is told where its parts are, all or nothing",
            got=f"{there}, without {' and '.join(missing)}",
            fix="give all three, or none and a launcher: python -m tessera.launch",
        )
    address, count, rank = given.values()
    found = Cluster(
        rank=int(rank or 0),
        world_size=int(count or 0),
        coordinator=read_address(str(address), "runtime.coordinator_address"),
        source="runtime.process_id",
    )
    _check(found)
    return Cluster(source="runtime.num_processes=1") if count == 1 else found


def _check(found: Cluster) -> None:
    if 0 <= found.rank < found.world_size:
        return
    raise ProcessLayoutError(
        "a process has a rank that its run does not have",
        got=f"rank {found.rank} of {found.world_size} processes, by {found.source}",
        fix=f"ranks count from 0 to {max(found.world_size - 1, 0)}",
    )


def _unseen(found: Cluster) -> Cluster:
    """The same run where no other machine reaches it: none has a rank of it."""
    _, port = found.coordinator or (LOOPBACK, DEFAULT_PORT)
    return replace(found, coordinator=(LOOPBACK, port))


Note = Callable[[str], None]


def _launched(environ: Mapping[str, str], note: Note) -> Cluster | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = _numbers(environ, [f"TESSERA_{name}" for name in names], note)
    if numbers is None or not environ.get("TESSERA_COORDINATOR"):
        return None
    where = read_address(environ["TESSERA_COORDINATOR"], "TESSERA_COORDINATOR")
    return Cluster(*numbers, coordinator=where, source="tessera.launch")


def _torchrun(environ: Mapping[str, str], note: Note) -> Cluster | None:
    numbers = _numbers(environ, ("RANK", "WORLD_SIZE"), note)
    if numbers is None:
        return None
    rank, count = numbers
    if count > 1 and not environ.get("MASTER_ADDR"):
        note("RANK and WORLD_SIZE are set and MASTER_ADDR is not: not torchrun")
        return None
    host = environ.get("MASTER_ADDR", "")
    # MASTER_PORT belongs to torchrun's store, which listens there for the whole run.
    port = _port(environ.get("MASTER_PORT") or str(DEFAULT_PORT), "MASTER_PORT") + 1
    return Cluster(
        rank=rank,
        world_size=count,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
        coordinator=(host, port),
        source="torchrun's RANK and WORLD_SIZE",
    )


def _slurm(environ: Mapping[str, str], note: Note) -> Cluster | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal():
        note("inside a Slurm job, and not started by srun: no step of it")
        return None
    total = "SLURM_STEP_NUM_TASKS"
    total = total if total in environ else "SLURM_NTASKS"
    numbers = _numbers(environ, ("SLURM_PROCID", total), note)
    if numbers is None:
        return None
    rank, count = numbers
    if count == 1:
        return Cluster(source="Slurm's step")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    host = first_host(nodes)
    if not host:
        note("SLURM_STEP_NODELIST is not set: no step of Slurm")
        return None
    node = _number(environ, "SLURM_NODEID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    number = f"{environ['SLURM_JOB_ID']}.{step}"
    return Cluster(
        rank=rank,
        world_size=count,
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_size=tasks_on_node(tasks, node) or 1,
        coordinator=(host, _port_of(number)),
        source=f"step {number} of Slurm",
    )


def _mpi(environ: Mapping[str, str], note: Note) -> Cluster | None:
    kinds = {
        "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "PMI": ("PMI_RANK", "PMI_SIZE"),
    }
    locals_ = {
        "Open MPI": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "PMI": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }
    for kind, names in kinds.items():
        numbers = _numbers(environ, names, note)
        if numbers is None:
            continue
        rank, count = numbers
        local_rank, local_size = (_number(environ, name, 0) for name in locals_[kind])
        job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID", "")
        host = environ.get("MASTER_ADDR") or _mpi_host(environ)
        if count > max(local_size, 1) and not host:
            raise ProcessLayoutError(
                "the processes of MPI are on several machines, and none is named",
                got=f"{names[1]}={count}, {local_size} of them on this machine",
                fix="say where rank 0 is: mpirun -x MASTER_ADDR=<its address>",
            )
        port = environ.get("MASTER_PORT")
        return Cluster(
            rank=rank,
            world_size=count,
            local_rank=local_rank,
            local_size=local_size or 1,
            coordinator=(host, _port(port, "MASTER_PORT") if port else _port_of(job)),
            source=f"{kind}'s {names[0]}",
        )
    if "PMIX_RANK" in environ:
        note("PMIX_RANK is set, and nothing says how many processes there are")
    return None


def _mpi_host(environ: Mapping[str, str]) -> str:
    """Where Open MPI up to 4 says that it was started: its rank 0 is there."""
    _, _, addresses = environ.get("OMPI_MCA_orte_hnp_uri", "").partition("//")
    return addresses.split(",")[0].split(":")[0]


def _kubernetes(environ: Mapping[str, str], note: Note) -> Cluster | None:
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    if "WORLD_SIZE" not in environ or not environ.get("MASTER_ADDR"):
        # Indexed jobs also run things that have nothing to do with each other.
        note(
            "JOB_COMPLETION_INDEX is set, and WORLD_SIZE and MASTER_ADDR are not: "
            "no run of several pods"
        )
        return None
    numbers = _numbers(environ, ("JOB_COMPLETION_INDEX", "WORLD_SIZE"), note)
    if numbers is None:
        return None
    port = environ.get("MASTER_PORT") or str(DEFAULT_PORT)
    return Cluster(
        *numbers,
        coordinator=(environ["MASTER_ADDR"], _port(port, "MASTER_PORT")),
        source="Kubernetes' JOB_COMPLETION_INDEX",
    )


def _numbers(
    environ: Mapping[str, str], names: list[str] | tuple[str, ...], note: Note
) -> list[int] | None:
    """The values of variables; None, and a note, unless all are numbers."""
    there = [name for name in names if environ.get(name, "").isdecimal()]
    if len(there) == len(names):
        return [int(environ[name]) for name in names]
    # JOB_COMPLETION_INDEX goes with a WORLD_SIZE that is no sign of torchrun.
    if there and not (there == ["WORLD_SIZE"] and "JOB_COMPLETION_INDEX" in environ):
        lacking = " and ".join(name for name in names if name not in there)
        note(f"{' and '.join(there)} without {lacking}: passed over")
    return None


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise


def _port(text: str, name: str) -> int:
    # Three ports may be taken: torchrun's own, the coordinator's, the meeting's.
    if text.isdecimal() and 0 < int(text) < 65534:
        return int(text)
    raise ProcessLayoutError(
        f"{name} is no port", got=f"{name}={text}", fix="use a number from 1 to 65533"
    )


def _port_of(job: str) -> int:
    """A port that the processes of a job choose alike."""
    return _FIRST_PORT + 2 * (crc32(job.encode()) % _NUM_PAIRS)
