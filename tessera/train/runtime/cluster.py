# SPDX-License-Identifier: Apache-2.0
"""Detects this process's rank in its run, from environment variables.

``detect`` asks one source after another and takes the first that answers: the
variables of torchrun, which this launcher sets too, of Slurm, MPI, and of an indexed
Kubernetes job. If none answers, the process is alone.

JAX detects Slurm, Open MPI and Kubernetes too, but does not skip incomplete variables,
such as those of a shell inside a job, and does not say why it chose a source. Here an
incomplete source is skipped, and what it lacked is noted with the choice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from typing import Final, TypeAlias
from zlib import crc32

from tessera.errors import ProcessLayoutError

Address: TypeAlias = tuple[str, int]
Note: TypeAlias = Callable[[str], None]

DEFAULT_PORT: Final = 29500
LOOPBACK: Final = "127.0.0.1"
# Pairs of ports for jobs that have a number and no port: above the range from which
# systems assign ports, an even one for the coordinator, the next for the rendezvous.
_FIRST_PORT: Final = 61440
_NUM_PAIRS: Final = 2048
# MPI -> its variables for rank, world size, local rank and local size.
_MPI: Final = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Cluster:
    """This process among the processes of its run.

    Attributes:
      rank: Its number.
      world_size: Processes of the run.
      local_rank: Its number on its machine.
      local_size: Processes on its machine.
      coordinator: Host and port at which JAX's coordinator listens, in rank 0; None for
        a process that is alone. The rendezvous takes the next port. The loopback
        interface if all ranks are on one machine.
      source: Where this comes from.
      notes: Sources that were skipped because some of their variables are missing.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    coordinator: Address | None = None
    source: str = "no launcher"
    notes: tuple[str, ...] = ()

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes of the run are known to be on this machine."""
        return self.local_size == self.world_size

    def __str__(self) -> str:
        if self.coordinator is None:
            text = f"a single process: {self.source}"
        else:
            host, port = self.coordinator
            text = (
                f"rank {self.rank} of {self.world_size}, by {self.source}; "
                f"coordinator {host}:{port}"
            )
        return "; ".join((text, *self.notes))


def detect(environ: Mapping[str, str]) -> Cluster:
    """This process's rank and run, from the first source that has them.

    Args:
      environ: The environment variables.

    Raises:
      ProcessLayoutError: [T704] variables contradict each other.

    Example:
      >>> torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
      >>> detect(torchrun | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
      ... # doctest: +ELLIPSIS
      Cluster(rank=3, world_size=8, local_rank=3, local_size=1, ...)
    """
    notes: list[str] = []
    for source in (_from_torchrun, _from_slurm, _from_mpi, _from_pods):
        cluster = source(environ, notes.append)
        if cluster is None:
            continue
        if cluster.world_size == 1:
            return Cluster(source=f"{cluster.source} started no other")
        _check_rank(cluster)
        if not cluster.is_on_one_machine:
            return cluster
        _, port = cluster.coordinator or (LOOPBACK, DEFAULT_PORT)
        return replace(cluster, coordinator=(LOOPBACK, port))
    return Cluster(notes=tuple(notes))


def _check_rank(cluster: Cluster) -> None:
    if not 0 <= cluster.rank < cluster.world_size:
        raise ProcessLayoutError(
            "a process has a rank that its run does not have",
            got=f"rank {cluster.rank} of {cluster.world_size} processes, by "
            f"{cluster.source}",
            fix=f"ranks count from 0 to {max(cluster.world_size - 1, 0)}",
        )


def _from_torchrun(environ: Mapping[str, str], note: Note) -> Cluster | None:
    numbers = _numbers(environ, ("RANK", "WORLD_SIZE"), note)
    if numbers is None:
        return None
    if numbers[1] > 1 and not environ.get("MASTER_ADDR"):
        note("RANK and WORLD_SIZE are set and MASTER_ADDR is not: not torchrun")
        return None
    # MASTER_PORT belongs to torchrun's store, which listens there for the whole run.
    port = _port(environ, DEFAULT_PORT) + 1
    return Cluster(
        *numbers,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
        coordinator=(_master_host(environ), port),
        source="tessera launch"
        if "TESSERA_LAUNCHER" in environ
        else "torchrun's RANK and WORLD_SIZE",
    )


def _from_slurm(environ: Mapping[str, str], note: Note) -> Cluster | None:
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
    if numbers[1] == 1:
        return Cluster(source="Slurm's step")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    if not (host := _first_host(nodes)):
        note("SLURM_STEP_NODELIST is not set: no step of Slurm")
        return None
    node = _number(environ, "SLURM_NODEID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    job = f"{environ['SLURM_JOB_ID']}.{step}"
    return Cluster(
        *numbers,
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_size=_tasks_on_node(tasks, node) or 1,
        coordinator=(host, _port_of_job(job)),
        source=f"step {job} of Slurm",
    )


def _first_host(nodes: str) -> str:
    """The first machine of ``SLURM_STEP_NODELIST``.

    Example:
      >>> _first_host("gpu[007-009,012],login1")
      'gpu007'
      >>> _first_host("rack[1-2]node[03-04].cluster")
      'rack1node03.cluster'
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()).strip()


def _tasks_on_node(tasks: str, node: int) -> int | None:
    """The number of tasks on a machine, from ``SLURM_STEP_TASKS_PER_NODE``.

    Example:
      >>> _tasks_on_node("4(x2),1", 1), _tasks_on_node("4(x2),1", 2)
      (4, 1)
    """
    for part in tasks.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return None
        repeats = int(match[2] or 1)
        if node < repeats:
            return int(match[1])
        node -= repeats
    return None


def _from_mpi(environ: Mapping[str, str], note: Note) -> Cluster | None:
    for kind, names in _MPI.items():
        numbers = _numbers(environ, names[:2], note)
        if numbers is None:
            continue
        local_rank, local_size = (_number(environ, name, 0) for name in names[2:])
        job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID", "")
        host = _master_host(environ)
        if numbers[1] > max(local_size, 1) and not host:
            raise ProcessLayoutError(
                "the processes of MPI are on several machines, and none is named",
                got=f"{names[1]}={numbers[1]}, {local_size} of them on this machine",
                fix="say where rank 0 is: mpirun -x MASTER_ADDR=<its address>",
            )
        return Cluster(
            *numbers,
            local_rank=local_rank,
            local_size=local_size or 1,
            coordinator=(host, _port(environ, _port_of_job(job))),
            source=f"{kind}'s {names[0]}",
        )
    if "PMIX_RANK" in environ:
        note("PMIX_RANK is set, and nothing says how many processes there are")
    return None


def _from_pods(environ: Mapping[str, str], note: Note) -> Cluster | None:
    """From an indexed job of Kubernetes."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    if "WORLD_SIZE" not in environ or not environ.get("MASTER_ADDR"):
        # Indexed jobs also run pods that have nothing to do with each other.
        note(
            "JOB_COMPLETION_INDEX is set, and WORLD_SIZE and MASTER_ADDR are not: "
            "no run of several pods"
        )
        return None
    numbers = _numbers(environ, ("JOB_COMPLETION_INDEX", "WORLD_SIZE"), note)
    if numbers is None:
        return None
    return Cluster(
        *numbers,
        coordinator=(_master_host(environ), _port(environ, DEFAULT_PORT)),
        source="Kubernetes' JOB_COMPLETION_INDEX",
    )


def _numbers(
    environ: Mapping[str, str], names: Sequence[str], note: Note
) -> list[int] | None:
    """The values of variables; None, with a note, unless all are numbers."""
    present = [name for name in names if environ.get(name, "").isdecimal()]
    if len(present) == len(names):
        return [int(environ[name]) for name in names]
    # Beside JOB_COMPLETION_INDEX, WORLD_SIZE does not come from torchrun.
    is_pod = present == ["WORLD_SIZE"] and "JOB_COMPLETION_INDEX" in environ
    if present and not is_pod:
        missing = " and ".join(name for name in names if name not in present)
        note(f"{' and '.join(present)} without {missing}: passed over")
    return None


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else default


def _master_host(environ: Mapping[str, str]) -> str:
    """MASTER_ADDR without the brackets of an IPv6 address; "" if it is not set.

    Raises T704 at once for what can be neither a name nor an address: a name that is
    not known yet is waited for.
    """
    text = environ.get("MASTER_ADDR", "")
    is_bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if is_bracketed else text
    if not is_bracketed and re.fullmatch(r"[\w.-]*", host):
        return host
    try:
        IPv6Address(host)
    except ValueError:
        raise ProcessLayoutError(
            "MASTER_ADDR is no name and no address of a machine",
            got=f"MASTER_ADDR={text}",
            fix="set the port with MASTER_PORT, and leave it out of MASTER_ADDR"
            if re.search(r":\d+$", text)
            else "write rank 0's name or IP address alone: node1, 10.0.0.1 or fd00::2",
        ) from None
    return host


def _port(environ: Mapping[str, str], default: int) -> int:
    if not (text := environ.get("MASTER_PORT")):
        return default
    # Up to three ports are taken: torchrun's, the coordinator's, the rendezvous'.
    if text.isdecimal() and 0 < int(text) < 65534:
        return int(text)
    raise ProcessLayoutError(
        "MASTER_PORT is no port",
        got=f"MASTER_PORT={text}",
        fix="use a number from 1 to 65533",
    )


def _port_of_job(job: str) -> int:
    """A port that all processes of a job derive alike."""
    return _FIRST_PORT + 2 * (crc32(job.encode()) % _NUM_PAIRS)
