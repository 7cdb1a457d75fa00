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
from pathlib import Path
from typing import Final, NoReturn

from tessera.errors import (
    ProcessLayoutError,
    SettingValueError,
    UnknownSettingError,
    did_you_mean,
)
from tessera.train.runtime.accelerators import find_accelerators
from tessera.train.runtime.cluster import detect
from tessera.train.runtime.launcher import LaunchPlan
from tessera.train.runtime.python_process import module_command

_A_YEAR_S: Final = 31_536_000
_DESCRIPTION: Final = """\
Start a program in several processes of this machine, and end them together.

  tessera launch --nprocs=4 train model=tiny
  tessera launch --nprocs=4 my_script.py

On a cluster, torchrun, Slurm, MPI or a Kubernetes JobSet starts the program instead.
Without one, start the program itself once on each machine, with RANK, WORLD_SIZE and
MASTER_ADDR exported.
"""
_TESSERA: Final = module_command("tessera.__main__")
# What to write for options of torchrun, mpirun and accelerate.
_PROCESSES: Final = ("nproc_per_node", "nproc", "n", "np", "num_processes")
_OF_MACHINES: Final = ("nnodes", "node_", "master_", "rdzv_", "num_mach", "machine_")
# Those of ``tessera`` that several processes can run; a test compares them.
_SUBCOMMANDS: Final = ("train", "export", "generate", "plan", "report", "doctor")
_EXPORTED: Final = "RANK", "WORLD_SIZE", "MASTER_ADDR"


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchPlan:
    """Parse what to start.

    Args:
      arguments: The command line, without the program's name.
      environ: The environment variables.

    Raises:
      ProcessLayoutError: [T704] this process already has a rank, of another launcher,
        or the variables of a run on several machines are exported.
      UnknownSettingError: [T501] a word is no file and no subcommand of tessera, or an
        option does not exist.
      SettingValueError: [T502] it is both.
      SystemExit: With code 2 if the options are wrong, with 0 after ``--help``.
    """
    options = _parser().parse_args(arguments)
    _check_alone(environ)
    command = _command(options.program, options.arguments)
    is_own = command[: len(_TESSERA)] == _TESSERA
    return LaunchPlan(
        command=command,
        shows_help=is_own and "--help" in options.arguments,
        num_ranks=options.nprocs or len(find_accelerators(environ)) or 1,
        max_restarts=options.max_restarts,
        grace=options.grace,
    )


def _command(name: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """What Python runs: a file, or the command tessera with one of its subcommands."""
    if name == "tessera":
        return (*_TESSERA, *arguments)
    is_file = Path(name).is_file() or Path(name, "__main__.py").is_file()
    is_subcommand = name in _SUBCOMMANDS
    if is_file and is_subcommand:
        raise SettingValueError(
            f"{name!r} is a program in this folder and a subcommand of tessera",
            got=f"tessera launch {name}",
            fix=f"write ./{name} for the program, or tessera {name}",
        )
    if is_file or not name.isalpha():
        return (sys.executable, name, *arguments)
    if not is_subcommand:
        raise UnknownSettingError(
            f"{name!r} is no file here, and no subcommand of many processes",
            got=f"tessera launch {name}",
            fix=did_you_mean(name, _SUBCOMMANDS),
        )
    return (*_TESSERA, name, *arguments)


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise T704 in a process that has a rank: each would start a complete run."""
    cluster = detect(environ)
    exported = [name for name in _EXPORTED if environ.get(name)]
    size = environ.get("WORLD_SIZE")
    if cluster.world_size == 1 and (size == "1" or (not size and len(exported) < 2)):
        return
    variables = ", ".join(f"{name}={environ[name]}" for name in exported)
    raise ProcessLayoutError(
        "this process is one of several already, of another launcher",
        got=f"{cluster}; {variables}" if variables else str(cluster),
        fix="leave out tessera launch: torchrun, srun, mpirun or the JobSet starts "
        "run_training.py itself, and so does a person who exports RANK, WORLD_SIZE "
        "and MASTER_ADDR on each machine; or unset RANK and WORLD_SIZE, for a run on "
        "this machine",
    )


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """T501 for options that do not exist; other mistakes are argparse's."""
        _, unknown, options = message.partition("unrecognized arguments: ")
        if not unknown:
            super().error(message)
        fixes = dict.fromkeys(map(_instead, options.split()))
        raise UnknownSettingError(
            "tessera launch has no such option", got=options, fix="\n".join(fixes)
        )


def _instead(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    if name in _PROCESSES:
        return f"{option}: write --nprocs=<processes>"
    if name.startswith(_OF_MACHINES):
        return (
            f"{option}: tessera launch is for one machine; on several, torchrun or "
            "srun starts `tessera train`, or each exports RANK, WORLD_SIZE and "
            "MASTER_ADDR and starts it"
        )
    return "tessera launch --help lists all; those of the program stand behind it"


def _parser() -> ArgumentParser:
    parser = _Parser(
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
