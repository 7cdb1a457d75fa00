# SPDX-License-Identifier: Apache-2.0
"""Parses the launcher's command line, and makes a plan of it and the environment."""

import re
import sys
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import Final

from tessera.errors import ProcessLayoutError
from tessera.runtime.accelerators import find_accelerators
from tessera.runtime.cluster import (
    DEFAULT_PORT,
    LOOPBACK,
    Address,
    Cluster,
    detect,
    read_address,
)
from tessera.runtime.launcher import Plan

_A_YEAR_S: Final = 31_536_000

_DESCRIPTION: Final = """\
Start a program in several processes, which find each other, and end them together.

  python -m tessera.launch --nprocs=4 run_training.py model=tiny
  python -m tessera.launch --nprocs=4 --nnodes=2 --node-rank=0 --master-addr=10.0.0.1 \\
      run_training.py model=tiny
"""
_EPILOG: Final = """\
Without --nnodes and --node-rank, the variables WORLD_SIZE (processes of the run), RANK
(the first of this machine), MASTER_ADDR and MASTER_PORT say the same; without those, a
step of Slurm with one task for each machine, or an indexed job of Kubernetes.
"""


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Parse what to start on this machine.

    Args:
      arguments: The command line, without the program's name.
      environ: The environment variables.

    Raises:
      ProcessLayoutError: [T704] they do not describe one run.
    """
    options = _parser().parse_args(_with_nprocs_value(arguments))
    _check_numbers(options)
    num_local = _num_local(options.nprocs, environ)
    first, total, address = _ranks(options, num_local, environ)
    if address is None and options.master_port:
        address = LOOPBACK, options.master_port
    return Plan(
        command=(sys.executable, *_program(options.program), *options.arguments),
        num_local=num_local,
        first_rank=first,
        world_size=total,
        coordinator=address,
        max_restarts=options.max_restarts,
        grace=options.grace,
    )


def _program(name: str) -> tuple[str, ...]:
    """What Python runs: a file, or, for the command ``tessera``, its module."""
    return ("-m", "tessera") if name == "tessera" else (name,)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m tessera.launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number = parser.add_argument
    number(
        "--nprocs",
        default="auto",
        metavar="N",
        help="processes on this machine; without a number, or left out, one for each "
        "accelerator here, and one where there is none",
    )
    number("--nnodes", type=int, metavar="N", help="machines of the run")
    number("--node-rank", type=int, metavar="I", help="which this one is, from 0")
    number("--master-addr", metavar="HOST", help="the machine of rank 0")
    number(
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"where rank 0 listens, there and on the next port (default: "
        f"{DEFAULT_PORT}; on a single machine, ports that are free)",
    )
    number(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often to start all processes again after one failed (default: 0)",
    )
    number(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="from asking processes to end to killing them (default: 30)",
    )
    number("program", help="the Python program, or tessera for its own subcommands")
    number("arguments", nargs=REMAINDER, help="its arguments")
    return parser


def _with_nprocs_value(arguments: Sequence[str]) -> list[str]:
    """Give ``--nprocs`` a value, so that it does not take the program for one."""
    result = list(arguments)
    for index, argument in enumerate(result):
        following = result[index + 1] if index + 1 < len(result) else ""
        if argument == "--nprocs" and not following.isdecimal() and following != "auto":
            result[index] = "--nprocs=auto"
        previous = result[index - 1] if index else ""
        is_value = previous.startswith("--") and "=" not in previous
        if not argument.startswith("-") and not is_value:
            break
    return result


def _check_numbers(options: Namespace) -> None:
    """Raise T704 for numbers outside the limits of their flags."""
    limits = {
        "nnodes": (1, 2**20),
        "node_rank": (0, 2**20),
        "master_port": (1, 65534),
        "max_restarts": (0, 2**31 - 1),
        "grace": (0, _A_YEAR_S),
    }
    wrong = {
        name: value
        for name in limits
        if (value := getattr(options, name)) is not None
        # In this form, NaN is outside.
        and not limits[name][0] <= value <= limits[name][1]
    }
    if not wrong:
        return
    flags = {name: f"--{name.replace('_', '-')}" for name in wrong}
    raise ProcessLayoutError(
        f"{' and '.join(flags.values())} cannot have this value",
        got=", ".join(f"{flag}={wrong[name]}" for name, flag in flags.items()),
        fix="\n".join(
            f"use {flag} from {limits[name][0]} to {limits[name][1]}"
            for name, flag in flags.items()
        ),
    )


def _num_local(text: str, environ: Mapping[str, str]) -> int:
    if text == "auto":
        return len(find_accelerators(environ)) or 1
    if re.fullmatch("0*[1-9][0-9]{0,3}", text):
        return int(text)
    raise ProcessLayoutError(
        "--nprocs is a number of processes",
        got=f"--nprocs={text}",
        fix="use a number from 1 to 9999, or none for one process for each accelerator",
    )


def _ranks(
    options: Namespace, num_local: int, environ: Mapping[str, str]
) -> tuple[int, int, Address | None]:
    """The first rank of this machine, the run's world size, and rank 0's address."""
    if options.nnodes is not None or options.node_rank is not None:
        return _from_options(options, num_local, environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_variables(options, num_local, environ)
    machines = detect(environ)
    if machines.world_size > 1:
        return _from_scheduler(options, machines, num_local)
    return 0, num_local, None


def _from_options(
    options: Namespace, num_local: int, environ: Mapping[str, str]
) -> tuple[int, int, Address | None]:
    nodes = 1 if options.nnodes is None else options.nnodes
    node = options.node_rank
    if node is None and nodes == 1:
        node = 0
    if node is None or not 0 <= node < nodes:
        raise ProcessLayoutError(
            "--nnodes and --node-rank say which machine this is of how many",
            got=f"--nnodes={nodes}, "
            + ("no --node-rank" if node is None else f"--node-rank={node}"),
            fix=f"use --node-rank=0 to {max(nodes - 1, 0)}, another on each machine",
        )
    address = _master(options, environ) if nodes > 1 else None
    return node * num_local, nodes * num_local, address


def _from_variables(
    options: Namespace, num_local: int, environ: Mapping[str, str]
) -> tuple[int, int, Address | None]:
    values = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    got = ", ".join(f"{n}={v}" if v else f"no {n}" for n, v in values.items())
    if not all(re.fullmatch("[0-9]{1,7}", value) for value in values.values()):
        raise ProcessLayoutError(
            "RANK and WORLD_SIZE belong together, as numbers",
            got=got,
            fix="export both (RANK is the first rank of this machine), or neither",
        )
    first, total = map(int, values.values())
    if first % num_local or first + num_local > total:
        firsts = list(range(0, total - num_local + 1, num_local))
        legal = " or ".join(map(str, firsts[:8]))
        raise ProcessLayoutError(
            "RANK is the first rank of this machine, which has no room for its "
            "processes there",
            got=f"{got}, --nprocs={num_local}",
            fix=(f"use RANK={legal}; or " if legal else "")
            + "count machines: unset RANK and WORLD_SIZE and use --nnodes, --node-rank",
        )
    return first, total, _master(options, environ) if total > num_local else None


def _from_scheduler(
    options: Namespace, machines: Cluster, num_local: int
) -> tuple[int, int, Address | None]:
    """For a scheduler that started one launcher on each machine."""
    if machines.local_size > 1:
        raise ProcessLayoutError(
            "several launchers run on this machine",
            got=f"{machines}: {machines.local_size} of them are here",
            fix="let the scheduler start one task for each machine (srun "
            "--ntasks-per-node=1), or the program itself without a launcher",
        )
    assert machines.coordinator is not None
    host, port = machines.coordinator
    address = options.master_addr or host, options.master_port or port
    return machines.rank * num_local, machines.world_size * num_local, address


def _master(options: Namespace, environ: Mapping[str, str]) -> Address:
    host = options.master_addr or environ.get("MASTER_ADDR")
    if not host:
        raise ProcessLayoutError(
            "the run has several machines, and none is named as that of rank 0",
            got="neither --master-addr nor MASTER_ADDR",
            fix="give all machines --master-addr=<address of the first>",
        )
    port = options.master_port or environ.get("MASTER_PORT") or DEFAULT_PORT
    return read_address(f"{host}:{port}", "the address of rank 0")
