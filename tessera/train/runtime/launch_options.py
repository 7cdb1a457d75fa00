# SPDX-License-Identifier: Apache-2.0
"""Parses the launcher's command line."""

import sys
from argparse import (
    REMAINDER,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tessera.errors import ProcessLayoutError
from tessera.train.runtime.accelerators import find_accelerators
from tessera.train.runtime.cluster import detect
from tessera.train.runtime.launcher import LaunchPlan
from tessera.train.runtime.python_process import module_command

_A_YEAR_S: Final = 31_536_000
_DESCRIPTION: Final = """\
Start a program in several processes of this machine, and end them together.

  tessera launch --nprocs=4 run_training.py model=tiny

On a cluster, torchrun, Slurm, MPI or a Kubernetes JobSet starts the program instead.
Without one, start a launcher on each machine, with MASTER_ADDR, MASTER_PORT, WORLD_SIZE
(processes on all machines) and RANK (the first of them on this machine) exported.
"""
_EXPORTED: Final = "RANK", "WORLD_SIZE", "MASTER_ADDR"
_THIS_MACHINE: Final = "unset RANK and WORLD_SIZE, for a run on this machine"
# What launchers set for the processes that they start, or in a job.
_OF_LAUNCHERS: Final = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
)


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchPlan:
    """Parse what to start.

    Args:
      arguments: The command line, without the program's name.
      environ: The environment variables.

    Raises:
      ProcessLayoutError: [T704] this process already has a rank, of another launcher,
        or the variables of a run on several machines contradict each other.
      SystemExit: With code 2 if the options are wrong, with 0 after ``--help``.
    """
    options = _parser().parse_args(arguments)
    plan = LaunchPlan(
        command=_command(options.program, options.arguments),
        num_ranks=options.nprocs or len(find_accelerators(environ)) or 1,
        max_restarts=options.max_restarts,
        grace=options.grace,
    )
    return _with_ranks(plan, environ)


def _command(name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """What Python runs: a file, or the command tessera with one of its subcommands."""
    if name == "tessera":
        return module_command("tessera.__main__", *arguments)
    is_file = Path(name).is_file() or Path(name, "__main__.py").is_file()
    if is_file or not name.isalpha():
        return (sys.executable, name, *arguments)
    return module_command("tessera.__main__", name, *arguments)


def _with_ranks(plan: LaunchPlan, environ: Mapping[str, str]) -> LaunchPlan:
    """The plan with its ranks of a run on several machines, if exported variables say.

    Raises T704 where it would otherwise start a complete run on each machine.
    """
    cluster = detect(environ)
    missing = [name for name in _EXPORTED if not environ.get(name)]
    size = environ.get("WORLD_SIZE")
    if cluster.world_size == 1 and (size == "1" or (not size and len(missing) > 1)):
        return plan
    if cluster.coordinator is None:
        raise ProcessLayoutError(
            "a run on several machines needs RANK, WORLD_SIZE and MASTER_ADDR",
            got=", ".join(f"{n}={environ[n]}" for n in _EXPORTED if n not in missing)
            + (f", without {' and '.join(missing)}" if missing else ""),
            fix=f"export all three on each machine; or {_THIS_MACHINE}",
        )
    setters = [name for name in _OF_LAUNCHERS if name in environ]
    if setters:
        raise ProcessLayoutError(
            "this process is one of several already, of another launcher",
            got=f"{cluster}; {setters[0]} is set",
            fix="leave out tessera launch: torchrun, srun, mpirun or the JobSet starts "
            f"run_training.py itself; or {_THIS_MACHINE}",
        )
    first, world_size = cluster.rank, cluster.world_size
    if plan.num_ranks == world_size and first == 0:
        return plan
    _check_ranks(plan, first, world_size)
    host, port = cluster.coordinator
    # The coordinator takes the port after MASTER_PORT.
    return replace(
        plan, first_rank=first, world_size=world_size, master=(host, port - 1)
    )


def _check_ranks(plan: LaunchPlan, first: int, world_size: int) -> None:
    """Raise T704 for ranks that a run on several machines does not have."""
    last = first + plan.num_ranks - 1
    if last >= world_size:
        raise ProcessLayoutError(
            "this machine would start ranks that the run does not have",
            got=f"ranks {first} to {last} of {world_size}, by RANK={first}, "
            f"--nprocs={plan.num_ranks} and WORLD_SIZE={world_size}",
            fix="RANK is that of the first process here: 0 on the first machine, "
            f"{plan.num_ranks} on the next; WORLD_SIZE counts the processes of all "
            "machines",
        )
    if plan.max_restarts:
        raise ProcessLayoutError(
            "a launcher cannot start the ranks of other machines again",
            got=f"--max-restarts={plan.max_restarts}, and ranks {first} to {last} of "
            f"{world_size} here",
            fix="leave out --max-restarts and start the launchers of all machines "
            "again after a failure, or use torchrun, Slurm or a JobSet, which do",
        )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="tessera launch",
        description=_DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    option = parser.add_argument
    option(
        "--nprocs",
        type=_number(int, 1, 9999),
        metavar="N",
        help="processes (default: one for each accelerator here, or one)",
    )
    option(
        "--max-restarts",
        type=_number(int, 0, 2**31 - 1),
        default=0,
        metavar="N",
        help="how often to start all processes again after one failed (default: 0)",
    )
    option(
        "--grace",
        type=_number(float, 0, _A_YEAR_S),
        default=30.0,
        metavar="SECONDS",
        help="from asking processes to end to killing them (default: 30)",
    )
    option("program", help="the Python program, or a subcommand of tessera")
    option("arguments", nargs=REMAINDER, help="its arguments")
    return parser


def _number(
    kind: type[int] | type[float], least: int, most: int
) -> Callable[[str], float]:
    """A parser of numbers in a range."""

    def read(text: str) -> float:
        try:
            number = kind(text)
            if least <= number <= most:  # NaN is not
                return number
        except ValueError:
            pass
        raise ArgumentTypeError(f"{text[:40]!r} is no number from {least} to {most}")

    return read
