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
from typing import Final

from tessera.errors import ProcessLayoutError
from tessera.runtime.accelerators import find_accelerators
from tessera.runtime.cluster import detect
from tessera.runtime.launcher import Plan

_A_YEAR_S: Final = 31_536_000
_DESCRIPTION: Final = """\
Start a program in several processes of this machine, and end them together.

  python -m tessera.launch --nprocs=4 run_training.py model=tiny

A run on several machines is started by torchrun, Slurm, MPI or a Kubernetes JobSet.
"""


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Parse what to start.

    Args:
      arguments: The command line, without the program's name.
      environ: The environment variables.

    Raises:
      ProcessLayoutError: [T704] this process already has a rank, of another launcher.
      SystemExit: With code 2 if the options are wrong, with 0 after ``--help``.
    """
    options = _parser().parse_args(arguments)
    _check_has_no_rank(environ)
    # For the command tessera, Python runs its module.
    program = ("-m", "tessera") if options.program == "tessera" else (options.program,)
    return Plan(
        command=(sys.executable, *program, *options.arguments),
        num_ranks=options.nprocs or len(find_accelerators(environ)) or 1,
        max_restarts=options.max_restarts,
        grace=options.grace,
    )


def _check_has_no_rank(environ: Mapping[str, str]) -> None:
    """Raise T704 in a run of several launchers: each would be a run of its own."""
    cluster = detect(environ)
    if cluster.world_size > 1 or environ.get("WORLD_SIZE", "1") != "1":
        raise ProcessLayoutError(
            "the launcher starts a run on one machine, and this process is already "
            "one of several",
            got=f"WORLD_SIZE={environ['WORLD_SIZE']}"
            if cluster.world_size == 1
            else str(cluster),
            fix="leave out the launcher: torchrun, srun, mpirun or the JobSet starts "
            "run_training.py itself; or unset RANK and WORLD_SIZE",
        )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m tessera.launch",
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
    option("program", help="the Python program, or tessera for its own subcommands")
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
